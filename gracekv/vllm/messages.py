"""What scheduler and workers tell one another of contexts. Imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from gracekv.vllm.compressing import Chunk, Outcome


@dataclass
class PageLoad:
    """Entries of a context with equal shares that go into a request's pages.

    Attributes:
        name: of the context.
        digest: of the context.
        first: of the entries, counted in each head; those before are in the pages already.
        blocks: the pages of all its entries.
    """

    name: str
    digest: str
    first: int
    blocks: list[int]


@dataclass
class StepContexts(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers before a step.

    Attributes:
        named: (name, digest, tokens of the step) of requests with ragged contexts, by the first
            block of their pages.
        loads: what goes into pages before the step.
        refused: ids of requests whose context cannot be used.
        used: digests of the contexts of all requests that have not ended.
        chunk: tokens of the step that are recorded, to be compressed.
        current: id of the request whose prompt is compressed now.
        forgotten: names of contexts that were deleted.
        idle: whether the step has no tokens.
    """

    named: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    loads: list[PageLoad] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    chunk: Chunk | None = None
    current: str | None = None
    forgotten: set[str] = field(default_factory=set)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler after a step.

    Attributes:
        outcome: of the prompt that is compressed.
        dropped: digests of contexts in no file that went for want of room, by name.
    """

    outcome: Outcome | None
    dropped: dict[str, str]

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """What both tell."""
        return WorkerReport(self.outcome or other.outcome, self.dropped | other.dropped)
