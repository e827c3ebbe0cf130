"""The longest prompts and continuations: limits from the model's configuration, and messages."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekv.errors import CacheError, LengthWarning, PromptError, UnsupportedModelError
from gracekv.hf.capture import capture
from gracekv.prefill import length_limits
from gracekv.prefill.options import CaptureOptions
from gracekv.testing.models import tiny_model
from support.prompts import random_prompt

LONGROPE = {"rope": "longrope", "original": 2048, "positions": 32768}
# Models, and values from their configurations: the window, the length at which rotation switches,
# and the length that they were trained for.
BOUNDS = {
    "llama": (tiny_model(), None, None, 4096),
    "mistral": (tiny_model("mistral", window=3000), 3000, None, 4096),
    "qwen2 full": (tiny_model("qwen2"), None, None, 4096),
    # Its window is for layers from the second on.
    "qwen2 one layer": (tiny_model("qwen2", window=3000, layers=1), None, None, 4096),
    # Sliding layers next to full ones keep their windows.
    "qwen2 sliding": (tiny_model("qwen2", window=3000), None, None, 4096),
    "phi3": (tiny_model("phi3", positions=2048), None, 2048, 2048),
    "phi3 longrope": (tiny_model("phi3", **LONGROPE), None, 2048, 32768),
    "llama longrope": (tiny_model(**LONGROPE), None, 2048, 32768),
    "llama yarn": (tiny_model(rope="yarn", original=4096), None, None, 16384),
    "llama linear": (tiny_model(rope="linear"), None, None, 16384),
    "llama dynamic": (tiny_model(rope="dynamic"), None, None, 4096),
}
MODELS = {name: model for name, (model, *_) in BOUNDS.items()}


@pytest.mark.parametrize(("model", "window", "switch", "trained"), BOUNDS.values(), ids=BOUNDS)
def test_bounds_are_read_from_the_configuration(model, window, switch, trained):
    assert length_limits.sliding_window(model) == window
    assert length_limits.switch_point(model) == switch
    assert length_limits.trained_length(model) == trained


def test_a_configuration_that_names_no_length_bounds_nothing():
    config = SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "yarn"})
    config.get_text_config = lambda **_: config
    assert length_limits.trained_length(SimpleNamespace(config=config)) is None


@pytest.mark.parametrize("name", MODELS)
@given(length=st.integers(2, 5000), new=st.integers(1, 5000))
def test_a_continuation_is_refused_exactly_where_a_fed_token_passes_the_bound(name, length, new):
    model = MODELS[name]
    bounds = [length_limits.sliding_window(model)]
    switch = length_limits.switch_point(model)
    if switch is not None and length <= switch:
        bounds.append(switch)
    fed = length + new - 1
    if any(bound is not None and fed > bound for bound in bounds):
        with pytest.raises(CacheError, match="cannot use this cache"):
            length_limits.check_continuation(model, [length], new)
    else:
        length_limits.check_continuation(model, [length], new)


def test_padding_makes_every_row_of_a_batch_as_long_as_the_longest():
    phi3 = MODELS["phi3 longrope"]
    length_limits.check_continuation(phi3, [100, 2040], 9)
    with pytest.raises(CacheError, match="Generate at most 9 tokens"):
        length_limits.check_continuation(phi3, [100, 2040], 10)
    length_limits.check_continuation(phi3, [3000, 4000], 100)


@pytest.mark.parametrize("name", ["phi3 longrope", "llama longrope"])
def test_a_batch_on_both_sides_of_the_switch_is_refused(name):
    """All rows of a batch rotate by the longest, so cached keys of short ones would not match."""
    with pytest.raises(CacheError, match=r"\[100, 4000\] lie on both sides"):
        length_limits.check_continuation(MODELS[name], [100, 4000], 1)


def test_a_batch_does_not_grow_past_where_rotations_depend_on_its_length():
    fit = [([90, 4000], 97), ([4000, 4000], 200), ([5000, 5000], 9), ([4000], 200)]
    for lengths, new in fit:
        length_limits.check_continuation(MODELS["llama dynamic"], lengths, new)
    for lengths, new in (([90, 4000], 98), ([90, 5000], 1), ([5000, 6000], 9)):
        with pytest.raises(CacheError, match="dynamic RoPE"):
            length_limits.check_continuation(MODELS["llama dynamic"], lengths, new)


WARNED = [
    ("llama", 4097, "4097 tokens, but LlamaForCausalLM was trained for 4096. Answers may be"),
    ("llama dynamic", 4097, "what the model was run on before"),
    ("mistral", 2500, "continue this prompt for 501 tokens.*sliding window"),
    ("phi3 longrope", 2000, "continue this prompt for 49 tokens.*drops the cache"),
    ("phi3 longrope", 32769, "was trained for 32768"),
]


@pytest.mark.parametrize(("name", "length", "message"), WARNED)
def test_lengths_that_are_warned_about(name, length, message):
    with pytest.warns(LengthWarning, match=message):
        length_limits.check_prompt_length(MODELS[name], length, beyond_positions=True)
    if "was trained for" in message:
        with pytest.raises(PromptError, match=r"trained for.*beyond_positions=True.*--beyond-pos"):
            length_limits.check_prompt_length(MODELS[name], length)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "length"), [
    ("llama", 4096), ("llama yarn", 16384), ("llama dynamic", 4096), ("mistral", 1000),
    ("qwen2 full", 4096), ("phi3 longrope", 1000), ("phi3 longrope", 4000),
])  # fmt: skip
def test_usual_lengths_pass_silently(name, length):
    length_limits.check_prompt_length(MODELS[name], length)


def test_a_window_that_does_not_cover_the_prompt_is_refused():
    with pytest.raises(UnsupportedModelError, match="3000 tokens, and the prompt has 3001"):
        length_limits.check_prompt_length(MODELS["mistral"], 3001)


@pytest.mark.parametrize("name", ["phi3", "phi3 longrope", "llama longrope"])
def test_the_prompt_length_at_which_the_first_step_loses_the_cache_is_refused(name):
    with pytest.raises(PromptError, match="hits that switch"):
        length_limits.check_prompt_length(MODELS[name], 2049)


def test_dynamic_rope_is_warned_about_up_to_its_factor():
    with pytest.warns(LengthWarning, match="what the model was run on before"):
        length_limits.check_prompt_length(MODELS["llama dynamic"], 8192)
    with pytest.raises(PromptError, match="was trained for 4096"):
        length_limits.check_prompt_length(MODELS["llama dynamic"], 4096 * 64)


def test_capture_refuses_long_prompts_before_the_model_runs():
    model, prompt = tiny_model(positions=50), random_prompt(60, (2, 50))
    with pytest.warns(LengthWarning, match="trained for 50"):
        capture(model, prompt, options=CaptureOptions(beyond_positions=True))
    model.model.forward = None
    with pytest.raises(PromptError, match="has 60 tokens, but LlamaForCausalLM was trained for 50"):
        capture(model, prompt)
