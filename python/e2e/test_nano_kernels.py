"""Kernels and the store on one heap: Triton's kernels push into memory of real nodes and read from it, beside writers and
readers in Rust; ranks are processes, the master is an ordinary one.

The memory is the host's, or a device's with the fake driver, and the kernels are interpreted. With ``MOONTIDE_CONFORMANCE_NEEDS``
set to ``cuda`` or ``hip`` it is a real device's, and the kernels run there (docs/devices.md)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_world import Process


REAL = os.environ.get("MOONTIDE_CONFORMANCE_NEEDS")


class Rank(Process):
    def __init__(self, path: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        told = {"path": str(path), "rank": rank, "ranks": ranks, "heap_bytes": 32 << 20} | settings
        if REAL is not None:
            variables = {"TRITON_INTERPRET": "0"}
        elif "device" in settings:
            fake = os.environ["MOONTIDE_FAKE_DRIVER_LIB"]
            variables = {"MOONTIDE_CUDA_LIB": fake, "MOONTIDE_HIP_LIB": fake}
        else:
            variables = {}
        super().__init__("nano_kernels_rank.py", json.dumps(told), **variables)


World = Callable[..., list[Rank]]


@pytest.fixture(params=["host", "cuda", "hip"] if REAL is None else [REAL])
def memory(request: pytest.FixtureRequest) -> str:
    """Where the records are."""
    if request.param != "host" and REAL is None and "MOONTIDE_FAKE_DRIVER_LIB" not in os.environ:
        pytest.skip("MOONTIDE_FAKE_DRIVER_LIB does not name the fake driver")
    return str(request.param)


def assert_pinned(rank: Rank, memory: str, key: str, packed: str, seed: int) -> None:
    """A kernel reads it under a ledger cell; on AMD's devices, which cannot see the node's words, under what the host holds."""
    if memory == "hip":
        assert rank.ask("read_pinned", packed=packed, seed=seed) == "UNSEEN"
        assert rank.ask("read_held", key=key, seed=seed) is True
    else:
        assert rank.ask("read_pinned", packed=packed, seed=seed) == "OK"


@pytest.fixture
def world(memory: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started: list[Rank] = []

    def start(ranks: int, **settings: Any) -> list[Rank]:
        path = tmp_path_factory.mktemp("n") / "w"
        if memory != "host":
            settings["device"] = memory
        started.extend(Rank(path, rank, ranks, settings) for rank in range(ranks))
        assert [rank.answer() for rank in started] == ["ready"] * ranks
        return started

    yield start
    for rank in reversed(started):
        rank.end()


SIZES = [64 << 10, (64 << 10) + 1, 256 << 10, (512 << 10) + 15, 1 << 20, 8 << 20]


@pytest.mark.timeout(600)
def test_kernels_push_and_everybody_reads(world: World, memory: str) -> None:
    # Two ranks: the interpreter copies some 10 MB a second, so the largest size takes seconds a copy.
    producer, owner = world(2)
    assert producer.ask("bases_of") != owner.ask("bases_of"), "mapped at the same addresses"
    # The copies are the same; of the largest size one kind of memory is enough.
    for seed, size in enumerate(SIZES if memory == "host" else SIZES[:-1]):
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
        assert_pinned(producer, memory, key, ticket, seed)


@pytest.mark.timeout(600)
def test_what_rust_wrote_is_read_by_kernels(world: World, memory: str) -> None:
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
            assert_pinned(rank, memory, f"k{number}", ticket, number)


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
def test_a_producer_killed_in_the_middle_is_cleaned_up_after(world: World, memory: str) -> None:
    owner, producer, consumer = world(3)
    ticket = producer.ask("open", key="k", size=1 << 20, owner=0)
    assert consumer.ask("expect", packed=ticket) is False
    assert producer.ask("push", key="k", seed=1, first_page=0, pages=2) == "PENDING"
    producer.process.send_signal(signal.SIGKILL)
    producer.process.wait()
    until = time.monotonic() + 60
    while not consumer.ask("is_gone", packed=ticket) and time.monotonic() < until:
        time.sleep(0.01)
    assert consumer.ask("is_gone", packed=ticket) is True
    # A kernel learns it from the node's word, if it can see that.
    expected = "TIMED_OUT" if memory == "hip" else "GONE"
    assert consumer.ask("wait", packed=ticket, looks=3) == expected
    assert owner.ask("stats")["bytes_draining"] > 0, "the consumer still has it"


@pytest.mark.timeout(600)
def test_kernels_read_beside_removal_and_reuse(world: World, memory: str) -> None:
    if memory == "hip":
        pytest.skip("kernels of AMD's devices do not read under cells: they cannot see the node's words")
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


@pytest.mark.timeout(600)
def test_pages_of_one_record_are_kernels_or_copies(world: World, memory: str) -> None:
    if memory == "host":
        pytest.skip("there, all count by the same atomics")
    producer, _ = world(2)
    producer.ask("open", key="k", size=3 * (256 << 10), owner=1)
    assert producer.ask("push", key="k", seed=9, first_page=0, pages=1) == "PENDING"
    # Refused before anything is written: the kernels' pages stay theirs.
    assert "kernels, or all by copies" in producer.ask("write_is_refused", key="k", seed=1)
    assert producer.ask("locate", key="k") is None
    assert producer.ask("push", key="k", seed=9, first_page=1, pages=2) == "PUBLISHED"
    producer.ask("commit", key="k")
    assert producer.ask("read_held", key="k", seed=9) is True
    # And the other way round.
    producer.ask("open", key="l", size=3 * (256 << 10), owner=1)
    assert producer.ask("write_page", key="l", seed=3, page=1) is False
    assert producer.ask("push", key="l", seed=4) == "STALE", "not a byte of it"
    assert [producer.ask("write_page", key="l", seed=3, page=page) for page in (2, 0)] == [False, True]
    producer.ask("commit", key="l")
    assert producer.ask("read_held", key="l", seed=3) is True
