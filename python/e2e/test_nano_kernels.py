"""Kernels and the store on one heap: Triton kernels push to and read from the memory of real nodes, together with
writers and readers in Rust. Ranks are processes, and the master is an ordinary one.

The memory is host memory, or device memory of the fake driver, and the kernels are interpreted. With
``MOONTIDE_REQUIRE_DEVICE`` set to ``cuda`` or ``hip`` it is memory of a real device, and the kernels run there
(docs/devices.md)."""

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

REAL = os.environ.get("MOONTIDE_REQUIRE_DEVICE")


def kinds(*names: str, short: tuple[str, ...]) -> list[Any]:
    """Kinds of memory for the parameters of a test; with a real device, only its kind. The short form runs ``short``."""
    chosen = [name for name in names if REAL in (None, name)]
    return [pytest.param(name, marks=[pytest.mark.short] if name in short else []) for name in chosen]


class Rank(Process):
    def __init__(self, path: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        job = {"path": str(path), "rank": rank, "ranks": ranks, "heap_bytes": 32 << 20} | settings
        if REAL is not None:
            variables = {"TRITON_INTERPRET": "0"}
        elif "device" in settings:
            fake = os.environ["MOONTIDE_FAKE_DRIVER_LIB"]
            variables = {"MOONTIDE_CUDA_LIB": fake, "MOONTIDE_HIP_LIB": fake}
        else:
            variables = {}
        super().__init__("nano_kernels_rank.py", json.dumps(job), **variables)


World = Callable[..., list[Rank]]


@pytest.fixture(params=kinds("host", "cuda", "hip", short=("host",)))
def memory(request: pytest.FixtureRequest) -> str:
    """Memory of the records."""
    if request.param != "host" and REAL is None and "MOONTIDE_FAKE_DRIVER_LIB" not in os.environ:
        pytest.skip("MOONTIDE_FAKE_DRIVER_LIB is not set")
    return str(request.param)


def assert_pinned(rank: Rank, memory: str, key: str, packed: str, seed: int) -> None:
    """Checks a read by a kernel under a ledger cell; on AMD devices, which cannot access header words, a read while the
    host holds the object."""
    if memory == "hip":
        assert rank.ask("read_pinned", packed=packed, seed=seed) == "UNSUPPORTED"
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
        assert [rank.receive() for rank in started] == ["ready"] * ranks
        return started

    yield start
    for rank in reversed(started):
        rank.end()


SIZES = [64 << 10, (64 << 10) + 1, 256 << 10, (512 << 10) + 15, 1 << 20, 8 << 20]


@pytest.mark.timeout(600)
def test_pushed_record_is_readable_by_kernels_and_store(world: World, memory: str) -> None:
    # Two ranks only: the interpreter copies about 10 MB/s, so a copy of the largest size takes seconds.
    producer, owner = world(2)
    assert producer.ask("bases_of") != owner.ask("bases_of"), "the regions have the same addresses in both processes"
    # The copies are the same for all kinds of memory; the largest size runs with one kind only.
    for seed, size in enumerate(SIZES if memory == "host" else SIZES[:-1]):
        key = f"pushed-{size}"
        ticket = producer.ask("open", key=key, size=size, owner=1)
        assert owner.ask("open_for_read", packed=ticket) is False
        assert owner.ask("wait", packed=ticket, polls_max=3) == "TIMED_OUT"
        assert producer.ask("push", key=key, seed=seed) == "PUBLISHED"
        assert owner.ask("wait", packed=ticket, polls_max=1000) == "OK"
        assert owner.ask("read_opened", packed=ticket, seed=seed) is True
        producer.ask("commit", key=key)
        # Both ranks read the record in Rust, and a kernel reads it under a ledger cell.
        assert owner.ask("read_by_store", key=key, seed=seed) is True
        assert producer.ask("read_by_store", key=key, seed=seed) is True
        assert_pinned(producer, memory, key, ticket, seed)


@pytest.mark.timeout(600)
def test_kernels_read_records_written_by_rust(world: World, memory: str) -> None:
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
def test_last_pushed_page_publishes_and_commits_object(world: World) -> None:
    # The page that is pushed last publishes the record.
    producer, owner = world(2)
    size = 3 * (256 << 10) + 77
    ticket = producer.ask("open", key="k", size=size, owner=1)
    assert owner.ask("open_for_read", packed=ticket) is False
    assert producer.ask("push", key="k", seed=9, first_page=2, pages=2) == "PENDING"
    assert owner.ask("wait", packed=ticket, polls_max=3) == "TIMED_OUT"
    assert producer.ask("push", key="k", seed=9, first_page=0, pages=2) == "PUBLISHED"
    assert owner.ask("wait", packed=ticket, polls_max=1000) == "OK"
    assert owner.ask("read_opened", packed=ticket, seed=9) is True
    # The cache commits the plan automatically.
    deadline = time.monotonic() + 60
    while owner.ask("locate", key="k") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner.ask("locate", key="k") == ticket


@pytest.mark.timeout(600)
@pytest.mark.parametrize("memory", kinds("host", "cuda", "hip", short=("host", "hip")), indirect=True)
def test_record_of_killed_producer_is_gone_and_draining(world: World, memory: str) -> None:
    owner, producer, consumer = world(3)
    ticket = producer.ask("open", key="k", size=1 << 20, owner=0)
    assert consumer.ask("open_for_read", packed=ticket) is False
    assert producer.ask("push", key="k", seed=1, first_page=0, pages=2) == "PENDING"
    producer.process.send_signal(signal.SIGKILL)
    producer.process.wait()
    deadline = time.monotonic() + 60
    while not consumer.ask("is_gone", packed=ticket) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert consumer.ask("is_gone", packed=ticket) is True
    # A kernel detects it by the header word, if it can access the word.
    expected = "TIMED_OUT" if memory == "hip" else "GONE"
    assert consumer.ask("wait", packed=ticket, polls_max=3) == expected
    assert owner.ask("stats")["bytes_draining"] > 0, "the consumer still holds it"


# Kernels on AMD devices cannot access header words, so they do not read under cells.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("memory", kinds("host", "cuda", short=("host",)), indirect=True)
def test_kernel_reads_are_correct_during_removal_and_reuse(world: World, memory: str) -> None:
    writer, reader = world(2)
    outcomes = []
    for turn in range(12):
        size = 70_000 + turn
        ticket = writer.ask("open", key="k", size=size, owner=turn % 2)
        assert writer.ask("push", key="k", seed=turn) == "PUBLISHED"
        writer.ask("commit", key="k")
        assert reader.ask("read_pinned", packed=ticket, seed=turn) == "OK"
        # A read during the removal of the object succeeds or misses; it never returns other bytes.
        reader.send("read_pinned", packed=ticket, seed=turn)
        assert writer.ask("remove", key="k") is True
        outcomes.append(reader.receive())
        assert reader.ask("read_pinned", packed=ticket, seed=turn) in ("GONE", "MISS")
    assert set(outcomes) <= {"OK", "GONE", "MISS"}


# In host memory kernels and copies use the same atomics.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("memory", kinds("cuda", "hip", short=("cuda", "hip")), indirect=True)
def test_device_record_rejects_mixed_kernel_and_copy_writes(world: World, memory: str) -> None:
    producer, _ = world(2)
    producer.ask("open", key="k", size=3 * (256 << 10), owner=1)
    assert producer.ask("push", key="k", seed=9, first_page=0, pages=1) == "PENDING"
    # Rejected before anything is written: the pages of the kernels are unchanged.
    assert "kernels, or all by copies" in producer.ask("write_error", key="k", seed=1)
    assert producer.ask("locate", key="k") is None
    assert producer.ask("push", key="k", seed=9, first_page=1, pages=2) == "PUBLISHED"
    producer.ask("commit", key="k")
    assert producer.ask("read_held", key="k", seed=9) is True
    # Copies first, then kernels.
    producer.ask("open", key="l", size=3 * (256 << 10), owner=1)
    assert producer.ask("write_page", key="l", seed=3, page=1) is False
    assert producer.ask("push", key="l", seed=4) == "STALE", "nothing was written"
    assert [producer.ask("write_page", key="l", seed=3, page=page) for page in (2, 0)] == [False, True]
    producer.ask("commit", key="l")
    assert producer.ask("read_held", key="l", seed=3) is True
