"""What the scheduler's half and the workers' halves of the connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

#: The engine's block that holds nothing: it stands where a window has moved on.
NULL_BLOCK = 0


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Of one worker, once its cache is there."""

    #: What it has of a block: one object for each.
    parts: list[str]
    #: Whether blocks are copied before they are saved, so that they may be used again at once.
    staged: bool
    #: Why it cannot take part, if so.
    refuses: str = ""


@dataclass
class Load:
    """Blocks that a request wants."""

    request: str
    hashes: list[bytes]
    #: Where they go: for each group of layers, for each hash.
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
    """What workers do in one step of the engine."""

    number: int
    prefix: str
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    #: Full before this step, of requests that have ended: need not wait for the forward.
    late: list[Save] = field(default_factory=list)
    #: Requests that have ended, and whose blocks are kept until their saves are over.
    ended: list[str] = field(default_factory=list)
    #: Requests whose blocks may be overwritten in this step.
    preempted: list[str] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What became of it. Those of all ranks are added up."""

    #: Saves that are over: how many ranks say so, and which of their blocks some rank has not saved.
    saved: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    #: Requests of which a rank could not load everything.
    failed: set[str] = field(default_factory=set)
    #: Steps in which layers waited for loads: how many ranks have all of it, and how many have not.
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.saved or self.failed or self.steps)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        for number, (ranks, missing) in other.saved.items():
            mine, lost = self.saved.get(number, (0, set()))
            self.saved[number] = (mine + ranks, lost | missing)
        for number, (whole, broken) in other.steps.items():
            good, bad = self.steps.get(number, (0, 0))
            self.steps[number] = (good + whole, bad + broken)
        self.failed |= other.failed
        return self
