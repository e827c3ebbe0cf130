"""The model `gracekv` of the evaluation harness lm-eval: its tasks over compressed caches.

`python -m gracekv.lm_eval` is lm-eval's own command line with `--model gracekv`; `register` makes
the model known to a Python program. Nothing here imports lm-eval before it is used.
"""

from __future__ import annotations

from gracekv.errors import MissingDependencyError

NAME = "gracekv"


def register() -> None:
    """Make `gracekv` known to lm-eval's registry of models; a second call changes nothing.

    lm-eval finds models by its registry alone and looks for none in installed packages. Raises
    `MissingDependencyError` if lm-eval is not installed.
    """
    try:
        # Its own models first: it adds none to a registry that holds one already.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise MissingDependencyError(
            f"The evaluation harness lm-eval, 0.4.13 or later, is not installed ({error}). Install "
            f"it: pip install 'gracekv[lm-eval]'"
        ) from error
    if NAME not in model_registry:
        model_registry.register(NAME, target="gracekv.lm_eval.model:GraceLM")


__all__ = ["register"]
