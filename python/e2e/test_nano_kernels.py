"""Kernels and the store on one heap: Triton's kernels, in the interpreter, push into memory of real nodes and read from it,
beside writers and readers in Rust; ranks are processes, the master is an ordinary one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ANSWER_MAX_S = 240.0


class Rank:
    def __init__(self, path: Path, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        told = {"path": str(path), "rank": rank, "ranks": ranks, "heap_bytes": 32 << 20} | settings
        words = [sys.executable, str(Path(__file__).with_name("nano_kernels_rank.py")), json.dumps(told)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(self, call: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([call, arguments]) + "\n")

    def hear(self) -> Any:
        assert self.process.stdout is not None
        too_slow = threading.Timer(ANSWER_MAX_S, self.process.kill)
        too_slow.start()
        try:
            line = self.process.stdout.readline()
        finally:
            too_slow.cancel()
        assert line, "the rank has ended; what it said stands above"
        return json.loads(line)

    def __call__(self, call: str, **arguments: Any) -> Any:
        self.tell(call, **arguments)
        return self.hear()


World = Callable[..., list[Rank]]


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started: list[Rank] = []

    def start(ranks: int, **settings: Any) -> list[Rank]:
        path = tmp_path_factory.mktemp("n") / "w"
        started.extend(Rank(path, rank, ranks, settings) for rank in range(ranks))
        assert [rank.hear() for rank in started] == ["ready"] * ranks
        return started

    yield start
    for rank in reversed(started):
        rank.process.kill()
        rank.process.wait()


SIZES = [64 << 10, (64 << 10) + 1, 256 << 10, (512 << 10) + 15, 1 << 20, 8 << 20]


@pytest.mark.timeout(600)
def test_kernels_push_and_everybody_reads(world: World) -> None:
    # Two ranks: the interpreter copies some 10 MB a second, so the largest size takes seconds a copy.
    producer, owner = world(2)
    assert producer("bases_of") != owner("bases_of"), "mapped at the same addresses"
    for seed, size in enumerate(SIZES):
        key = f"pushed-{size}"
        ticket = producer("open", key=key, size=size, owner=1)
        assert owner("expect", packed=ticket) is False
        assert owner("wait", packed=ticket, looks=3) == "TIMED_OUT"
        assert producer("push", key=key, seed=seed) == "PUBLISHED"
        assert owner("wait", packed=ticket, looks=1000) == "OK"
        assert owner("read_awaited", packed=ticket, seed=seed) is True
        producer("commit", key=key)
        # Rust reads what a kernel wrote, here and there; a kernel reads it under a ledger cell.
        assert owner("read_by_store", key=key, seed=seed) is True
        assert producer("read_by_store", key=key, seed=seed) is True
        assert producer("read_pinned", packed=ticket, seed=seed) == "OK"


@pytest.mark.timeout(600)
def test_what_rust_wrote_is_read_by_kernels(world: World) -> None:
    ranks = world(4)
    for number, rank in enumerate(ranks):
        size = 100_003 + number
        key = f"k{number}"
        rank("open", key=key, size=size, owner=(number + 1) % 4)
        rank("write", key=key, seed=number)
        rank("commit", key=key)
    for rank in ranks:
        for number in range(4):
            ticket = rank("locate", key=f"k{number}")
            assert ticket is not None
            assert rank("read_pinned", packed=ticket, seed=number) == "OK"


@pytest.mark.timeout(600)
def test_several_ranks_push_pages_of_one_object(world: World) -> None:
    # One rank has the plan; the last page publishes, whichever it is.
    producer, owner = world(2)
    size = 3 * (256 << 10) + 77
    ticket = producer("open", key="k", size=size, owner=1)
    assert owner("expect", packed=ticket) is False
    assert producer("push", key="k", seed=9, first_page=2, pages=2) == "PENDING"
    assert owner("wait", packed=ticket, looks=3) == "TIMED_OUT"
    assert producer("push", key="k", seed=9, first_page=0, pages=2) == "PUBLISHED"
    assert owner("wait", packed=ticket, looks=1000) == "OK"
    assert owner("read_awaited", packed=ticket, seed=9) is True
    # The cache commits it by itself.
    until = time.monotonic() + 60
    while owner("locate", key="k") is None and time.monotonic() < until:
        time.sleep(0.01)
    assert owner("locate", key="k") == ticket


@pytest.mark.timeout(600)
def test_a_producer_killed_in_the_middle_is_cleaned_up_after(world: World) -> None:
    owner, producer, consumer = world(3)
    ticket = producer("open", key="k", size=1 << 20, owner=0)
    assert consumer("expect", packed=ticket) is False
    assert producer("push", key="k", seed=1, first_page=0, pages=2) == "PENDING"
    producer.process.send_signal(signal.SIGKILL)
    producer.process.wait()
    until = time.monotonic() + 60
    while (said := consumer("wait", packed=ticket, looks=3)) == "TIMED_OUT" and time.monotonic() < until:
        time.sleep(0.01)
    assert said == "GONE"
    assert owner("stats")["bytes_draining"] > 0, "the consumer still has it"


@pytest.mark.timeout(600)
def test_kernels_read_beside_removal_and_reuse(world: World) -> None:
    writer, reader = world(2)
    outcomes = []
    for turn in range(12):
        size = 70_000 + turn
        ticket = writer("open", key="k", size=size, owner=turn % 2)
        assert writer("push", key="k", seed=turn) == "PUBLISHED"
        writer("commit", key="k")
        assert reader("read_pinned", packed=ticket, seed=turn) == "OK"
        # A read that is under way while the object is removed ends well, or finds nothing: never other bytes.
        reader.tell("read_pinned", packed=ticket, seed=turn)
        assert writer("remove", key="k") is True
        outcomes.append(reader.hear())
        assert reader("read_pinned", packed=ticket, seed=turn) in ("GONE", "MISS")
    assert set(outcomes) <= {"OK", "GONE", "MISS"}
