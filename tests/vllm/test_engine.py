"""A stock vLLM serves contexts: tokens and log-probabilities match gracekv's own cache.

One engine with few pages and short steps, so that questions are read in chunks and requests are
preempted. The model is the embedded one in float32.
"""

import itertools
import json
import re
import shutil
import sys

import pytest

from support.compressing_engine import params
from support.context_engine import context_engine
from support.engine_answers import check_answer
from support.forged_contexts import signed
from support.served_model import RECIPES

pytestmark = [pytest.mark.vllm, pytest.mark.model]

TOKENS = 24
QUESTIONS = [
    "Who is the story about?",
    "What did she see?",
    "Tell me, in your own words and as if to a child of five who has never read a book, what "
    "happened first, what happened then and what happened at the very end, who was there, what "
    "they said to one another, what they wore, where they went and why, and whether there is "
    "anything in all of this that you would call strange. Begin with the strangest thing.",
]
PLAIN = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine(served):
    pages = {"block_size": 32, "num_gpu_blocks_override": 34}
    most = {"max_model_len": 1024, "max_num_seqs": 48, "max_num_batched_tokens": 64}
    options = {"disable_log_stats": False, **pages, **most}
    with pytest.MonkeyPatch.context() as patch:
        # In this process: two separate ones would each import vLLM, which takes 10 seconds.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM searches all modules for its kernels, and takes llvmlite for their owner.
        patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
        made = context_engine(served.folder, served.store, **options)
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def ask(served, engine):
    """Answers to (context, question) pairs, all in one batch; question None: its own."""
    from gracekv.vllm import request

    def run(pairs, plain=0, **options):
        asked = [request(served.store, *pair, served.tokenizer) for pair in pairs]
        options = {"max_tokens": TOKENS, "logprobs": 0, **options}
        prompts = [one.prompt for one in asked]
        given = [one.sampling_params(**options) for one in asked]
        prompts += [{"prompt_token_ids": served.tokenizer(PLAIN).input_ids}] * plain
        given += [params(None, TOKENS)] * plain
        return engine.generate(prompts, given, use_tqdm=False)

    return run


PAIRS = [(name, question) for name in RECIPES for question in QUESTIONS]


@pytest.fixture(scope="module")
def alone(ask):
    """The answers to all pairs, and to a plain request."""
    outputs = ask([*PAIRS, ("asked", None)], plain=1)
    return dict(zip([*PAIRS, ("asked", None), "plain"], outputs, strict=True))


@pytest.mark.parametrize("name", [*RECIPES, "asked"])
def test_tokens_and_probabilities_are_those_of_gracekv(served, alone, name):
    for question in QUESTIONS if name in RECIPES else [None]:
        check_answer(served, name, question, alone[name, question].outputs[0])


def test_the_contexts_are_what_is_read(served, alone):
    """Other contexts' caches give different probabilities: the comparison can fail."""
    answer = alone["global", QUESTIONS[0]].outputs[0]
    with pytest.raises(AssertionError):
        check_answer(served, "tight", QUESTIONS[0], answer)
    kinds = [served.results[name].packed.entries().unique().numel() for name in RECIPES]
    assert kinds[0] > 1, "budgets are ragged"


def test_a_full_context_equals_the_engines_own_prefill(served, engine, alone):
    from gracekv.vllm import request

    for question in QUESTIONS[:2]:
        prompt = served.results["full"].prompt
        asked = request(served.store, "full", question, served.tokenizer)
        whole = prompt.ids[: prompt.spans.context_end].tolist() + list(asked.prompt_ids)
        given = params(None, TOKENS, logprobs=0)
        own = engine.generate({"prompt_token_ids": whole}, given, use_tqdm=False)[0].outputs[0]
        mine = alone["full", question].outputs[0]
        check_answer(served, "full", question, own)
        pairs = zip(own.token_ids, mine.token_ids, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        assert len(list(same)) > 8, "answers part at the first near-tie only"


def metric(engine, name):
    return sum(made.value for made in engine.get_metrics() if made.name == f"vllm:{name}")


def test_many_requests_at_once_are_right_and_leave_nothing(served, engine, ask, alone):
    # Mostly short questions, since long ones take most of the time.
    pairs = [*PAIRS, *((name, q) for name in RECIPES for q in QUESTIONS[:2] * 3)][:32]
    before = metric(engine, "num_preemptions")
    outputs = ask(pairs, plain=8)
    assert metric(engine, "num_preemptions") > before, "the pages were enough for all"
    for pair, output in zip(pairs, outputs, strict=False):
        check_answer(served, *pair, output.outputs[0])
    plain = list(alone["plain"].outputs[0].token_ids)
    assert all(list(output.outputs[0].token_ids) == plain for output in outputs[32:])
    for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
        assert metric(engine, name) == 0


def test_samples_of_one_request_share_the_context(served, ask):
    (output,) = ask([("merged", QUESTIONS[2])], n=3, temperature=1.0)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    for sample in output.outputs:
        check_answer(served, "merged", QUESTIONS[2], sample, greedy=False)


def test_an_aborted_request_leaves_the_others_alone(served, engine, ask, alone):
    from gracekv.vllm import request

    core = engine.llm_engine
    for number, name in enumerate(("global", "merged")):
        asked = request(served.store, name, QUESTIONS[0], served.tokenizer)
        core.add_request(str(number), asked.prompt, asked.sampling_params(TOKENS, logprobs=0))
    for _ in range(4):
        core.step()
    core.abort_request(["0"])
    finished = []
    while core.has_unfinished_requests():
        finished += [output for output in core.step() if output.finished]
    assert [output.request_id.partition("-")[0] for output in finished] == ["1"]
    check_answer(served, "merged", QUESTIONS[0], finished[0].outputs[0])
    assert metric(engine, "kv_cache_usage_perc") == 0


@pytest.fixture
def broken(served):
    """Unusable contexts, next to usable ones."""
    store = served.store
    shutil.copytree(store / "global", store / "damaged")
    # With a digest that is not in memory, as otherwise it would be served from there.
    (path,) = (store / "damaged").glob("entries-*.safetensors")
    path.rename(path.with_name(f"entries-{'0' * 16}.safetensors"))
    header = json.loads((store / "damaged" / "header.json").read_text())
    (store / "damaged" / "header.json").write_text(signed(header | {"digest": "0" * 64}))
    shutil.copytree(store / "global", store / "foreign")
    header = json.loads((store / "foreign" / "header.json").read_text())
    header["model"]["weights"]["norm.weight"] = "0" * 16
    (store / "foreign" / "header.json").write_text(signed(header))
    shutil.copytree(store / "global", store / "nested")
    (store / "nested" / "header.json").write_text("[" * 10**5)
    found = {"damaged": "are damaged", "nested": "cannot be read"}
    yield found | {"foreign": "another model: weights .* differ", "missing": "There is no context"}
    for name in ("damaged", "foreign", "nested"):
        shutil.rmtree(store / name)


def test_unusable_contexts_are_refused_by_name_and_alone(served, engine, broken):
    from vllm.exceptions import VLLMValidationError

    from gracekv.vllm import request

    with pytest.raises(VLLMValidationError, match="A context's name"):
        engine.generate({"prompt_token_ids": [1, 2, 3]}, params("../global", 8), use_tqdm=False)
    asked = request(served.store, "global", QUESTIONS[0], served.tokenizer)
    given = [*(params(x, 8) for x in broken), asked.sampling_params(TOKENS, logprobs=0)]
    *failed, good = engine.generate([asked.prompt] * (len(broken) + 1), given, use_tqdm=False)
    for (name, reason), output in zip(broken.items(), failed, strict=True):
        said = output.kv_transfer_params["gracekv"]
        assert re.search(reason, said["reason"]), name
        assert said["status"] == (404 if name == "missing" else 400)
        assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("error", "")
    check_answer(served, "global", QUESTIONS[0], good.outputs[0])
    assert metric(engine, "kv_cache_usage_perc") == 0


def test_prefixes_are_shared_inside_a_context_only(served, engine, ask):
    """A second request finds the question's pages of the same context, never of another."""
    from gracekv.vllm import request

    long = QUESTIONS[2]
    # At once, so that a step has both: they share their first pages, which identify neither.
    first, again = ask([("global", long)] * 2)
    (other,) = ask([("tight", long)])
    prompt = request(served.store, "global", long, served.tokenizer).prompt
    (plain,) = engine.generate(prompt, params(None, TOKENS), use_tqdm=False)
    assert again.num_cached_tokens >= 32
    check_answer(served, "global", long, first.outputs[0])
    check_answer(served, "global", long, again.outputs[0])
    check_answer(served, "tight", long, other.outputs[0])
    assert list(plain.outputs[0].token_ids) != list(again.outputs[0].token_ids)
