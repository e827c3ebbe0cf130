"""A stock vLLM extends contexts: they match extensions with transformers, or stay unchanged."""

from dataclasses import replace

import pytest

from support.compressing_engine import LONGEST, TEXT, asking, compress, params, said, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def extend(name, **options):
    return params({"extend": {"name": name, "ratio": 3, **options}})


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "snapkv"])
def test_a_context_is_extended_as_in_transformers(made, recipe):
    """Twice, alongside questions, which are answered from the version that they began with."""
    from gracekv.vllm import ContextStore

    ids, passage = (made.tokenizer(text).input_ids for text in (TEXT, TEXT[::-1]))
    # An engine reads a prompt's last token again, transformers the one after the document.
    passage.append(ids[-1])
    made.run((ids, compress("talk", recipe=recipe)))
    before = made.wait("talk")
    result = made.by_transformers(ids, pipeline=recipe)
    for number in range(2):
        asked = (made.question(), asking("talk"))
        first, *answers = made.run((passage, extend("talk", save=number == 1)), asked, asked)
        assert said(first) == {"name": "talk", "state": "compressing"}
        for answer in answers:
            made.check(answer.outputs[0], result)
        after = made.wait("talk")
        result = result.extend(passage, ratio=3)
        made.check_about("talk", result)
        kept = tokens_of(result.packed.layers)
        assert (after["state"], after["recipe"]) == ("ready", recipe)
        assert after["length"] == before["length"] + (number + 1) * len(passage)
        assert after["entries"] == len(kept)
    assert len(tokens_of(ContextStore(made.store).load("talk").layers) & kept) >= 0.99 * len(kept)
    made.run((passage, extend("talk", into="longer")))
    assert made.wait("longer")["recipe"] == recipe
    for name, want in (("talk", result), ("longer", result.extend(passage, ratio=3))):
        made.check_about(name, want)
        made.run(([0], params({"delete": name})))
    assert made.usage("kv_cache_usage_perc") == 0


def test_a_context_that_is_extended_stays_within_its_limit(made):
    from gracekv.decode import Limit
    from gracekv.hf.extend import limited_run
    from gracekv.vllm import ContextStore

    ids, limit = made.tokenizer(TEXT).input_ids, Limit(entries_per_head=80, window=8)
    made.run((ids, compress("talk")))
    made.wait("talk")
    result, sizes = made.by_transformers(ids), []
    for number in range(3):
        passage = [*made.tokenizer(f"It was turn {number}. {TEXT[:300]}").input_ids, ids[-1]]
        made.run((passage, extend("talk", limit=limit.to_dict(), save=True)))
        one = made.wait("talk")
        longer = result.extend(passage, ratio=3)
        cut = limited_run(longer, limit)
        result = type(longer).from_runs(made.model, longer.prompts, [cut], longer.pipeline)
        sizes.append(len(kept := tokens_of(result.packed.layers)))
        assert (one["state"], one["entries"]) == ("ready", sizes[-1])
        same = len(tokens_of(ContextStore(made.store).load("talk").layers) & kept) / sizes[-1]
        assert same >= 0.99
        if same == 1:  # answers differ after a tie
            made.check_about("talk", result)
    assert sizes[0] <= sizes[1] == sizes[2] == 72 * result.packed.entries().numel()


@pytest.fixture(scope="module")
def kept(made):
    """The result of a context "kept", next to contexts that cannot be extended."""
    import gracekv
    from gracekv.testing.models import tiny_llama
    from gracekv.vllm import export

    ids = made.tokenizer(TEXT).input_ids
    result = made.by_transformers(ids)
    asked = gracekv.Prompt.from_ids(ids, (0, len(ids) - 20))
    export(gracekv.compress(made.model, asked, ratio=4), made.store / "asked")
    bare = replace(result, runs=tuple(replace(run, record=None) for run in result.runs))
    export(bare, made.store / "bare")
    other = replace(made, model=tiny_llama(vocabulary=500, dim=32, seed=7))
    export(other.by_transformers(ids), made.store / "other")
    made.run((ids, compress("kept")))
    made.wait("kept")
    return result


def why_not(made, name, length, options):
    """The reason why a passage is refused, or why it fails."""
    from vllm.exceptions import VLLMValidationError

    try:
        (output,) = made.run(([7] * length, extend(name, **options)))
    except VLLMValidationError as error:
        return str(error)
    reply = said(output)
    if reply["state"] == "compressing":
        reply = made.wait(name)
    assert reply["state"] == "failed"
    return reply["reason"]


@pytest.mark.parametrize(("name", "options", "length", "reason"), [
    ("missing", {}, 50, "There is no context 'missing'"), ("..", {}, 50, "A context's name"),
    ("asked", {}, 50, "continues after its entries"), ("other", {}, 50, "another model"),
    ("kept", {"ratio": 1000}, 50, "below the smallest"),
    ("kept", {"ratio": 0.5}, 50, "at least 1"), ("kept", {"ratio": float("nan")}, 50, "ratio"),
    ("kept", {"kv_bytes": 9}, 50, "exactly one"),
    ("kept", {"recipe": "kvzip-two-pass"}, 50, "reads more of the model"),
    ("kept", {"recipe": "unheard"}, 50, "Unknown recipe"),
    ("kept", {"into": "a/b"}, 50, "A context's name"),
    ("kept", {"save": True, "expires": 3}, 50, "expires"), ("kept", {}, 1, "below the smallest"),
    ("kept", {}, LONGEST - 1, "Send a shorter one"),
    ("kept", {}, LONGEST, "longer than the maximum"),
    ("kept", {"limit": {"entries": 5}}, 50, "no field 'entries'"),
    ("kept", {"limit": {"kv_bytes": "1MB", "positions": "open"}}, 50, "one of 'counted'"),
    ("bare", {"limit": {"entries_per_head": 9}}, 50, "no scores"),
    # Two passages at ratio 1 do not fit, and none of their tokens may be dropped.
    ("kept", {"ratio": 1, "limit": {"entries_per_head": 40}}, 50, "must stay"),
], ids=str)  # fmt: skip
def test_a_passage_that_cannot_follow_is_refused_and_the_context_stays(
    made, kept, name, options, length, reason
):
    before = made.listing()
    assert reason in why_not(made, name, length, options)
    after = made.listing()
    assert after.keys() == before.keys()
    # The reason is listed with the context, which answers as before.
    facts = ("length", "entries", "bytes")
    assert [after["kept"][x] for x in facts] == [before["kept"][x] for x in facts]
    made.check_about("kept", kept)


def test_a_context_that_is_being_made_is_not_extended(made, kept):
    ids = made.tokenizer(TEXT).input_ids
    one, other = made.run((ids, extend("kept", into="first")), (ids, extend("first")))
    assert said(one)["state"] == "compressing"
    assert "is being made. Extend it afterwards" in said(other)["reason"]
    assert made.wait("first")["length"] == 2 * len(ids)
    made.check_about("kept", kept)


def test_an_aborted_passage_leaves_the_old_context(made):
    core, ids = made.engine.llm_engine, made.tokenizer(TEXT).input_ids
    made.run((ids, compress("kept")))
    before = made.wait("kept")
    core.add_request("0", {"prompt_token_ids": ids}, extend("kept"))
    core.add_request("1", {"prompt_token_ids": ids}, compress("after"))
    core.step()
    core.abort_request(["0"])
    while core.has_unfinished_requests():
        core.step()
    assert made.wait("after")["state"] == "ready"
    assert made.listing()["kept"] == before
    made.check_about("kept", made.by_transformers(ids))
