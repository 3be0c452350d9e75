"""Messages between the scheduler's and the workers' connectors."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

#: vLLM's null block: the placeholder for blocks that a sliding window has left.
NULL_BLOCK = 0


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Message of a worker after its cache was registered."""

    #: Parts of a block that this worker has; each is one object.
    parts: list[str]
    #: Whether blocks are copied before they are saved, so that they can be reused at once.
    staged: bool
    #: Reason why the configuration is not supported, or "".
    unsupported: str = ""


@dataclass
class Load:
    """Blocks to load for a request."""

    request: str
    hashes: list[bytes]
    #: Target blocks: for each group of layers, one per hash.
    blocks: list[list[int]]


@dataclass
class Save:
    """Blocks of a request that are full after this step."""

    number: int
    request: str
    hashes: list[bytes]
    blocks: list[list[int]]


@dataclass
class Step(KVConnectorMetadata):
    """Work of the workers in one step of the engine."""

    number: int
    prefix: str
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    #: Saves of finished requests: their blocks were full before this step, so they need not wait for the forward pass.
    late: list[Save] = field(default_factory=list)
    #: Finished requests whose blocks are kept until their saves end.
    ended: list[str] = field(default_factory=list)
    #: Requests whose blocks may be overwritten in this step.
    preempted: list[str] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Results of a worker. Reports of all ranks are aggregated."""

    #: Finished saves: number of ranks that finished, and blocks that at least one rank did not save.
    saved: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    #: Requests for which a rank could not load all blocks.
    failed: set[str] = field(default_factory=set)
    #: Steps with layerwise loads: number of ranks that loaded everything, and number of ranks that did not.
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.saved or self.failed or self.steps)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        for number, (ranks, missing) in other.saved.items():
            own_ranks, own_missing = self.saved.get(number, (0, set()))
            self.saved[number] = (own_ranks + ranks, own_missing | missing)
        for number, (complete, failed) in other.steps.items():
            own_complete, own_failed = self.steps.get(number, (0, 0))
            self.steps[number] = (own_complete + complete, own_failed + failed)
        self.failed |= other.failed
        return self
