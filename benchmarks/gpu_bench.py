"""State shared by the parts of `gpu.py`: options, the model, and prompts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import torch
from decode_shapes import GEOMETRIES, model_of
from decode_steps import copy_speed
from transformers import AutoModelForCausalLM

import gracekv

# float32 products on tensor cores are three tf32 ones; their error is near 1e-6.
FLOAT32_ON_GPU = 1e-5


@dataclasses.dataclass
class Bench:
    """The command line's options, and shared objects, made on first use."""

    options: argparse.Namespace

    @property
    def cuda(self) -> bool:
        return self.options.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @functools.cached_property
    def model(self) -> Any:
        if self.options.weights:
            model = AutoModelForCausalLM.from_pretrained(
                self.options.weights, dtype=self.dtype, local_files_only=True
            )
            return model.to(self.options.device).eval()
        torch.manual_seed(0)
        geometry = GEOMETRIES[self.options.geometry]
        model = model_of(geometry, self.dtype, self.options.device)
        # Attention is nearly uniform with the default initial weights, and selective with these.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weight.normal_(std=2.0 * weight.shape[1] ** -0.5)
                elif name.endswith(("proj.weight", "lm_head.weight")):
                    weight.normal_(std=weight.shape[1] ** -0.5)
                elif name.endswith("embed_tokens.weight"):
                    weight.normal_()
        return model

    def prompt(self, length: int, vocabulary: int | None = None) -> gracekv.Prompt:
        rng = torch.Generator().manual_seed(length)
        size = self.model.config.vocab_size if vocabulary is None else vocabulary
        ids = torch.randint(0, size, (length,), generator=rng)
        return gracekv.Prompt.from_ids(ids, (4, length - 36), question_end=length - 4)

    @functools.cached_property
    def copied(self) -> float:
        """Bytes read and written per second by a copy."""
        return copy_speed(self.options.device, (1024 if self.cuda else 8) << 20)
