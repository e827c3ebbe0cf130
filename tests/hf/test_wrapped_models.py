"""Models wrapped or quantised by other libraries answer over a full cache as by themselves."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gracekv
from gracekv.errors import UnsupportedModelError

pytestmark = pytest.mark.long

IDS = torch.randint(1, 97, (150,), generator=torch.Generator().manual_seed(0))
PROMPT = gracekv.Prompt.from_ids(IDS, (4, 138), question_end=146)


def llama():
    """Wide enough for groups of quantised weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()


def lora():
    peft = pytest.importorskip("peft")
    where = {"target_modules": ["q_proj", "v_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=4, init_lora_weights=False, **where)
    return peft.get_peft_model(llama(), config).eval()


def torchao(config):
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def bitsandbytes(bits):
    nn = pytest.importorskip("bitsandbytes.nn")
    model = llama()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, old in list(part.named_children()):
                if isinstance(old, torch.nn.Linear):
                    sizes = old.in_features, old.out_features, False
                    if bits == 8:
                        new = nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                        new.weight = nn.Int8Params(
                            old.weight.data, requires_grad=False, has_fp16_weights=False
                        )
                    else:
                        new = nn.Linear4bit(*sizes, compute_dtype=torch.float32)
                        new.weight = nn.Params4bit(old.weight.data, requires_grad=False)
                    setattr(part, name, new.to("cpu"))
    return model


MODELS = {
    "lora": (lora, 1e-4),
    "merged lora": (lambda: lora().merge_and_unload(), 1e-4),
    "torchao weights": (lambda: torchao("Int8WeightOnlyConfig"), 1e-4),
    "torchao activations": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), 1e-4),
    # Products of 8 bits are in float16.
    "bitsandbytes 8 bits": (lambda: bitsandbytes(8), 0.3),
    "bitsandbytes 4 bits": (lambda: bitsandbytes(4), 1e-4),
}


@torch.no_grad()
def last_logits(model, ids, **options):
    return model(ids[None], **options).logits[0, -1]


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_by_itself_and_is_saved(name, tmp_path):
    make, margin = MODELS[name]
    model = make()
    want = last_logits(model, IDS)
    whole = gracekv.compress(model, PROMPT, ratio=1)
    got = last_logits(model, IDS[-1:], past_key_values=whole.new_cache())
    assert float((got - want).abs().max()) <= margin
    for recipe in ("gracekv-plus", "gracekv", "attention-matching"):
        few = gracekv.compress(model, PROMPT, ratio=4, pipeline=recipe)
        few.save(tmp_path / "few")
        assert gracekv.load(tmp_path / "few", model).generate_ids(4).equal(few.generate_ids(4))
    gracekv.hf.detach(model)
    assert torch.equal(last_logits(model, IDS), want)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_tokens_before_the_prompt_are_refused(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(llama(), config).eval()
    with pytest.raises(UnsupportedModelError, match="learned tokens"):
        gracekv.compress(model, PROMPT, ratio=4)
