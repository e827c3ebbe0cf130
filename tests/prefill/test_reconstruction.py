"""The second pass against a stock model that reads everything at once."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from gracekv.errors import UnsupportedModelError
from gracekv.hf.capture import capture
from gracekv.prefill import Needs, Region, partial_attention
from gracekv.prefill.observations import seconds_by_stage
from gracekv.prefill.passes import ModelPasses
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama, tiny_model
from gracekv.value.kvzip_two_pass import Reconstruction, received_attention, repetitions
from gracekv.value.repeated_attention import RepeatedQueries
from support.draws import SEEDS, ints, some
from support.prompts import random_prompt
from support.skips import needs_smollm2

NEEDS = Needs.observed(Reconstruction())


class Letters:
    """A tokenizer with one id per letter."""

    def __call__(self, text, add_special_tokens, truncation=False):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 97 for letter in text]}

    def get_vocab(self):
        return {chr(i): i for i in range(97)}


def repeated(prompt, chunk):
    def encode(text):
        if prompt.tokenizer is None:
            return []
        return prompt.tokenizer(text, add_special_tokens=False)["input_ids"]

    tail = prompt.ids[prompt.spans.question_end :] if prompt.tail is None else prompt.tail
    given = {"spans": prompt.spans, "ids": prompt.ids, "tail": tail, "encode": encode}
    return repetitions(SimpleNamespace(**given), chunk)


def reconstruction(model, prompt, chunk=2048, power=0.0):
    observer = Reconstruction(chunk, power)
    return capture(model, prompt, Needs.observed(observer)).observation(observer)


def stock(model, prompt, chunk, power=0.0):
    """Scores from the full attention of one stock pass per chunk over context and repetition."""
    start, end = prompt.spans.context_start, prompt.spans.context_end
    parts = []
    for part, ids in repeated(prompt, chunk):
        both = torch.cat([prompt.ids[:end], ids])[None]
        with torch.no_grad():
            attentions = model(both, output_attentions=True).attentions
        sinks = list(range(min(4, part.start)))
        inside = [*sinks, *range(part.start, part.end), *range(end, both.shape[1])]
        rows = torch.stack(attentions)[:, 0, :, end:, :].double()[..., inside]
        rows = rows / rows.sum(-1, keepdim=True)
        seen = rows[..., len(sinks) : len(sinks) + part.length]
        by_head = seen.unflatten(1, (model.config.num_key_value_heads, -1))
        powers = by_head.pow(power).sum(3).mean(2) / (end - start)
        parts.append(powers.pow(1 / power) if power else by_head.amax((2, 3)))
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("chunk", [2048, 20])
def test_equals_a_stock_pass_over_context_and_repetition(attention, rope, chunk, monkeypatch):
    monkeypatch.setattr(partial_attention, "_ROWS", 32)  # the first chunk takes several blocks
    prompt = random_prompt(tokenizer=Letters())
    eager = tiny_llama(layers=3, rope=rope, attention="eager", bias=True)
    model = tiny_llama(layers=3, rope=rope, attention=attention, bias=True)
    got = reconstruction(model, prompt, chunk)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), stock(eager, prompt, chunk), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("chunk", "question_end"), [(2048, 66), (20, 60)])
def test_power_means_equal_those_of_a_stock_pass(chunk, question_end, power):
    """Without a question the prefill ends before the template's tail, the pass does not."""
    prompt = random_prompt(question_end=question_end, tokenizer=Letters())
    model = tiny_llama(layers=3, attention="eager")
    got = reconstruction(model, prompt, chunk, power)
    want = stock(model, prompt, chunk, power)
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [2048, 20])
def test_equals_kvpress(kvpress_module, chunk):
    press = kvpress_module("presses.kvzip_press").KVzipPress(compression_ratio=0.5)
    prompt = random_prompt(tokenizer=Letters())
    end, model = prompt.spans.context_end, tiny_llama(layers=3, attention="eager")
    ours = reconstruction(model, prompt, chunk)
    press.score_val, press.context_length = torch.zeros(3, 1, 2, end), end
    for part, ids in repeated(prompt, chunk):
        press.start_idx, press.end_idx = part.start, part.end
        hooks = [
            block.self_attn.register_forward_hook(
                lambda module, args, kwargs, output: theirs(press, module, kwargs, end),
                with_kwargs=True,
            )
            for block in model.model.layers
        ]
        with torch.no_grad():
            model(torch.cat([prompt.ids[:end], ids])[None])
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(ours, press.score_val[:, 0, :, 5:], rtol=2e-4, atol=1e-6)


def theirs(press, module, kwargs, end):
    """The press's own scores of one layer, given the inputs of its hook."""
    hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
    shape = (1, hidden.shape[1], -1, module.head_dim)
    projected = (module.k_proj(hidden), module.v_proj(hidden))
    keys, values = (x.view(shape).transpose(1, 2) for x in projected)
    half = module.head_dim // 2
    turned = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
    keys, extra = keys * cos + turned * sin, {"position_embeddings": (cos[:, end:], sin[:, end:])}
    press.score_kvzip(module, hidden[:, end:], keys, values, None, extra)


@settings(max_examples=15)
@given(
    seed=SEEDS,
    start=ints(0, 6),
    length=ints(1, 12),
    count=ints(1, 25),
    power=some([0.0, 2.0, 3.0]),
    softcap=some([None, 1.5]),
)
def test_received_attention_is_that_of_a_masked_softmax(seed, start, length, count, power, softcap):
    rng = torch.Generator().manual_seed(seed)
    shapes = (4, count, 8), (2, start + length + 3, 8), (2, count, 8)
    queries, seen, own = (torch.randn(shape, generator=rng) for shape in shapes)
    region, sink = Region(start, start + length), torch.tensor([-1.0, 0.0, 1.0, 2.0])
    given = {"scale": 0.5, "softcap": softcap, "sinks": sink}
    got = received_attention(queries, seen, own, region, power, **given)
    sinks = min(4, start)
    keys = torch.cat([seen[:, :sinks], seen[:, start : start + length], own], dim=1).double()
    logits = 0.5 * queries.double().unflatten(0, (2, 2)) @ keys.mT[:, None]
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    logits[..., sinks + length :].masked_fill_(later, -torch.inf)
    logits = torch.cat([logits, sink.view(2, 2, 1, 1).expand(2, 2, count, 1)], dim=-1)
    shares = logits.softmax(-1)[..., sinks : sinks + length]
    want = (shares**power).sum(dim=2).mean(dim=1) if power else shares.amax(dim=(1, 2))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


def test_the_request_comes_first_then_the_tail_then_the_chunk():
    prompt = random_prompt(tokenizer=Letters())
    ids, tail = prompt.ids, prompt.ids[66:]
    (first, whole), (second, rest) = repeated(prompt, 40)
    assert (first, second) == (Region(5, 45), Region(45, 60))
    assert whole[-40:].tolist() == ids[5:45].tolist()
    assert whole[-44:-40].tolist() == tail.tolist()
    request = "\n\nRepeat the previous context exactly."[-36:]
    assert whole[-80:-44].tolist() == [ord(letter) % 97 for letter in request]
    assert rest[-19:].tolist() == [*tail.tolist(), *ids[45:60].tolist()]
    # The end of a chunk announces the next one.
    assert rest[-27:-19].tolist() == ids[37:45].tolist()
    first = next(iter(repeated(random_prompt(), 40)))[1].tolist()
    assert first == [*tail.tolist(), *ids[5:45].tolist()]


def test_the_capture_makes_the_pass_when_asked_and_says_what_it_took():
    model, prompt = tiny_llama(), random_prompt()
    prefill = capture(model, prompt, NEEDS)
    assert prefill.observation(Reconstruction()).shape == (2, 2, 55)
    assert set(seconds_by_stage(prefill.seconds, NEEDS)) == {"prefill", "reconstruction"}
    best = prefill.observation(Reconstruction())
    assert bool(((best > 0) & (best <= 1)).all())
    plain = capture(model, prompt, Needs())
    assert set(plain.seconds) == {"prefill"}
    assert all(torch.equal(a, b) for a, b in zip(prefill.keys, plain.keys, strict=True))
    assert model.config._attn_implementation == "sdpa"


def test_observers_of_one_chunk_share_its_passes():
    model, prompt, shared = tiny_llama(), random_prompt(), Reconstruction(20)
    seen = shared, Reconstruction(20, 3.0), RepeatedQueries(7, 20)
    needs = Needs.observed(*seen, RepeatedQueries(7))
    with patch.object(ModelPasses, "after", autospec=True, side_effect=ModelPasses.after) as runs:
        together = capture(model, prompt, needs)
    assert runs.call_count == 3 + 1
    for observer in seen:
        wanted = capture(model, prompt, Needs.observed(observer)).observation(observer)
        torch.testing.assert_close(together.observation(observer), wanted)
    # A pass that several share is counted once.
    for needs in (Needs.observed(*seen[:2]), Needs.observed(seen[2])):
        taken = seconds_by_stage(together.seconds, needs)["reconstruction"]
        assert taken == together.seconds[shared] > 0


def test_a_second_reading_beyond_a_bound_is_refused():
    model = tiny_model("mistral", window=80)
    with pytest.warns(UserWarning, match="sliding window"):
        capture(model, random_prompt(), Needs())
    with (
        pytest.warns(UserWarning, match="sliding window"),
        pytest.raises(UnsupportedModelError, match=r"take 119 positions.* limit of 80 in between"),
    ):
        reconstruction(model, random_prompt())
    # The whole prompt was rotated differently from such a short pass.
    phi3 = tiny_model("phi3", rope="longrope", original=120, positions=1024)
    prompt = Prompt.from_ids(torch.arange(200) % 90, (4, 40), question_end=190)
    with pytest.raises(UnsupportedModelError, match="limit of 120 in between"):
        reconstruction(phi3, prompt)


@pytest.mark.model
@needs_smollm2
def test_a_chat_prompt_is_asked_in_its_own_format():
    from gracekv.hf.smollm2 import load_smollm2

    _, tokenizer = load_smollm2()
    prompt = Prompt.from_chat(tokenizer, context="One two three. " * 9, question="How many?")
    ((_, ids),) = repeated(prompt, 2048)
    text = tokenizer.decode(ids)
    request = "\n\nRepeat the previous context exactly.<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(request)
    assert text.rstrip().endswith("One two three.")
    assert "How many" not in text
