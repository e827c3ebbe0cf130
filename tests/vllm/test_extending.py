"""A worker extends a context as with transformers, and unusable passages are refused."""

import itertools
from dataclasses import replace

import pytest
import torch

import gracekv
from gracekv.decode import Limit
from gracekv.distributed.sharding import WHOLE
from gracekv.errors import StoreError
from gracekv.hf.extend import closed_run, limited_run
from gracekv.testing.models import tiny_model
from gracekv.vllm import ContextStore, export
from gracekv.vllm.exporting import rotated_back
from gracekv.vllm.jobs import Jobs
from gracekv.vllm.orders import order_of
from gracekv.vllm.recording import Chunk
from gracekv.vllm.served_model import ServedModel
from support.compressing_engine import tokens_of
from support.recording_worker import Worker, engine
from support.thread_exchange import connected

LENGTH, PASSAGE = 60, 100


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 97, (400,), generator=torch.Generator().manual_seed(3))


def compressed(model, ids, recipe="gracekv-agnostic"):
    """A context, and the token read after it."""
    prompt = gracekv.Prompt.from_ids(ids[: LENGTH + 1], (0, LENGTH), question_end=LENGTH)
    return gracekv.compress(model, prompt, ratio=3, pipeline=recipe)


def talking(model, ids, root, recipe="gracekv-agnostic"):
    """A context, and a worker of the store to which it is exported as "talk"."""
    result = compressed(model, ids, recipe)
    export(result, root / "talk")
    return result, Worker(model, root)


def read_over(model, result, ids):
    """Queries, keys and values of a passage that the model reads over `result`, by layer.

    They are rotated as in an engine, whose positions start with the passage.
    """
    seen, names = {}, ("q_proj", "k_proj", "v_proj")
    layers = model.get_decoder().layers
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, args, output, key=(number, name): seen.update({key: output[0]})
        )
        for number, layer in enumerate(layers)
        for name in names
    ]
    with torch.inference_mode():
        model(ids[None], past_key_values=result.new_cache())
    for hook in hooks:
        hook.remove()
    dim, at = layers[0].self_attn.head_dim, torch.arange(len(ids))
    rope = ServedModel.of(engine(model)).rope(len(ids), torch.device("cpu"))
    for number in range(len(layers)):
        parts = (seen[number, name].view(len(ids), -1, dim) for name in names)
        query, key, value = (x.transpose(0, 1) for x in parts)
        yield [x.transpose(0, 1) for x in (rope.rotate(query, at), rope.rotate(key, at), value)]


def read(worker, model, result, ids, *, pieces=(), **options):
    """Let the worker read a passage over the context "talk"."""
    order = order_of(
        {"extend": {"name": "talk", "ratio": 2, **options}},
        recipe_of=lambda name: worker.store.header(name).recipe,
    )
    past = "talk", worker.store.load("talk").header.digest
    parts, edges = list(read_over(model, result, ids)), [0, *pieces, len(ids)]
    for start, end in itertools.pairwise(edges):
        chunk = Chunk("0", order, 0, start, end - start, len(ids), past)
        recording = worker.compressor.begin(chunk, "0")
        for layer, (query, key, value) in enumerate(parts):
            own = [worker.shard.own_heads(x[start:end], 1) for x in (query, key, value)]
            recording.add(layer, start, *own, query.shape[2] ** -0.5)
        worker.found = worker.compressor.outcome(idle=False)


def extend(worker, model, result, ids, **options):
    """Let the worker extend the context "talk"; the context and its header."""
    read(worker, model, result, ids, **options)
    made = worker.outcome()
    assert made.reason == ""
    return worker.store.load("talk"), made.header


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "knorm", "expected-attention", "snapkv"])
@pytest.mark.parametrize("pieces", [(), (7, 30)])
def test_an_extended_context_is_that_of_transformers(model, ids, tmp_path, recipe, pieces):
    result, worker = talking(model, ids, tmp_path, recipe)
    for _ in range(2):
        first, passage = result.packed.length, ids[result.packed.length :][:PASSAGE]
        # Transformers also reads the token after the context behind the passage.
        after = result.prompt.ids[-1:]
        context, header = extend(worker, model, result, torch.cat([passage, after]), pieces=pieces)
        result = result.extend(passage, ratio=2)
        want = rotated_back(model, result.packed)
        assert header.length == want.length == first + PASSAGE
        assert (header.recipe, header.entries) == (recipe, int(want.entries().sum()))
        got, kept = tokens_of(context.layers), tokens_of(want.layers)
        assert len(got & kept) >= 0.99 * len(kept)
        if got != kept:
            return  # a tie: later passages are read over other entries
        for mine, theirs in zip(context.layers, want.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(mine.log_multiplicity, theirs.log_multiplicity)
    # The file still holds the first context.
    assert ContextStore(tmp_path).header("talk").length == LENGTH


def test_a_context_stays_continued_as_it_was(model, ids, tmp_path):
    result, worker = talking(model, ids, tmp_path)
    before = worker.store.header("talk")
    _, header = extend(worker, model, result, ids[LENGTH : LENGTH + PASSAGE], save=True)
    assert header.continuation == before.continuation
    again = ContextStore(tmp_path).load("talk")
    assert again.header == header
    assert tokens_of(again.layers) == tokens_of(worker.store.load("talk").layers)
    # A passage may be one token, such as an answer that stays whole.
    assert extend(worker, model, result, ids[:2], ratio=1)[1].length == header.length + 1


def by_transformers(result, passage, limit, ratio=2):
    """The result of a conversation's compaction under a limit."""
    longer = result.extend(passage, ratio=ratio)
    run = limited_run(longer, limit)
    return type(longer).from_runs(longer.model, longer.prompts, [run], longer.pipeline)


def begun(model, root, ranks):
    """The heads and the worker of each rank."""
    shards = connected(ranks) if ranks > 1 else [WHOLE]
    heads = [(x.rank * 4 // ranks, (x.rank + 1) * 4 // ranks) for x in shards]
    return heads, [Worker(model, root, x, heads=own) for x, own in zip(shards, heads, strict=True)]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_limit_cuts_as_a_conversation_s_does(model, ids, tmp_path, ranks, save):
    """Four passages under a limit that the second one reaches; scores outlive the process."""
    result, limit = compressed(model, ids), Limit(entries_per_head=40, every=8, window=4)
    export(result, tmp_path / "talk")
    (heads, workers), sizes = begun(model, tmp_path, ranks), []
    for _ in range(4):
        passage, after = ids[result.packed.length :][:30], result.prompt.ids[-1:]
        options = {"limit": limit.to_dict(), "save": save}
        for worker in workers:
            read(worker, model, result, torch.cat([passage, after]), **options)
        made = [worker.outcome() for worker in workers]
        assert {x.reason for x in made} == {""}
        result = by_transformers(result, passage, limit)
        want = tokens_of(result.packed.layers)
        loaded = [x.store.load("talk", made[0].header.digest) for x in workers]
        firsts = [first for first, _ in heads]
        got = set().union(*map(tokens_of, (x.layers for x in loaded), firsts))
        # Scores of earlier passages are stored in 16 bits.
        assert len(got) == len(want) == made[0].header.entries
        assert len(got & want) >= 0.99 * len(want)
        assert made[0].header.length == result.packed.length
        sizes.append(len(got))
        heads, workers = begun(model, tmp_path, ranks) if save else (heads, workers)
    assert sizes[1:] == [36 * len(result.packed.layers) * 4] * 3
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_positions_are_closed_as_a_conversation_s_are(ids, tmp_path, ranks):
    """Four passages; the model has positions for three. The limit cuts no entry."""
    known, size = 128, 30
    model = tiny_model(kv_heads=4, positions=known)
    limit = Limit(entries_per_head=100, every=8, window=4, positions="closed")
    result = compressed(model, ids)
    export(result, tmp_path / "talk")
    (heads, workers), lengths, equal = begun(model, tmp_path, ranks), [], []
    for number in range(4):
        passage, after = ids[10 * number :][:size], result.prompt.ids[-1:]
        for worker in workers:
            read(worker, model, result, torch.cat([passage, after]), ratio=6, limit=limit.to_dict())
        made = [worker.outcome() for worker in workers]
        assert {x.reason for x in made} == {""}
        result = by_transformers(result, passage, limit, ratio=6)
        result = result.from_runs(model, result.prompts, [closed_run(result, 0)], result.pipeline)
        want, length = rotated_back(model, result.packed), made[0].header.length
        lengths.append(length)
        contexts = [x.store.load("talk", made[0].header.digest) for x in workers]
        assert not min(layer.positions.min() for context in contexts for layer in context.layers)
        for (begin, end), context in zip(heads, contexts, strict=True):
            for mine, theirs in zip(context.layers, want.layers, strict=True):
                for own, head in enumerate(range(begin, end)):
                    keys, values, places, _ = mine.head(own)
                    as_keys, as_values, as_places, _ = theirs.head(head)
                    if len(places) != len(as_places):
                        equal.append(torch.zeros(len(as_places), dtype=torch.bool))
                        continue
                    # Counted from the end, as one more entry moves all older ones.
                    same = places - length == as_places - want.length
                    for one, other in ((keys, as_keys), (values, as_values)):
                        same &= torch.isclose(one, other, rtol=1e-3, atol=1e-3).all(-1)
                    equal.append(same)
    assert torch.cat(equal).float().mean() > 0.9
    assert LENGTH + 4 * size > known
    assert max(lengths) <= known * 3 // 4
    assert any(b < a for a, b in itertools.pairwise(lengths))


def test_passages_that_keep_all_entries_stay_and_the_windows_of_others_do_not(model, ids, tmp_path):
    result, worker = talking(model, ids, tmp_path)
    limit, stay, size = {"entries_per_head": 90, "every": 8, "window": 8}, [], 40
    for number in range(8):
        length = worker.store.header("talk").length
        ratio = 1 if number == 2 else 2
        passage = torch.cat([ids[:size], ids[-1:]])
        context, _ = extend(worker, model, result, passage, ratio=ratio, limit=limit)
        stay.append([int(layer.scores.isinf().sum()) for layer in context.layers])
        if ratio == 1:
            whole = set(range(length, length + size))
    added = [b - a for a, b in zip(stay[0], stay[-1], strict=True)]
    assert added == [4 * size] * len(context.layers)
    for layer in context.layers:
        assert all(whole <= set(layer.head(g)[2].tolist()) for g in range(4))


def test_scores_count_in_memory_and_in_the_file(model, ids, tmp_path):
    result, worker = talking(model, ids, tmp_path)
    context = worker.store.load("talk")
    for layer, own in zip(context.layers, result.runs[0].entry_scores(), strict=True):
        assert layer.metadata_bytes - replace(layer, scores=None).metadata_bytes == 2 * len(own)
        assert torch.equal(layer.scores, own.bfloat16())


def test_what_a_limit_cannot_cut_is_refused_and_the_old_context_stays(model, ids, tmp_path):
    result = compressed(model, ids)
    bare = replace(result, runs=tuple(replace(run, record=None) for run in result.runs))
    worker, passage = Worker(model, tmp_path), ids[LENGTH : LENGTH + PASSAGE]

    def failing(made, **options):
        export(made, tmp_path / "talk")
        before = worker.store.header("talk")
        read(worker, model, result, passage, **options)
        assert worker.outcome().header is None
        assert worker.store.header("talk") == before
        return worker.found.reason

    assert "'talk' have no scores" in failing(bare, limit={"entries_per_head": 100})
    # Without a limit, a file of an earlier version is extended as before.
    assert extend(worker, model, result, passage)[1].length == LENGTH + PASSAGE - 1
    worker.store.forget("talk")
    small = {"entries_per_head": 10, "window": 2, "every": 1}
    assert "must stay" in failing(result, ratio=1, limit=small)


def add(jobs, name, length=20, request="0"):
    return jobs.add(request, order_of({"extend": {"name": name, "ratio": 2}}), {}, length)


def test_passages_that_cannot_follow_are_refused_by_name(model, ids, tmp_path):
    tokens = model.config.max_position_embeddings
    for name, end in (("asked", 40), ("whole", 50)):
        prompt = gracekv.Prompt.from_ids(ids[:50], (0, end))
        export(gracekv.compress(model, prompt, ratio=2), tmp_path / name)
    export(compressed(model, ids), tmp_path / "talk")
    jobs = Jobs(ContextStore(tmp_path))
    with pytest.raises(StoreError, match="There is no context 'missing'"):
        add(jobs, "missing")
    for name in ("asked", "whole"):
        with pytest.raises(StoreError, match=f"{name}' continues after its entries"):
            add(jobs, name)
    with pytest.raises(StoreError, match=rf"leaves {tokens - LENGTH:,} of the model's"):
        add(jobs, "talk", tokens - LENGTH + 2)
    with pytest.raises(StoreError, match="leaves nothing to compress"):
        add(jobs, "talk", 1)
    assert not jobs.jobs
    assert add(jobs, "talk", tokens - LENGTH + 1) is None
    with pytest.raises(StoreError, match="is being made"):
        add(jobs, "talk", request="1")
    allowed = Jobs(ContextStore(tmp_path, allow=lambda name, parameters: name == "mine"))
    given = order_of({"extend": {"name": "talk", "into": "mine", "ratio": 2}})
    with pytest.raises(StoreError, match="may not use the context 'talk'"):
        allowed.add("0", given, {}, 20)
    with pytest.raises(StoreError, match="another model"):
        add(Jobs(ContextStore(tmp_path, model={"family": "llama", "layers": 30})), "talk")


def test_a_passage_is_compressed_by_the_context_s_recipe():
    order = order_of({"extend": {"name": "talk", "ratio": 2}}, recipe_of=lambda name: "knorm")
    assert (order.name, order.source, order.recipe) == ("talk", "talk", "knorm")
    named = {"extend": {"name": "talk", "ratio": 2, "recipe": "snapkv"}}
    assert order_of(named, recipe_of=lambda name: "knorm").recipe == "snapkv"
    assert order_of({"compress": {"name": "talk", "ratio": 2}}).source is None
    asked = []
    into = {"extend": {"name": "talk", "into": "next", "ratio": 2}}
    order = order_of(into, recipe_of=lambda name: asked.append(name) or "knorm")
    assert (order.name, order.source, asked) == ("next", "talk", ["talk"])
    for bad in (
        {"extend": {"name": "talk", "into": "../x", "ratio": 2}},
        {"compress": {"name": "talk", "into": "next", "ratio": 2}},
    ):
        with pytest.raises(StoreError, match=r"context.s name|got into"):
            order_of(bad)
    for limit in ({}, {"ratio": 2, "kv_bytes": 8}, {"ratio": 2, "history": True}, {"most": 3}, 9):
        with pytest.raises(StoreError, match=r"Limit|limit"):
            order_of({"extend": {"name": "talk", "ratio": 2, "limit": limit}})
    with pytest.raises(StoreError, match="got limit"):
        order_of({"compress": {"name": "talk", "ratio": 2, "limit": {"ratio": 2}}})
    with pytest.raises(StoreError, match="not made by a recipe"):
        order_of({"extend": {"name": "talk", "ratio": 2}}, recipe_of=lambda name: "custom")
    assert order.spans(10, past=7).past == 7
