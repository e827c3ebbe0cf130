"""Replaces a model's attention function during one forward pass."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.model_layers import attention_module
from gracekv.undo import undone

BASE_ATTENTION = ("sdpa", "eager")
"""Attention implementations of transformers that a patched one can replace."""

_numbers = itertools.count()

attached_bases: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The attention implementation of each attached model before `gracekv.hf.attach`."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of one call of a model's attention function.

    Attributes:
        stock: the model's own function.
        module: the attention module that calls it.
        query: [1, H, C, d].
        key: [1, G, S, d].
        value: [1, G, S, d].
        mask: as the stock function takes it.
        options: what else it takes, by name.
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
    def logits(self) -> dict[str, Any]:
        """The `softcap` of the logits and the `sinks` [H], or None for each."""
        return {"softcap": self.options.get("softcap"), "sinks": self.options.get("s_aux")}

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Any:
        """Call the stock function with these tensors in place of the call's own.

        `query` is [1, H, C, d], `key` and `value` are [1, G, S, d].
        """
        return self.stock(self.module, query, key, value, mask, **self.options)


@contextmanager
def patched_attention(model: Any, attend: Callable[[AttentionCall], Any]) -> Iterator[None]:
    """Replace the model's attention function by `attend` inside the `with` block.
    Afterwards, or if the pass fails, the model and transformers' registries are as before. Raises
    `UnsupportedModelError` as `base_attention` does.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = model.config._attn_implementation
    base = base_attention(model)
    name = f"gracekv_capture_{next(_numbers)}"
    masks = AttentionMaskInterface._global_mapping
    stock = attention_function(model, base)

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        # Some families pass the mask by name.
        return attend(AttentionCall(stock, module, query, key, value, attention_mask, kwargs))

    def undo() -> None:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        masks.pop(name, None)

    with undone(undo):
        AttentionInterface.register(name, attention)
        # An attention name without a mask of the same name would silently get no mask at all.
        AttentionMaskInterface.register(name, masks[base])
        model.set_attn_implementation(name)
        yield


def base_attention(model: Any) -> str:
    """The stock attention implementation under the model's current one, "sdpa" or "eager".

    Raises `UnsupportedModelError` if it is another one.
    """
    name = model.config._attn_implementation
    if name == "gracekv":
        # Models may share a config, and so the implementation too.
        alike = (base for other, base in attached_bases.items() if other.config is model.config)
        name = attached_bases.get(model) or next(alike, "sdpa")
    if name not in BASE_ATTENTION:
        raise UnsupportedModelError(
            f"The model's attention implementation is {name!r}; gracekv works on top of "
            f"{' or '.join(BASE_ATTENTION)}. Call model.set_attn_implementation('sdpa') first."
        )
    return str(name)


def attention_function(model: Any, base: str) -> Any:
    """The function that the model's attention modules call for `base`."""
    from transformers import AttentionInterface

    # "eager" is not in transformers' table: each modeling file has its own.
    modules = map(attention_module, model.get_decoder().layers)
    module = sys.modules[type(next(x for x in modules if x is not None)).__module__]
    return AttentionInterface().get_interface(base, module.__dict__.get("eager_attention_forward"))


def input_device(model: Any) -> torch.device:
    """The device on which the model expects its token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Weights that accelerate offloads lie on "meta" between calls; its hooks move the ids.
    return torch.device("cpu") if device.type == "meta" else device
