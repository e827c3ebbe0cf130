"""`Jobs`: makes, lists and deletes contexts for the scheduler."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from gracekv.errors import StoreError
from gracekv.vllm.compressing import Outcome
from gracekv.vllm.exporting import delete_context
from gracekv.vllm.header import ContextHeader, is_missing
from gracekv.vllm.orders import Compression, Listing, Order, names_of
from gracekv.vllm.serving import refusal
from gracekv.vllm.store import ContextStore

WAIT = 600.0
"""Maximum seconds that a request waits for a context in the making. Source: ours."""

# Maximum number of finished jobs that are remembered. Source: ours.
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Job:
    """A context in the making.

    Attributes:
        request: id of the request with the prompt.
        order: the order in the request.
        length: T, tokens of the prompt.
        read: whether all tokens are computed, so that the request is no longer needed.
    """

    request: str
    order: Compression
    length: int
    read: bool = False


class Jobs:
    """A queue of contexts in the making, and a record of those that were made.

    Args:
        store: the scheduler's store, which gets the headers of unsaved contexts.
        ranks: number of workers that share a model; each makes its part of a context.

    Attributes:
        jobs: by request id, in order of arrival; the first one is current.
        forgotten: names of contexts that workers have yet to delete, each with the digest to
            delete, or None for any.
        made: ids of requests whose contexts workers have yet to serve.
    """

    def __init__(self, store: ContextStore, ranks: int = 1) -> None:
        self._store, self._ranks = store, ranks
        # Outcomes of the current job, which ends when every worker has reported.
        self._outcomes: list[Outcome] = []
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self._done: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._expiry: dict[str, tuple[float, str]] = {}
        self.forgotten: dict[str, str | None] = {}
        self.made: set[str] = set()
        # Peak bytes held of the current document.
        self._recorded = 0

    @property
    def current(self) -> str | None:
        """Id of the request whose turn it is."""
        return next(iter(self.jobs), None)

    @property
    def pending(self) -> bool:
        """Whether the engine has to keep stepping without requests to finish a context."""
        return bool(self.made) or any(job.read for job in self.jobs.values())

    def is_making(self, name: object) -> bool:
        """Whether a context of that name is in the making."""
        return any(job.order.name == name for job in self.jobs.values())

    def source(self, name: str) -> ContextHeader:
        """The header of a context to extend; raises `StoreError` if there is none yet."""
        if self.is_making(name):
            raise StoreError(f"Context {name!r} is being made. Extend it afterwards.")
        return self._store.header(name)

    def add(
        self, request: str, order: Order, parameters: Mapping[str, Any], length: int
    ) -> dict[str, Any] | None:
        """Execute or queue a request's order; returns the reply, or None if it was queued.

        Args:
            request: the request's id.
            order: its order.
            parameters: its `kv_transfer_params`.
            length: tokens of its prompt.

        Raises `StoreError` if the request may not use the name, or if the context to delete does
        not exist or is in the making.
        """
        self.expire()
        for name in names_of(order):
            self._store.check_allowed(name, parameters)
        if isinstance(order, Compression):
            order.spans(length)
            if order.source is not None:
                name, tokens = order.source, length - 1
                header = self.source(name)
                if header.has_question or header.prompt_ids:
                    raise StoreError(
                        f"The prompt of context {name!r} continues after its entries, so a passage "
                        f"cannot follow them. Compress a prompt without a question: "
                        f"Prompt.from_chat(tokenizer, context=text)."
                    )
                room = tokens if header.positions is None else header.positions - header.length
                if 0 <= room < tokens:
                    raise StoreError(
                        f"The passage has {tokens:,} tokens, and context {name!r} leaves {room:,} "
                        f"of the model's {header.positions:,} positions. Send a shorter one."
                    )
            self.jobs[request] = Job(request, order, length)
            return None
        if isinstance(order, Listing):
            return {"contexts": self.listing(parameters, order.name)}
        if self.is_making(order.name):
            raise StoreError(f"Context {order.name!r} is being made. Delete it afterwards.")
        # First, since it may be refused.
        saved = delete_context(self._store.folder(order.name))
        self.forgotten[order.name] = None
        self._expiry.pop(order.name, None)
        in_memory = self._store.forget(order.name)
        known = self._done.pop(order.name, None) is not None
        if not (saved or in_memory or known):
            raise StoreError(
                f"There is no context {order.name!r} in the store to delete."
            ) from FileNotFoundError()
        return {"name": order.name, "state": "deleted"}

    def expire(self) -> None:
        """Delete contexts that have expired."""
        now = time.monotonic()
        for name, (end, digest) in list(self._expiry.items()):
            if now >= end and not self.is_making(name):
                del self._expiry[name]
                if self._store.forget(name, digest):
                    self.forgotten[name] = None

    def finished(self, request: str, computed: int) -> dict[str, Any]:
        """The reply to a compressing request that has ended.

        If it ended before its prompt was computed, no context is made.

        Args:
            request: the request's id.
            computed: number of its tokens that were computed.
        """
        job = self.jobs[request]
        if computed < job.length:
            if request == self.current:
                self._recorded = 0
            del self.jobs[request]
            return refused(StoreError("The request ended before its prompt was computed."))
        self.jobs[request] = replace(job, read=True)
        return {"name": job.order.name, "state": "compressing"}

    def update(
        self, outcomes: Iterable[Outcome], dropped: Set[tuple[str, str]], recorded: int = 0
    ) -> None:
        """Process a report of the workers.

        Args:
            outcomes: outcomes of the current job.
            dropped: names and digests of unsaved contexts that were dropped for lack of room.
            recorded: bytes held of the current document.
        """
        self._recorded = max(self._recorded, recorded)
        for name, digest in dropped:
            if self._store.forget(name, digest):
                # Other ranks may still hold their parts.
                self.forgotten[name] = digest
        self._outcomes = [x for x in (*self._outcomes, *outcomes) if x.request in self.jobs]
        if len(self._outcomes) < self._ranks:
            return
        ended, self._outcomes = self._outcomes, []
        order = self.jobs.pop(ended[0].request).order
        reason = " ".join(dict.fromkeys(x.reason for x in ended if x.reason))
        name, header = order.name, None if reason else ended[0].header
        known: dict[str, Any] = {"seconds": round(max(x.seconds for x in ended), 3)}
        known["recorded_bytes"], self._recorded = self._recorded, 0
        if header is None:
            known |= {"name": name, "state": "failed", "reason": reason, "recipe": order.recipe}
        else:
            known["digest"] = header.digest
            self.made.add(ended[0].request)
            self._expiry.pop(name, None)
            if order.save:
                self._store.forget(name)
            else:
                self._store.put(header, name)
            if order.expires is not None:
                self._expiry[name] = time.monotonic() + order.expires, header.digest
        self._done[name] = known
        self._done.move_to_end(name)
        if len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)

    def refused(self, error: Exception, name: object = None) -> dict[str, Any]:
        """The reply to a request that failed, with the reason why `name` is missing."""
        reply = refused(error)
        if reply["status"] == 404 and isinstance(name, str):
            if self.is_making(name):
                reply["reason"] = f"Context {name!r} is still being made after {WAIT:.0f} s."
            elif (reason := self._done.get(name, {}).get("reason")) is not None:
                reply["reason"] = f"Context {name!r} could not be made. {reason}"
        return reply

    def listing(self, given: Mapping[str, Any], only: str | None = None) -> list[dict[str, Any]]:
        """A description of each context that a request with these `kv_transfer_params` may see.

        `only` is the name of the only context to list; [] if it does not exist.
        """
        names = self._store.names() if only is None else [only]
        found = {name: facts for name in names if (facts := self._described(name))}
        # The old context answers while its replacement is in the making, or if that fails.
        for name, known in self._done.items():
            if "reason" in known:
                found[name] = found.get(name, {}) | known
        for job in self.jobs.values():
            name, recipe = job.order.name, job.order.recipe
            held = self._recorded if job.request == self.current else 0
            made = {"name": name, "state": "compressing", "recipe": recipe, "recorded_bytes": held}
            found[name] = found.get(name, {}) | made
        listed = []
        for name in sorted(found if only is None else found.keys() & {only}):
            try:
                self._store.check_allowed(name, given)
                listed.append(found[name])
            # The request may not see the context, or the operator's `allow` fails, which is logged.
            except Exception as error:
                refusal(error)
        return listed

    def _described(self, name: str) -> dict[str, Any] | None:
        try:
            header = self._store.header(name)
        except StoreError as error:
            failed = {"name": name, "state": "failed", "reason": str(error)}
            return None if is_missing(error) else failed
        known = self._done.get(name, {})
        mine = known.get("digest") == header.digest
        whole = header.length * int(header.model["layers"] * header.model["kv_heads"])
        facts = {x: getattr(header, x) for x in ("entries", "bytes", "length", "recipe")}
        facts |= {x: known[x] if mine else None for x in ("seconds", "recorded_bytes")}
        facts |= {"ratio": round(whole / max(1, header.entries), 3)}
        saved = name not in self._store.loaded.made
        return {"name": name, "state": "ready", **facts, "saved": saved}


def refused(error: Exception) -> dict[str, Any]:
    """The reply to a request that the scheduler or a worker refuses, with its HTTP status."""
    status = 404 if is_missing(error) else 400
    return {"state": "failed", "reason": refusal(error), "status": status}
