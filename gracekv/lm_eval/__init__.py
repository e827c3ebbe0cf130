"""The model `gracekv` for the evaluation harness lm-eval, which runs tasks over compressed caches.

`python -m gracekv.lm_eval` is lm-eval's own command line with `--model gracekv`; in Python,
`register` adds the model. lm-eval is imported only when it is used.
"""

from __future__ import annotations

from gracekv.errors import required

NAME = "gracekv"


def register() -> None:
    """Add `gracekv` to lm-eval's model registry; a second call has no effect.

    lm-eval finds models only in its registry, not in installed packages. Raises
    `MissingDependencyError` if lm-eval is not installed.
    """
    # Load its own models first: it adds none to a registry that already holds one.
    required("lm_eval.models", "lm-eval", "lm-eval")
    registry = required("lm_eval.api.registry", "lm-eval", "lm-eval").model_registry
    if NAME not in registry:
        registry.register(NAME, target="gracekv.lm_eval.model:GraceLM")


__all__ = ["register"]
