"""Teacher forcing: FullKV against itself, against the stock model, and token by token."""

import pytest
import torch

from gracekv import capture, compress
from gracekv.evaluate.answers import AnswerOutputs, compare, greedy, teacher_force
from gracekv.evaluate.sample import Sample
from gracekv.pipeline import Pipeline
from gracekv.prefill.prompt import Prompt
from support.static_tails import steps


@pytest.fixture(scope="module")
def setting(model):
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 2000, (120,), generator=rng)
    prompt = Prompt.from_ids(ids, (10, 100), question_end=115)
    return prompt, torch.randint(5, 2000, (7,), generator=rng), capture(model, prompt)


def cached(model, setting, **options):
    prompt, _, prefill = setting
    return compress(model, prompt, prefill=prefill, **options)


def forced(model, setting, **options):
    prompt, answer, _ = setting
    return teacher_force(model, prompt.ids, answer, cached(model, setting, **options).new_cache())


def test_full_cache_is_no_distance_from_itself(model, setting):
    first, second, kept_all = (
        forced(model, setting, ratio=1, pipeline=x) for x in ("fullkv", "fullkv", "gracekv")
    )
    again = compare(second, first, setting[1])
    assert (again["kl"], again["dnll"], again["aoe"], again["top1"]) == (0, 0, 0, 1)
    assert compare(kept_all, first, setting[1])["kl"] == 0


def test_full_cache_gives_the_stock_models_likelihoods(model, setting):
    prompt, answer, _ = setting
    full = forced(model, setting, ratio=1, pipeline="fullkv")
    with torch.no_grad():
        logits = model(torch.cat([prompt.ids, answer])[None]).logits[0, len(prompt.ids) - 1 : -1]
    torch.testing.assert_close(full.log_probs, logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pipeline", ["gracekv", "gracekv-no-floor"])
def test_all_tokens_at_once_is_one_by_one(model, setting, pipeline):
    prompt, answer, _ = setting
    result = cached(model, setting, ratio=4, pipeline=pipeline)
    at_once = teacher_force(model, prompt.ids, answer, result.new_cache()).log_probs
    fed = torch.cat([prompt.ids[-1:], answer[:-1]])
    rows = steps(model, result.new_cache(), fed[None])[:, 0]
    torch.testing.assert_close(at_once, rows.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_numbers_are_their_definitions(model, setting):
    answer = setting[1]
    full = forced(model, setting, ratio=1, pipeline="fullkv")
    less = forced(model, setting, ratio=8)
    got = compare(less, full, answer)
    kl = nll = same = 0.0
    for row, token in enumerate(answer.tolist()):
        p, q = full.log_probs[row].double(), less.log_probs[row].double()
        kl += float((p.exp() * (p - q)).sum())
        nll += float(p[token] - q[token])
        same += float(p.argmax() == q.argmax())
    assert got["kl"] == pytest.approx(kl / len(answer))
    assert got["kl"] > 0
    assert got["dnll"] == pytest.approx(nll / len(answer))
    assert got["top1"] == pytest.approx(same / len(answer))
    assert got["dnll"] == pytest.approx(got["nll"] - got["full_nll"])
    assert got["aoe"] > 0
    assert got["tokens"] == len(answer)
    broken = AnswerOutputs(less.log_probs * torch.nan, less.outputs)
    assert str(compare(broken, full, answer)["kl"]) == "nan"


def test_greedy_is_generate_and_stops_where_it_should(model, setting, tokenizer, monkeypatch):
    prompt, _, _ = setting
    result = cached(model, setting, ratio=4, pipeline=Pipeline.named("gracekv"))
    texts = {"instruction": "", "context": "c", "question": "q", "answer_prefix": ""}
    plain = Sample("t", 0, **texts, answers=("a",), metric="qa_f1")
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 9.0)
    answer = greedy(model, tokenizer, prompt.ids, result.new_cache(), plain, 12)
    monkeypatch.undo()
    expected = result.generate_ids(max_new_tokens=12)[0]
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.tokens == 12
    assert answer.seconds > 0
    # Its fifth token as a stop text ends it there, unless it came earlier.
    word = tokenizer.decode(expected[4])
    stopping = Sample("t", 0, **texts, answers=("a",), metric="qa_f1", stop=word)
    short = greedy(model, tokenizer, prompt.ids, result.new_cache(), stopping, 12)
    assert short.tokens < 12
    assert word in short.text
