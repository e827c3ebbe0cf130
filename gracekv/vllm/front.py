"""`Front`: what is known of contexts where vLLM takes requests in."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gracekv.distributed.sharding import HeadShard, check_works_sharded
from gracekv.errors import BudgetError, ConfigError, StoreError, UnsupportedModelError
from gracekv.prefill.fingerprint import tokenizer_marks
from gracekv.vllm.documents import continuing, opened, question_text
from gracekv.vllm.orders import Compression, Follow
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.serving import open_store

# Names of which it is known how they go on. Source: ours.
_REMEMBERED = 4096


class Front:
    """Takes documents and questions in.

    Args:
        vllm_config: vLLM's.

    Attributes:
        store: of which only headers are read.
        follows: how the latest contexts go on that came in here, by name.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config, self.store = vllm_config, open_store(vllm_config)
        self.follows: OrderedDict[str, Follow] = OrderedDict()
        self._format: tuple[dict[str, str], str | None] | None = None

    def question(self, name: str, ids: Sequence[int], tokenizer: Any) -> Sequence[int]:
        """The prompt by which a question goes on after its context.

        Args:
            name: of the context.
            ids: of the request's prompt.
            tokenizer: the front's.

        Raises `StoreError` if it does not go on. Where nothing is known of the context here, the
        scheduler knows, or refuses the request.
        """
        if name in self.follows:
            return continuing(tokenizer, name, self.follows[name], ids)
        header = None
        with contextlib.suppress(StoreError):
            header = self.store.header(name)
        return ids if header is None else continuing(tokenizer, name, header, ids)

    def document(
        self, order: Compression, ids: Sequence[int], tokenizer: Any
    ) -> tuple[list[int], Follow]:
        """The prompt by which a document is read, and how it goes on.

        Args:
            order: what shall be made of it.
            ids: of the request's prompt.
            tokenizer: the front's; None if it has none.

        Raises `StoreError` if the engine cannot compress it.
        """
        found, start = list(ids), None
        if tokenizer is not None:
            found, start = opened(tokenizer, ids)
        follow = Follow()
        if start is not None:
            # Marks take half a second.
            self._format = self._format or (tokenizer_marks(tokenizer), question_text(tokenizer))
            follow = Follow(start, *self._format, template=True)
        most = self._most()
        if len(found) + 1 > most:
            raise StoreError(
                f"The document has {len(found):,} tokens, and this engine computes at most "
                f"{most - 1:,} in one prompt. Send a shorter one, or serve with more pages "
                f"(--max-model-len, --kv-cache-memory-bytes)."
            )
        # One token is read after the context: the last one of a prompt gets no entries.
        found += found[-1:]
        spans = replace(order, follow=follow).spans(len(found))
        try:
            check_works_sharded(order.pipeline, HeadShard(ranks=self._served.ranks))
            order.pipeline.plan_for(self._served.model, spans, order.budget)
        except (BudgetError, ConfigError, UnsupportedModelError) as error:
            raise StoreError(str(error)) from error
        self.follows[order.name] = follow
        while len(self.follows) > _REMEMBERED:
            self.follows.popitem(last=False)
        return found, follow

    @functools.cached_property
    def _served(self) -> ServedModel:
        return ServedModel.of(self._config)

    def _most(self) -> int:
        """Tokens that a prompt may have."""
        cache, most = self._config.cache_config, self._config.model_config.max_model_len - 1
        if cache.num_gpu_blocks:
            # One page is nobody's.
            most = min(most, (cache.num_gpu_blocks - 1) * cache.block_size)
        return int(most)
