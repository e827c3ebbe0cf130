"""`Front`: checks documents and questions where vLLM takes requests in."""

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
from gracekv.prefill.supported import check_needs
from gracekv.recipes import DEFAULT_WITHOUT_QUESTION
from gracekv.vllm.documents import continuing, opened, question_text
from gracekv.vllm.header import Continuation
from gracekv.vllm.orders import Compression
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.serving import open_store

# The most contexts whose continuation is remembered. Source: ours.
_REMEMBERED = 4096


class Front:
    """Takes in documents and questions.

    Args:
        vllm_config: vLLM's.

    Attributes:
        store: only its headers are read here.
        orders: of the contexts that came in last, by name.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config, self.store = vllm_config, open_store(vllm_config)
        self.orders: OrderedDict[str, Compression] = OrderedDict()
        self._format: Continuation | None = None

    def question(self, name: str, ids: Sequence[int], tokenizer: Any) -> Sequence[int]:
        """The prompt with which a question continues its context.

        Args:
            name: of the context.
            ids: the request's prompt.
            tokenizer: the front's.

        Raises `StoreError` if it does not continue the context. The prompt of an unknown context
        stays as it is; the scheduler knows the context, or refuses the request.
        """
        _, follow = self.known(name)
        return ids if follow is None else continuing(tokenizer, name, follow, ids)

    def known(self, name: str) -> tuple[str, Continuation | None]:
        """A context's recipe and how requests continue it.

        The default recipe and None if only the scheduler knows the context.
        """
        if name in self.orders:
            return self.orders[name].recipe, self.orders[name].follow
        with contextlib.suppress(StoreError):
            header = self.store.header(name)
            return header.recipe, header.continuation
        return DEFAULT_WITHOUT_QUESTION, None

    def document(
        self, order: Compression, ids: Sequence[int], tokenizer: Any
    ) -> tuple[list[int], Compression]:
        """The prompt with which a document is read, and the order with its start and continuation.

        Args:
            order: as the client sent it.
            ids: the request's prompt.
            tokenizer: the front's, or None.

        Raises `StoreError` if the engine cannot compress the document.
        """
        found, start = list(ids), None
        if tokenizer is not None:
            found, start = opened(tokenizer, ids)
        if order.source is not None:
            # A message to the chat endpoint is the passage; other ids are used as they are.
            found, start = found[start:] if start else list(ids), None
        elif start is not None:
            # Hashing a vocabulary takes half a second.
            self._format = self._format or Continuation(
                tokenizer=dict(tokenizer_marks(tokenizer)),
                question_text=question_text(tokenizer),
                template=True,
            )
            order = replace(order, start=start, follow=self._format)
        cache, most = self._config.cache_config, self._config.model_config.max_model_len - 1
        if cache.num_gpu_blocks:
            # vLLM keeps one page for itself.
            most = min(most, (cache.num_gpu_blocks - 1) * cache.block_size)
        if len(found) + 1 > most:
            raise StoreError(
                f"The document has {len(found):,} tokens, and this engine computes at most "
                f"{most - 1:,} in one prompt. Send a shorter one, or serve with more pages "
                f"(--max-model-len, --kv-cache-memory-bytes)."
            )
        # One token is read after the context, since the last one of a prompt gets no entries.
        found += found[-1:]
        spans = order.spans(len(found))
        try:
            served = self._served
            check_works_sharded(order.pipeline, HeadShard(ranks=served.ranks))
            order.pipeline.plan_for(served.model, spans, order.budget)
            if order.source is not None:
                check_needs(served.model, order.pipeline.needs(), passage=True)
        except (BudgetError, ConfigError, UnsupportedModelError) as error:
            raise StoreError(str(error)) from error
        follow = order.follow if order.source is None else self.known(order.source)[1]
        if follow is not None:
            self.orders[order.name] = replace(order, follow=follow)
        while len(self.orders) > _REMEMBERED:
            self.orders.popitem(last=False)
        return found, order

    @functools.cached_property
    def _served(self) -> ServedModel:
        return ServedModel.of(self._config)
