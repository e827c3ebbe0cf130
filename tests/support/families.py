"""The model families tested against the stock model, for tests and the table in the docs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gracekv.testing.models import tiny_model


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        title: its common name.
        facts: special features of its attention.
        options: options of `tiny_model`; "family" is its `config.model_type`.
    """

    title: str
    facts: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self, **options: Any) -> Any:
        """A tiny model with random weights."""
        return tiny_model(**{"layers": 2, "seed": 3, **self.options, **options})

    @property
    def is_mixed(self) -> bool:
        """Whether its cache holds anything besides compressed entries."""
        return "window" in self.options or self.has_states

    @property
    def has_states(self) -> bool:
        """Whether layers hold states of fixed size."""
        return self.options["family"] in _WITH_STATES.split()

    @property
    def can_go_back(self) -> bool:
        """Whether tokens can be removed again, as in assisted decoding."""
        return not self.has_states or self.options["family"] == "lfm2"


_SLIDING: dict[str, Any] = {"layers": 4, "window": 24}
_WITH_STATES = "falcon_h1 granitemoehybrid lfm2 nemotron_h qwen3_5_text qwen3_next"


def table() -> str:
    """The rows of docs/models.md."""
    rows = [f"| {x.title} | `{name}` | {x.facts} |" for name, x in FAMILIES.items()]
    return "\n".join(["| models | `model_type` | their attention |", "|---|---|---|", *rows])


FAMILIES = {
    family.options["family"]: family
    for family in (
        Family("Llama 2 and 3, SmolLM2", "plain", {"family": "llama"}),
        Family("Mistral", "plain", {"family": "mistral"}),
        Family("Ministral", "sliding layers beside full ones", _SLIDING | {"family": "ministral"}),
        Family("Mixtral", "experts", {"family": "mixtral"}),
        Family("Qwen2, Qwen2.5", "biases", {"family": "qwen2"}),
        Family("Qwen3", "norms of queries and keys", {"family": "qwen3"}),
        Family("Qwen3-MoE", "experts; norms of queries and keys", {"family": "qwen3_moe"}),
        Family("Qwen3-Next", "linear layers beside full ones, whose output is gated; experts",
               {"family": "qwen3_next", "layers": 4, "partial": 0.5}),
        Family("Qwen3.5 (text)", "linear layers beside full ones, whose output is gated",
               {"family": "qwen3_5_text", "layers": 4, "partial": 0.5}),
        Family("LFM2", "short convolutions beside full layers; norms of queries and keys",
               {"family": "lfm2", "layers": 4}),
        Family("Granite 4", "state-space layers (Mamba 2) beside full ones without RoPE; experts",
               {"family": "granitemoehybrid", "layers": 4}),
        Family("Falcon-H1", "full attention and a state space (Mamba 2) in each layer",
               {"family": "falcon_h1"}),
        Family("Nemotron-H", "state-space layers (Mamba 2), experts and full layers without RoPE",
               {"family": "nemotron_h", "layers": 6}),
        Family("Phi-3, Phi-4", "partial rotation, LongRoPE", {"family": "phi3", "partial": 0.75}),
        Family("Gemma", "large heads", {"family": "gemma"}),
        Family("Gemma 2", "sliding layers beside full ones; capped logits (eager attention)",
               _SLIDING | {"family": "gemma2", "attention": "eager"}),
        Family("Gemma 3 (text)", "sliding layers beside full ones, each kind with its own RoPE",
               _SLIDING | {"family": "gemma3_text"}),
        Family("Gemma 4 (text) without shared layers",
               "sliding layers beside full ones with larger heads, each kind with its own RoPE",
               _SLIDING | {"family": "gemma4_text"}),
        Family("GPT-OSS", "sliding layers beside full ones; sinks; experts (eager attention)",
               _SLIDING | {"family": "gpt_oss", "attention": "eager", "bias": True}),
        Family("Cohere 2 (Command A)", "sliding layers with RoPE beside full ones without",
               _SLIDING | {"family": "cohere2"}),
        Family("OLMo 2", "norms over all heads", {"family": "olmo2"}),
        Family("OLMo 3", "sliding layers beside full ones; norms over all heads",
               _SLIDING | {"family": "olmo3"}),
        Family("Granite", "a scale of its own", {"family": "granite"}),
        Family("SmolLM3", "layers without RoPE", {"family": "smollm3"}),
        Family("GLM-4", "partial rotation of neighbouring features; biases",
               {"family": "glm4", "partial": 0.5, "bias": True}),
        Family("StarCoder2", "biases", {"family": "starcoder2", "bias": True}),
    )
}  # fmt: skip
