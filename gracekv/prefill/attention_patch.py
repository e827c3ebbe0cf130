"""Replaces a model's attention function during one forward pass."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.model_layers import attention_module, own_decoder
from gracekv.undo import uncompiled, undone, without_autocast

BASE_ATTENTION = ("sdpa", "eager")
"""Attention implementations of transformers that a patched one can replace."""

ATTACHED = {"gracekv": "sdpa", "gracekv_eager": "eager"}
"""Attention names of attached models (`gracekv.hf.attach`), and the implementation under each."""

_numbers = itertools.count()
# Re-entrant, as in `gracekv.undo`.
_new_entry = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of one call of a model's attention function.

    Attributes:
        stock: the model's own function.
        module: the attention module that calls it.
        query: [1, H, C, d].
        key: [1, G, S, d].
        value: [1, G, S, d]; all three have the same dtype.
        mask: the stock function's mask.
        options: its other keyword arguments.
    """

    stock: Callable[..., Any]
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: Mapping[str, Any]

    @property
    def layer(self) -> int:
        """Number of the model's layer."""
        return int(self.module.layer_idx)

    @property
    def scale(self) -> float:
        """Factor of q . k."""
        return float(self.options["scaling"])

    @property
    def softmax_args(self) -> dict[str, Any]:
        """`scale`, `softcap` and `sinks`, as in `TokenRun`; sinks are float32."""
        sinks = self.options.get("s_aux")
        sinks = None if sinks is None else sinks.detach().float()
        return {"scale": self.scale, "softcap": self.options.get("softcap"), "sinks": sinks}

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Any:
        """Call the stock function with these tensors in place of the call's own.

        `query` is [1, H, C, d], `key` and `value` are [1, G, S, d].
        """
        return self.stock(self.module, query, key, value, mask, **self.options)


class Enough(Exception):
    """Raised by the `attend` of `patched_attention` to end the model's forward, and the block."""


# For each decoder, the lock of the thread that reads the model or switches its attention, and the
# name in transformers' tables of the functions that run while it is read. The name lasts as long as
# the model, so other threads that run the model always find it.
_entries: WeakKeyDictionary[Any, tuple[threading.RLock, str]] = WeakKeyDictionary()


def _entry(model: Any) -> tuple[threading.RLock, str]:
    from transformers import AttentionInterface, AttentionMaskInterface

    decoder = own_decoder(model)
    with _new_entry:
        if decoder not in _entries:
            name = f"gracekv_capture_{next(_numbers)}"
            for table in (AttentionInterface, AttentionMaskInterface):
                finalize(decoder, table._global_mapping.pop, name, None)
            _entries[decoder] = threading.RLock(), name
        return _entries[decoder]


def model_lock(model: Any) -> threading.RLock:
    """The lock of the thread that reads `model` or switches its attention; re-entrant."""
    return _entry(model)[0]


def own_thread(
    function: Callable[..., Any], others: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wrap `function`: only this thread calls it; other threads call `others`, or do nothing."""
    thread = threading.get_native_id()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_native_id() == thread:
            return function(*args, **kwargs)
        return None if others is None else others(*args, **kwargs)

    return call


@contextmanager
def patched_attention(model: Any, attend: Callable[[AttentionCall], Any]) -> Iterator[None]:
    """Route this thread's calls of the model's attention function to `attend`.

    Lasts for the `with` block, which ends early if `attend` raises `Enough`. Other threads that run
    the model are not affected; those that read or attach it wait. In the block the model runs
    uncompiled, and `attend` runs without autocast: queries and keys are converted to the dtype of
    the values.

    Raises `UnsupportedModelError` like `base_attention`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    (lock, name), decoder = _entry(model), own_decoder(model)
    masks = AttentionMaskInterface._global_mapping

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        # Some families pass the mask by name.
        query, key = query.to(value.dtype), key.to(value.dtype)
        with without_autocast():
            return attend(AttentionCall(stock, module, query, key, value, attention_mask, kwargs))

    def register(attention: Any, mask: Any) -> None:
        # Without a mask function of the same name, the attention would silently get no mask.
        AttentionMaskInterface.register(name, mask)
        AttentionInterface.register(name, attention)

    with lock:
        old_name, base = decoder.config._attn_implementation, base_attention(model)
        stock, old_attention = attention_function(model, base), attention_function(model, old_name)

        def undo() -> None:
            # Threads that began meanwhile still look it up.
            register(old_attention, masks[old_name])
            decoder.config._attn_implementation = old_name

        with uncompiled(), undone(undo), suppress(Enough):
            register(own_thread(attention, old_attention), own_thread(masks[base], masks[old_name]))
            # `set_attn_implementation` reads source files, which packaged programs lack.
            decoder.config._attn_implementation = name
            yield


def base_attention(model: Any) -> str:
    """The stock attention implementation under the model's current one, "sdpa" or "eager".

    Raises `UnsupportedModelError` for any other.
    """
    with model_lock(model):
        name = str(own_decoder(model).config._attn_implementation)
    name = ATTACHED.get(name, name)
    if name not in BASE_ATTENTION:
        bases = BASE_ATTENTION if own_decoder(model)._supports_sdpa else BASE_ATTENTION[1:]
        raise UnsupportedModelError(
            f"The model's attention implementation is {name!r}; gracekv works on top of "
            f"{' or '.join(bases)}. Call model.set_attn_implementation({bases[0]!r}) first."
        )
    if name == "sdpa" and getattr(own_decoder(model).config, "attn_logit_softcapping", None):
        raise UnsupportedModelError(
            "torch's attention, chosen by transformers before 5.21, ignores this model's softcap. "
            "Call model.set_attn_implementation('eager') first."
        )
    return name


def attention_function(model: Any, base: str) -> Any:
    """The function that the model's attention modules call for `base`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # "eager" is not in transformers' table, since each modeling file has its own.
    modules = map(attention_module, model.get_decoder().layers)
    eager = own_eager(next(x for x in modules if x is not None))
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)


def own_eager(module: Any) -> Any:
    """The eager attention function of the file that defines the module's class or its base."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    return next(filter(None, found), None)
