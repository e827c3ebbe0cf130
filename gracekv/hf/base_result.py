"""`BaseResult`: the common base of the results of one prompt and of a batch."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gracekv import recipes
from gracekv.cache import Accounting, CompressedCache, Timings, dequantised
from gracekv.cache.serialization import write_cache
from gracekv.cache.sharding import gathered_cache
from gracekv.decode import Limit
from gracekv.distributed.agreement import in_step
from gracekv.errors import CacheError, expect
from gracekv.files import VERSION, path_of
from gracekv.hf.attention import set_attention
from gracekv.hf.cache import GraceCache, held_memory
from gracekv.hf.generation import continue_ids, decode_rows, padded_inputs
from gracekv.hf.limited import LimitedCache
from gracekv.pipeline import Pipeline
from gracekv.pipeline.run import Run
from gracekv.prefill.fingerprint import check_same_model, fingerprint, quick_marks
from gracekv.prefill.prompt import Prompt
from gracekv.registry.plugins import foreign_modules


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class BaseResult(ABC):
    """Compressed prompts that can be continued any number of times.

    Attributes:
        model: the model that the cache belongs to.
        prompts: the compressed prompts, in order.
        pipeline: the pipeline that compressed them, and the backend that reads the cache.
        keep_run: whether `details` are kept.
        runs: the pipeline run of each prompt; without `keep_run`, a record of its scores and
            selection in place of the stages' results.
        shared_cache: the cache that every new one continues; never generated on itself.
    """

    model: Any
    prompts: tuple[Prompt, ...]
    pipeline: Pipeline
    keep_run: bool
    runs: tuple[Run, ...]
    shared_cache: GraceCache

    is_batch: ClassVar[bool]

    @classmethod
    def from_runs(
        cls,
        model: Any,
        prompts: Sequence[Prompt],
        runs: Sequence[Run],
        pipeline: Pipeline,
        *,
        packed: CompressedCache | None = None,
        keep_run: bool = False,
    ) -> Self:
        """Build a result from pipeline runs, and attach the model.

        Args:
            model: the model that made the prefills; it has passed `check_model`.
            prompts: one per run.
            runs: the pipeline's run of each prompt.
            pipeline: the pipeline; its backend reads the cache.
            packed: the joined caches of `runs`, or this process's heads of them; default: joined
                here.
            keep_run: keep the results of the stages for `details`.
        """
        if packed is None:
            caches = [run.cache for run in runs]
            packed = CompressedCache.stack(caches) if cls.is_batch else caches[0]
        # The prompts' own copies would double the memory.
        runs = [replace(x, cache=packed.sequence(n)) for n, x in enumerate(runs)]
        cache = GraceCache(packed, pipeline.backend)
        cache.warm_up(model)
        # This cache is only a template; caches made from it get layers of their own.
        cache.layers.clear()
        set_attention(model)
        if not cls.is_batch:
            kept = replace(runs[0].accounting, backend_bytes=cache.held_bytes)
            runs = [replace(runs[0], accounting=kept)]
        return cls(model, tuple(prompts), pipeline, keep_run, tuple(runs), cache)

    def new_cache(self, limit: Limit | None = None) -> GraceCache:
        """A new cache with an empty tail, over packed entries that all caches share.

        Every call makes another cache: keep it in a variable to continue a conversation on it.

        With `limit`, it is a `LimitedCache`, which is cut while it grows. It holds entries in the
        model's dtype, in a copy if the result is quantised. Raises `BudgetError` if the limit is
        too small for the entries that must stay, `CacheError` if heads are spread over processes,
        `ConfigError` if `limit` is not a `Limit`. With or without a limit, raises `CacheError` if
        the model's dtype or active adapters have changed.
        """
        self.check_model()
        if limit is None:
            return self.shared_cache.with_empty_tail()
        expect(limit, Limit, "limit takes a gracekv.Limit, such as Limit(entries_per_head=512)")
        runs = [(run.entry_scores(), run.cache) for run in self.runs]
        # A prompt of which everything was kept has no scores, and stays.
        rows = [scores or cache.unknown_scores() for scores, cache in runs]
        any_scores = any(scores for scores, _ in runs)
        scores = tuple(map(torch.cat, zip(*rows, strict=True))) if any_scores else None
        source, strategy = self.shared_cache, limit.decoder(self.pipeline.decode)
        if any(layer.coded for layer in self.packed.layers):
            source = GraceCache(dequantised(self.packed), self.pipeline.backend)
            source.layers.clear()
        return LimitedCache(source, self.model, limit, strategy, scores)

    def check_model(self, marks: Any = quick_marks) -> None:
        """Raise `CacheError` if the model's dtype or active adapters have changed.

        `marks(model)` returns the facts to compare; `fingerprint` also reads weights.
        """
        fix = "Undo the change, or compress again with this model."
        check_same_model(self.fingerprint, self.model, "The compressed context", fix, marks)

    @property
    def packed(self) -> CompressedCache:
        """The compressed entries, one sequence per prompt; immutable."""
        return self.shared_cache.packed

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of `model.generate` to pass with the cache: whole prompts, padded on the left.

        "input_ids" and "attention_mask", int64 [S, T of the longest], on the model's device.
        """
        return padded_inputs(self.model, self._rows, self.shared_cache, self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The prompts' tokenizer, or None."""
        return self.prompts[0].tokenizer

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Identifies the model and tokenizer, in the state in which they made the entries."""
        return self.runs[0].fingerprint

    @property
    def _rows(self) -> list[Tensor]:
        return [prompt.ids for prompt in self.prompts]

    @property
    def accounting(self) -> Accounting:
        """Entries and bytes of all prompts together; `entries` are [S*L, G], prompt by prompt."""
        total = Accounting.total(self.accountings, backend_bytes=self.shared_cache.held_bytes)
        return replace(total, held_bytes=held_memory(self.shared_cache, self.runs, self._rows))

    @property
    def accountings(self) -> tuple[Accounting, ...]:
        """Entries and bytes of each prompt; only `accounting` counts the backend's copies."""
        return tuple(run.accounting for run in self.runs)

    @property
    def timings(self) -> Timings:
        """Wall seconds of the capture and of each stage, summed over the prompts."""
        parts = [run.timings.as_dict() for run in self.runs]
        return Timings(**{stage: sum(part[stage] for part in parts) for stage in parts[0]})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed prompts to one safetensors file, for `gracekv.load(path, model)`.

        The file holds entries, token ids, spans, pipeline, accounting, and a fingerprint of model
        and tokenizer, but neither the prompts' text nor the results of the stages. It is written
        completely or not at all. If the model's heads are spread over processes, all of them must
        call this, and process 0 writes one file with all heads.
        """
        with in_step(self.model) as shard:
            runs = zip(self.prompts, self.runs, strict=True)
            header = {
                "gracekv_version": VERSION,
                "batch": self.is_batch,
                # A prefill that was built from tensors has no fingerprint.
                "model": {**fingerprint(self.model, self.tokenizer), **self.fingerprint},
                "pipeline": self.pipeline.to_dict(),
                "modules": foreign_modules(self.pipeline),
                "prompts": [prompt_facts(prompt, run) for prompt, run in runs],
            }
            # Views of one tensor cannot be saved together.
            ids = {f"prompts.{n}.ids": row.clone() for n, row in enumerate(self._rows)}
            packed = gathered_cache(self.packed, shard) if shard.ranks > 1 else self.packed
            if shard.rank == 0:
                write_cache(path_of(path), packed, header, ids)
            # Wait until process 0 has written the file, or failed.
            shard.total(1)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raises `CacheError`: a pickle would hold the whole model."""
        raise CacheError(
            f"A {type(self).__name__} cannot be pickled or copied, since it holds its model. Write "
            f"it with result.save(path), and read it with gracekv.load(path, model)."
        )

    def generate_ids(
        self, max_new_tokens: int = 64, *, limit: Limit | None = None, **kwargs: Any
    ) -> Tensor:
        """int64 [rows, new tokens]: the ids that `model.generate` adds to the prompts.

        There is a row per prompt unless `num_return_sequences` asks for more; rows that end early
        are padded with the padding id. Decoding is greedy unless `kwargs`, which are passed to
        `model.generate`, say otherwise. With `limit`, the cache stays within it: see `new_cache`.
        Raises `CacheError` if these tokens exceed the positions that the model's RoPE or sliding
        window allows.
        """
        cache = self.new_cache(limit)
        return continue_ids(self.model, self._rows, cache, self.tokenizer, max_new_tokens, kwargs)

    def _texts(self, ids: Tensor) -> list[str]:
        return decode_rows(self.tokenizer, ids)

    def __repr__(self) -> str:
        account = self.accounting
        heads = self.accountings[0].entries.numel()
        full = heads * sum(prompt.spans.context_length for prompt in self.prompts)
        batch = f"{len(self.prompts)} prompts, " if self.is_batch else ""
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {recipes.label(self.pipeline)!r}, "
            f"{batch}{sum(len(prompt.ids) for prompt in self.prompts):,} tokens, "
            f"{account.spent:,} of {full:,} context entries, {account.sizes})"
        )


def prompt_facts(prompt: Prompt, run: Run) -> dict[str, Any]:
    """The header's facts of one prompt, ready for JSON, without its text and tokenizer."""
    entries = {"entries": run.accounting.entries.tolist(), "backend_bytes": 0}
    return {
        "spans": asdict(prompt.spans),
        "format": [prompt.separator, prompt.template, prompt.messages, prompt.day],
        "plan": asdict(run.plan),
        "accounting": asdict(run.accounting) | entries,
        "timings": asdict(run.timings),
    }
