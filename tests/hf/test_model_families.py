"""Every listed family: all guarantees of `compress`, against the stock model."""

import copy

import pytest
import torch
import transformers

import gracekv
from gracekv.hf import GraceCache
from gracekv.hf.capture import capture
from gracekv.prefill import Needs, depth_layers
from gracekv.prefill.layer_state import WITH_STATES
from gracekv.prefill.model_layers import attention_module, compressed_layers
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.supported import TESTED_MODEL_TYPES
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from support.covering import every
from support.dense import dense_logits
from support.families import FAMILIES
from support.greedy_decoding import greedy, heavier
from support.margins import assert_same_beams, assert_same_steps, assert_same_tokens, logits_over
from support.observers import HeadOutputs

LENGTH = 90
IDS = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 80), question_end=86)
SHORTER = gracekv.Prompt.from_ids(IDS[7:67], (3, 50), question_end=56)

every_family = pytest.mark.parametrize("family", FAMILIES)


def test_the_list_is_that_of_the_check():
    assert set(FAMILIES) == TESTED_MODEL_TYPES


@every_family
def test_the_capture_is_the_stock_forward_pass(family):
    model, with_states = FAMILIES[family].model(), FAMILIES[family].has_states
    cache = transformers.DynamicCache(config=model.config if with_states else None)
    with torch.no_grad():
        plain = copy.deepcopy(model)(IDS[None], past_key_values=cache, output_hidden_states=True)

    seen = BlockInput(0.5), Surprisal()
    prefill = capture(model, PROMPT, Needs.observed(HeadOutputs(), *seen))
    parts = capture(model, PROMPT, options=CaptureOptions(chunk=40))

    numbers = [x.number for x in compressed_layers(model)]
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(cache)
    own = ("full_attention", "hybrid") if FAMILIES[family].is_mixed else kinds
    assert numbers == [x for x, kind in enumerate(kinds) if kind in own]
    assert len(numbers) == prefill.layers
    for layer, number in enumerate(numbers):
        # Exact: both call the same functions on the same shapes, except for a separate last token.
        for got, stock in (
            (prefill.keys[layer], cache.layers[number].keys[0]),
            (prefill.values[layer], cache.layers[number].values[0]),
        ):
            torch.testing.assert_close(got, stock, rtol=0, atol=1e-4 if with_states else 0)
        torch.testing.assert_close(parts.keys[layer], prefill.keys[layer], rtol=0, atol=1e-3)
    torch.testing.assert_close(prefill.logits, plain.logits[0, -1], rtol=0, atol=1e-4)
    stream, surprisal = (prefill.observation(x) for x in seen)
    (middle,) = depth_layers([0.5], prefill.layers)
    # With states, the last token runs alone, in products of other shapes.
    stock = plain.hidden_states[numbers[middle]][0]
    torch.testing.assert_close(stream, stock, rtol=0, atol=1e-4 if with_states else 0)
    expected = -plain.logits[0].double().log_softmax(-1)[torch.arange(LENGTH - 1), IDS[1:]]
    torch.testing.assert_close(surprisal[1:].double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(parts.logits, prefill.logits, rtol=0, atol=1e-3)
    # Sliding layers hold the window of all tokens but the last, the others their states there.
    if with_states:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            copy.deepcopy(model)(IDS[None, :-1], past_key_values=cache)
    beside = [x for x in range(len(cache)) if x not in numbers or kinds[x] in WITH_STATES]
    assert [x.number for x in prefill.other_layers] == beside
    for whole, in_parts in zip(prefill.other_layers, parts.other_layers, strict=True):
        for name, tensor in whole.tensors.items():
            if with_states:
                stock = getattr(cache.layers[whole.number], f"{name}_states")[0]
                torch.testing.assert_close(tensor, stock, rtol=0, atol=1e-4)
            else:
                stock = getattr(cache.layers[whole.number], name)
                assert torch.equal(tensor, stock[:, :, LENGTH - 24 : LENGTH - 1])
            torch.testing.assert_close(in_parts.tensors[name], tensor, rtol=0, atol=1e-3)
    # The probes' attention, computed from the capture, equals the model's.
    probes = PROMPT.spans.question_probes()
    unseen = torch.arange(LENGTH)[None] > torch.tensor(probes)[:, None]
    for layer in range(prefill.layers):
        keys, values = (
            x[layer].double().repeat_interleave(prefill.group, dim=0)
            for x in (prefill.keys, prefill.values)
        )
        logits = prefill.queries_at(layer, probes).double() @ keys.mT * prefill.scale
        if prefill.softcap is not None:
            logits = prefill.softcap * torch.tanh(logits / prefill.softcap)
        logits = logits.masked_fill(unseen, -torch.inf)
        if prefill.sink_logits:
            sinks = prefill.sink_logits[layer].double()[:, None, None]
            logits = torch.cat([logits, sinks.expand(-1, len(probes), 1)], dim=-1)
        output = logits.softmax(-1)[..., :LENGTH] @ values
        got = prefill.observation(HeadOutputs())[layer].double()
        torch.testing.assert_close(got, output, rtol=1e-5, atol=1e-4)


@every_family
def test_keys_without_their_rotation_are_those_of_the_model(family):
    """A layer run without rotation has the keys that `unrotate` gives, so merging is right."""
    model = FAMILIES[family].model()
    prefill = capture(model, PROMPT)
    for layer, described in enumerate(compressed_layers(model)):
        attention = attention_module(model.get_decoder().layers[described.number])

        def still(module, args, kwargs):
            if kwargs.get("position_embeddings") is None:
                return None
            cos, sin = kwargs["position_embeddings"]
            pair = torch.ones_like(cos), torch.zeros_like(sin)
            return args, kwargs | {"position_embeddings": pair}

        hook = attention.register_forward_pre_hook(still, with_kwargs=True)
        plain = capture(model, PROMPT)
        hook.remove()
        unrotated = prefill.rope_of(layer).unrotate(prefill.keys[layer], torch.arange(LENGTH))
        torch.testing.assert_close(unrotated, plain.keys[layer], rtol=0, atol=1e-4)
        moved = (unrotated - prefill.keys[layer]).abs().max() > 0.1
        assert moved == (layer not in prefill.unrotated)


@every_family
def test_ratio_one_generates_what_the_stock_model_does(family):
    expected, expected_logits = greedy(FAMILIES[family].model(), IDS, tokens=5)
    result = gracekv.compress(FAMILIES[family].model(), PROMPT, ratio=1)
    ids, logits = greedy(result.model, IDS, result.new_cache(), 5)
    assert_same_steps(ids, logits, expected, expected_logits, margin=3e-4)


@every_family
def test_a_quarter_of_the_entries_decodes_like_dense_masked_attention(family):
    model, mixed = FAMILIES[family].model(), FAMILIES[family].is_mixed
    prefill = capture(model, PROMPT)
    for pipeline in ("gracekv", "gracekv-plus"):
        result = gracekv.compress(model, PROMPT, prefill=prefill, ratio=4, pipeline=pipeline)
        kept = result.accounting
        assert kept.spent <= kept.budget < 0.26 * kept.entries.numel() * 76
        assert result.packed.kv_bytes < 0.45 * kept.full_bytes
        kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "moe"}
        assert set(kept.other_bytes) == (kinds if mixed else set())
    packed = heavier(result.packed)

    ids, logits = greedy(model, IDS, GraceCache(packed), 5)

    want = dense_logits(model, packed, torch.cat([IDS[-1:], ids[:-1]]))
    torch.testing.assert_close(logits.double(), want, rtol=0, atol=3e-4)


@pytest.mark.parametrize("family", every(3, list(FAMILIES)))
def test_batches_beams_and_files_give_what_one_prompt_gives(family, tmp_path):
    model = FAMILIES[family].model()
    alone = [gracekv.compress(model, prompt, ratio=3) for prompt in (PROMPT, SHORTER)]
    batch = gracekv.compress(model, [PROMPT, SHORTER], ratio=3)
    rows = batch.generate_ids(6)
    for result, row in zip(alone, rows, strict=True):
        assert_same_tokens(row, result.generate_ids(6)[0], logits_over(result))

    file = tmp_path / "cache.safetensors"
    batch.save(file)
    assert torch.equal(gracekv.load(file, model).generate_ids(6), rows)

    beams = alone[0].generate_ids(6, num_beams=2, num_return_sequences=2)
    assert beams.shape == (2, 6)
    assert_same_beams(batch.generate_ids(6, num_beams=2)[:1], beams[:1], alone[0])
