"""lm-eval's own evaluator on a small local task, over compressed caches of a tiny model."""

import json
import sys

import pytest
import torch

import gracekv
import gracekv.lm_eval
from gracekv.errors import BudgetError, ConfigError, MissingDependencyError, PromptError, TaskError
from gracekv.prefill import PromptSpans
from gracekv.prefill.chat_text import turn_change
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from support.chapter import CHAPTER
from support.margins import LOGITS, assert_same_tokens, logits_over

QUESTION, PREFIX = 20, 3
ARGUMENTS = {"ratio": 4, "question_tokens": QUESTION, "prefix_tokens": PREFIX, "device": "cpu"}

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
doc_to_text: "{{{{context}}}}\\n\\n{{{{question}}}}"
"""
ANSWERS = """task: small_answers
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOICES = """task: small_choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
# Like LongBench's tasks: own scores, no stop string, the same order of settings.
LONGBENCH = """task: small_longbench
doc_to_target: "{{choices}}"
process_results: !function scores.score
generation_kwargs: {max_gen_toks: 8, temperature: 1, do_sample: False, until: []}
metric_list: [{metric: score, aggregation: mean, higher_is_better: True}]
"""
SCORES = """
def score(doc, results, **kwargs):
    return {"score": len(results[0]) / len(doc["choices"])}
"""


def documents():
    for number in range(2):
        yield {
            "context": CHAPTER[1000 * number : 1000 * number + 500 + 200 * number],
            "question": "Where is Alice sitting, and who is with her? Answer in one sentence:",
            "choices": ["on the bank", "down the rabbit hole", "in the house"],
        }


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval.api.model", reason="needs lm-eval: pip install gracekv[lm-eval]")
    gracekv.lm_eval.register()
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(harness, tmp_path_factory):
    """A model, its tokenizer, and three tasks over two documents."""
    folder = tmp_path_factory.mktemp("tasks")
    tiny_llama(vocabulary=2000).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    data = folder / "data.json"
    data.write_text("\n".join(json.dumps(row) for row in documents()), encoding="utf-8")
    common = COMMON.format(data=data, cache=folder / "cache")
    (folder / "scores.py").write_text(SCORES, encoding="utf-8")
    for name, text in (("answers", ANSWERS), ("choices", CHOICES), ("long", LONGBENCH)):
        (folder / f"{name}.yaml").write_text(text + common, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def own(harness, folder):
    """The model as created by lm-eval."""
    from lm_eval.api.registry import get_model

    return get_model("gracekv").create_from_arg_obj({**ARGUMENTS, "pretrained": f"{folder}/model"})


def samples(harness, folder, model, task, **options):
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    return harness.simple_evaluate(
        model=model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **options
    )["samples"][task]


def prompt_of(own, text):
    """The prompt that the model makes of a text, for a recipe that does not see the question."""
    ids = torch.tensor(own.tok_encode(text))
    end = len(ids) - QUESTION
    return Prompt(ids, PromptSpans(PREFIX, end, end, len(ids)))


def another(own, **options):
    """The same weights in a model with other options."""
    return type(own)(own.model, tokenizer=own.tokenizer, **options)


def test_answers_are_those_of_the_compressed_cache(harness, folder, own):
    found = samples(harness, folder, own, "small_answers")
    assert len(found) == 2
    for sample in found:
        prompt = prompt_of(own, sample["arguments"][0][0])
        result = gracekv.compress(own.model, [prompt], ratio=4)
        assert result.accounting.spent <= result.accounting.budget
        assert result.pipeline == gracekv.Pipeline.default(question=False)
        text = own.tokenizer.decode(result.generate_ids(8)[0])
        # The same tensors through the same operations: exactly.
        assert sample["resps"] == [[text.split("e")[0]]]


def test_rows_of_a_batch_have_their_own_contexts(folder, own):
    texts = [f"{row['context']}\n\n{row['question']}" for row in documents()]
    context, mask = own.tok_batch_encode(texts)
    assert not mask.all()
    length = context.shape[1]
    got = own._model_generate(
        context=context, attention_mask=mask, stop=["</s>"], max_length=length + 6, do_sample=False
    )
    assert torch.equal(got[:, :length], context)
    for row, text in zip(got[:, length:], texts, strict=True):
        one = gracekv.compress(own.model, prompt_of(own, text), ratio=4)
        assert_same_tokens(row, one.generate_ids(6)[0], logits_over(one))


@pytest.fixture
def made(harness, monkeypatch):
    """Records the results that the model makes."""
    import gracekv.lm_eval.model as module

    made = []

    def counted(*arguments, **options):
        made.append(gracekv.compress(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(module, "compress", counted)
    return made


def test_mixed_precision_is_that_of_hf(own, made):
    mixed = another(own, **ARGUMENTS, mixed_precision_dtype="bfloat16")
    mixed._model_generate(torch.arange(5, 105)[None], 104, ["</s>"])
    mixed._loglikelihood_tokens([(None, list(range(5, 105)), [7])])
    assert [x.packed.layers[0].dtype for x in made] == [torch.bfloat16] * 2
    large = type(own)(
        tiny_llama(vocabulary=2000, dim=32),
        tokenizer=own.tokenizer,
        **ARGUMENTS,
        mixed_precision_dtype="bfloat16",
    )
    assert gracekv.recipes.label(large._pipeline) == "gracekv-agnostic-allocated"


def test_choices_are_scored_over_one_cache_a_context(harness, folder, own, made):
    found = samples(harness, folder, own, "small_choices")
    assert len(made) == len(found) == 2
    for sample in found:
        for (text, choice), answers in zip(sample["arguments"], sample["resps"], strict=True):
            got = answers[0]
            context, continuation = own._encode_pair(text, choice)
            result = next(r for r in made if r.prompts[0].ids.tolist() == context)
            want, greedy = step_by_step(own.model, result, continuation)
            assert abs(got[0] - want) < LOGITS * len(continuation)
            assert got[1] == greedy


@torch.no_grad()
def step_by_step(model, result, continuation):
    """Log-probability and whether the answer is greedy, by one pass per token."""
    cache = result.new_cache()
    fed, total, greedy = result.prompts[0].ids[cache.packed_length :], 0.0, True
    for token in continuation:
        logs = model(fed[None], past_key_values=cache).logits[0, -1].double().log_softmax(-1)
        total += float(logs[token])
        greedy &= int(logs.argmax()) == token
        fed = torch.tensor([token])
    return total, greedy


def test_at_ratio_1_choices_score_as_without_compression(harness, folder):
    loaded = {"pretrained": f"{folder}/model", "device": "cpu"}
    plain = samples(harness, folder, "hf", "small_choices", model_args=loaded)
    whole = samples(
        harness, folder, "gracekv", "small_choices", model_args={**loaded, **ARGUMENTS, "ratio": 1}
    )
    for one, other in zip(whole, plain, strict=True):
        for ours, theirs in zip(one["resps"], other["resps"], strict=True):
            assert abs(ours[0][0] - theirs[0][0]) < 8 * LOGITS


def test_the_recipe_sees_the_question_if_told(folder, own):
    ids = torch.arange(5, 105)
    asked = another(own, ratio=4, question_tokens=QUESTION, question_seen=True)._compress([ids])
    assert asked.prompts[0].spans == PromptSpans(4, 80, 100, 100)
    assert asked.pipeline == gracekv.Pipeline.default()
    named = another(own, ratio=4, pipeline="snapkv", backend="sdpa")._compress([ids])
    assert named.prompts[0].spans == PromptSpans(4, 36, 36, 100)
    assert named.pipeline.value == gracekv.Pipeline.named("snapkv").value
    assert named.pipeline.backend.name == "sdpa"


@pytest.mark.parametrize("chat", [False, True])
def test_a_second_pass_does_not_read_the_question(own, chat):
    context, turn = torch.arange(300) * 7 % 1900 + 5, turn_change(own.tokenizer)
    asked = [[7, *range(n, n + QUESTION - 1)] + turn * chat for n in (100, 500)]
    model = another(own, ratio=4, pipeline="kvzip-two-pass", question_tokens=len(asked[0]))
    made = [model._compress([torch.cat([context, torch.tensor(x)])]) for x in asked]
    assert made[0].prompts[0].without_tail().tail.tolist() == turn * chat
    first, second = ([x.index()[1] for x in one.packed.layers] for one in made)
    assert all(map(torch.equal, first, second))


def test_what_cannot_be_compressed_is_refused(own):
    own._compress([torch.arange(5, 105)])
    with pytest.raises(PromptError, match="23 tokens has nothing to compress"):
        own._compress([torch.arange(23)])
    with pytest.raises(TaskError, match="--model hf"):
        own.loglikelihood_rolling([])


@pytest.mark.parametrize(("error", "changed"), [
    (BudgetError, {"ratio": None}), (BudgetError, {"entries_per_head": 32}),
    (ConfigError, {"question_tokens": 0}), (ConfigError, {"prefix_tokens": -1}),
    (ConfigError, {"prefix_tokens": 1.5}), (ConfigError, {"question_seen": "yes"}),
    (ConfigError, {"pipeline": "no-such-recipe"}),
])  # fmt: skip
def test_bad_arguments(own, error, changed):
    with pytest.raises(error):
        another(own, **{**ARGUMENTS, **changed})


def test_the_command_line_knows_the_model(folder, monkeypatch, capsys):
    from gracekv.lm_eval.__main__ import main

    given = f"pretrained={folder}/model,ratio=4,question_tokens={QUESTION},pipeline=h2o"
    words = f"--model gracekv --tasks small_choices --include_path {folder} --device cpu --limit 1"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split(), "--model_args", given])
    main()
    assert "small_choices" in capsys.readouterr().out


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch):
    for name in ("lm_eval", "lm_eval.models", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"gracekv\[lm-eval\]"):
        gracekv.lm_eval.register()
