r"""What a node looks like in the cache: the prototype of an interval of tokens.

Source: the paper, Eqs. app_rope_prototype, app_value_prototype, app_effective_multiplicity.
"""

from __future__ import annotations

from dataclasses import dataclass

from gracekv.errors import ConfigError
from gracekv.registry import Configurable


@dataclass(frozen=True, slots=True)
class PrototypeRule(Configurable):
    """How tokens are merged; distortion and packing must agree on it.

    Attributes:
        uniform_base: share of uniform weight in the value prototype (beta_v; the paper's 0.1).
        epsilon: guards the coherence's and the value weights' denominators (ours, 1e-12: R^tok
            sums to 1 over all of a head's tokens, so the paper's usual 1e-6 would shrink values).
        multiplicity: add log m_eff to the logit (the paper); False drops the bias (ours, for
            ablation).
    """

    uniform_base: float = 0.1
    epsilon: float = 1e-12
    multiplicity: bool = True

    def __post_init__(self) -> None:
        if self.uniform_base < 0 or self.epsilon < 0:
            raise ConfigError(
                f"PrototypeRule takes uniform_base >= 0 and epsilon >= 0; got {self!r}."
            )
