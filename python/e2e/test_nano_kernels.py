"""Kernels and the store on one heap: Triton's kernels, in the interpreter, push into memory of real nodes and read from it,
beside writers and readers in Rust; ranks are processes, the master is an ordinary one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_world import Process


class Rank(Process):
    def __init__(self, path: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        told = {"path": str(path), "rank": rank, "ranks": ranks, "heap_bytes": 32 << 20} | settings
        super().__init__("nano_kernels_rank.py", json.dumps(told))


World = Callable[..., list[Rank]]


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started: list[Rank] = []

    def start(ranks: int, **settings: Any) -> list[Rank]:
        path = tmp_path_factory.mktemp("n") / "w"
        started.extend(Rank(path, rank, ranks, settings) for rank in range(ranks))
        assert [rank.answer() for rank in started] == ["ready"] * ranks
        return started

    yield start
    for rank in reversed(started):
        rank.end()


SIZES = [64 << 10, (64 << 10) + 1, 256 << 10, (512 << 10) + 15, 1 << 20, 8 << 20]


@pytest.mark.timeout(600)
def test_kernels_push_and_everybody_reads(world: World) -> None:
    # Two ranks: the interpreter copies some 10 MB a second, so the largest size takes seconds a copy.
    producer, owner = world(2)
    assert producer.ask("bases_of") != owner.ask("bases_of"), "mapped at the same addresses"
    for seed, size in enumerate(SIZES):
        key = f"pushed-{size}"
        ticket = producer.ask("open", key=key, size=size, owner=1)
        assert owner.ask("expect", packed=ticket) is False
        assert owner.ask("wait", packed=ticket, looks=3) == "TIMED_OUT"
        assert producer.ask("push", key=key, seed=seed) == "PUBLISHED"
        assert owner.ask("wait", packed=ticket, looks=1000) == "OK"
        assert owner.ask("read_awaited", packed=ticket, seed=seed) is True
        producer.ask("commit", key=key)
        # Rust reads what a kernel wrote, here and there; a kernel reads it under a ledger cell.
        assert owner.ask("read_by_store", key=key, seed=seed) is True
        assert producer.ask("read_by_store", key=key, seed=seed) is True
        assert producer.ask("read_pinned", packed=ticket, seed=seed) == "OK"


@pytest.mark.timeout(600)
def test_what_rust_wrote_is_read_by_kernels(world: World) -> None:
    ranks = world(4)
    for number, rank in enumerate(ranks):
        size = 100_003 + number
        key = f"k{number}"
        rank.ask("open", key=key, size=size, owner=(number + 1) % 4)
        rank.ask("write", key=key, seed=number)
        rank.ask("commit", key=key)
    for rank in ranks:
        for number in range(4):
            ticket = rank.ask("locate", key=f"k{number}")
            assert ticket is not None
            assert rank.ask("read_pinned", packed=ticket, seed=number) == "OK"


@pytest.mark.timeout(600)
def test_several_ranks_push_pages_of_one_object(world: World) -> None:
    # One rank has the plan; the last page publishes, whichever it is.
    producer, owner = world(2)
    size = 3 * (256 << 10) + 77
    ticket = producer.ask("open", key="k", size=size, owner=1)
    assert owner.ask("expect", packed=ticket) is False
    assert producer.ask("push", key="k", seed=9, first_page=2, pages=2) == "PENDING"
    assert owner.ask("wait", packed=ticket, looks=3) == "TIMED_OUT"
    assert producer.ask("push", key="k", seed=9, first_page=0, pages=2) == "PUBLISHED"
    assert owner.ask("wait", packed=ticket, looks=1000) == "OK"
    assert owner.ask("read_awaited", packed=ticket, seed=9) is True
    # The cache commits it by itself.
    until = time.monotonic() + 60
    while owner.ask("locate", key="k") is None and time.monotonic() < until:
        time.sleep(0.01)
    assert owner.ask("locate", key="k") == ticket


@pytest.mark.timeout(600)
def test_a_producer_killed_in_the_middle_is_cleaned_up_after(world: World) -> None:
    owner, producer, consumer = world(3)
    ticket = producer.ask("open", key="k", size=1 << 20, owner=0)
    assert consumer.ask("expect", packed=ticket) is False
    assert producer.ask("push", key="k", seed=1, first_page=0, pages=2) == "PENDING"
    producer.process.send_signal(signal.SIGKILL)
    producer.process.wait()
    until = time.monotonic() + 60
    while (said := consumer.ask("wait", packed=ticket, looks=3)) == "TIMED_OUT" and time.monotonic() < until:
        time.sleep(0.01)
    assert said == "GONE"
    assert owner.ask("stats")["bytes_draining"] > 0, "the consumer still has it"


@pytest.mark.timeout(600)
def test_kernels_read_beside_removal_and_reuse(world: World) -> None:
    writer, reader = world(2)
    outcomes = []
    for turn in range(12):
        size = 70_000 + turn
        ticket = writer.ask("open", key="k", size=size, owner=turn % 2)
        assert writer.ask("push", key="k", seed=turn) == "PUBLISHED"
        writer.ask("commit", key="k")
        assert reader.ask("read_pinned", packed=ticket, seed=turn) == "OK"
        # A read that is under way while the object is removed ends well, or finds nothing: never other bytes.
        reader.tell("read_pinned", packed=ticket, seed=turn)
        assert writer.ask("remove", key="k") is True
        outcomes.append(reader.answer())
        assert reader.ask("read_pinned", packed=ticket, seed=turn) in ("GONE", "MISS")
    assert set(outcomes) <= {"OK", "GONE", "MISS"}
