"""The model `gracekv` of the evaluation harness lm-eval: its tasks over compressed caches.

`python -m gracekv.lm_eval` is lm-eval's own command line with `--model gracekv`; `register` makes
the model known to a Python program. Nothing here imports lm-eval before it is used.
"""

from __future__ import annotations

from gracekv.errors import required

NAME = "gracekv"


def register() -> None:
    """Make `gracekv` known to lm-eval's registry of models; a second call changes nothing.

    lm-eval finds models by its registry alone and looks for none in installed packages. Raises
    `MissingDependencyError` if lm-eval is not installed.
    """
    # Its own models first: it adds none to a registry that holds one already.
    required("lm_eval.models", "lm-eval", "lm-eval")
    registry = required("lm_eval.api.registry", "lm-eval", "lm-eval").model_registry
    if NAME not in registry:
        registry.register(NAME, target="gracekv.lm_eval.model:GraceLM")


__all__ = ["register"]
