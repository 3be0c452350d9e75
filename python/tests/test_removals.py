"""Invalidations: the feed of the store, and ``moontide.kv.RemovalTracker`` for announced blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moontide
from moontide import kv

MIB = 1 << 20


def keys_of(block: Hashable) -> list[str]:
    """Returns two keys per block, as for two ranks."""
    return [f"{block}/0", f"{block}/1"]


class TrackedCluster:
    """A cluster for one test, a store, and a tracker."""

    def __init__(self, cluster: Any, **settings: Any) -> None:
        self.cluster = cluster
        self.store = moontide.Store(cluster.master)
        self.connection = kv.StoreConnection(lambda: self.store, retry_after=0.2)
        self.tracker = kv.RemovalTracker(self.connection, keys_of, **settings)
        self.removed: list[Hashable] = []

    def save(self, blocks: list[str], size: int = 100) -> None:
        for block in blocks:
            for key in keys_of(block):
                assert self.store.put(key, bytes(size), prefer_local=False)
        self.tracker.add(blocks)

    def exists(self, block: str) -> bool:
        return all(self.store.batch_exists(keys_of(block)))

    def take(self) -> list[Hashable]:
        self.removed += self.tracker.take_removed()
        return self.removed

    def wait_removed(self, count: int, seconds: float = 30) -> list[Hashable]:
        deadline = time.monotonic() + seconds
        while len(self.take()) < count:
            assert time.monotonic() < deadline, f"{self.removed} of {count}, {self.tracker.counts}"
            time.sleep(0.01)
        return self.removed

    def wait_checked(self, blocks: int, seconds: float = 10) -> None:
        """Waits until all added blocks are registered and checked."""
        deadline = time.monotonic() + seconds
        while self.tracker.counts.added < blocks or self.tracker._suspects:
            assert time.monotonic() < deadline, self.tracker.counts
            time.sleep(0.01)

    def close(self) -> None:
        self.tracker.close()
        self.connection.close()


@pytest.fixture
def track(own_cluster: Callable[..., Any]) -> Iterator[Callable[..., TrackedCluster]]:
    made: list[TrackedCluster] = []

    def start(settings: dict[str, Any] | None = None, **cluster: Any) -> TrackedCluster:
        made.append(TrackedCluster(own_cluster(**cluster), **(settings or {})))
        return made[-1]

    yield start
    for tracked in made:
        tracked.close()


def test_invalidations_report_removed_objects(store: moontide.Store, key: Callable[[str], str]) -> None:
    store.put(key("leaves"), b"...")
    store.put(key("kept"), b"...")
    feed = store.invalidations()
    ids, gap = feed.next(20) or ([], False)
    assert gap and not ids, "earlier invalidations are unknown"
    assert feed.next(0.05) is None
    store.remove(key("leaves"))
    began, received = time.monotonic(), set[bytes]()
    while store.object_id(key("leaves")) not in received:
        ids, gap = feed.next(20) or ([], True)
        assert not gap
        received |= set(ids)
    assert time.monotonic() - began < 1
    assert all(len(id) == 16 for id in received) and store.object_id(key("kept")) not in received
    feed.close()
    feed.close()
    with pytest.raises(moontide.Closed, match="the feed is closed"):
        feed.next(1)
    with pytest.raises(moontide.InvalidArgument, match="timeout"):
        store.invalidations().next(-1)


def test_block_is_reported_once_when_first_object_is_removed(track: Callable[..., TrackedCluster]) -> None:
    tracked = track()
    tracked.save(["a", "b", "c"])
    tracked.wait_checked(3)
    assert tracked.take() == [], "all blocks exist"
    began = time.monotonic()
    tracked.store.remove("b/1")
    assert tracked.wait_removed(1) == ["b"]
    assert time.monotonic() - began < 5
    tracked.store.remove("b/0")
    tracked.store.remove("never announced")
    time.sleep(1)
    assert tracked.take() == ["b"], "it is reported once"
    # A block that is saved and added again can be removed again.
    tracked.save(["b"])
    tracked.wait_checked(4)
    assert tracked.take() == ["b"]
    tracked.store.batch_remove(keys_of("b"))
    assert tracked.wait_removed(2) == ["b", "b"]
    assert tracked.tracker.counts.removed == 2 and tracked.exists("a") and tracked.exists("c")


def test_unknown_blocks_are_checked_again_and_others_at_once(own_cluster: Callable[..., Any]) -> None:
    """One of several masters does not answer."""
    silent: set[str] = {"b/0", "d/1"}

    class PartlySilent(moontide.Store):
        def batch_exists(self, keys: Any) -> list[bool]:
            answers: list[Any] = super().batch_exists(keys)
            late = moontide.Unreachable("the master does not answer")
            outcomes = [late if key in silent else own for key, own in zip(keys, answers, strict=True)]
            if silent & set(keys):
                raise moontide.BatchError(outcomes)
            return answers

    store = PartlySilent(own_cluster().master)
    for block in "abc":
        store.batch_put(keys_of(block), [b"1", b"2"])
    connection = kv.StoreConnection(lambda: store, retry_after=0.05)
    tracker = kv.RemovalTracker(connection, keys_of)
    tracker.add(["a", "b", "c", "d", "e"])
    removed: list[Hashable] = []

    def wait_removed(expected: list[str]) -> None:
        deadline = time.monotonic() + 20
        while removed != expected:
            removed.extend(tracker.take_removed())
            assert time.monotonic() < deadline, removed
            time.sleep(0.01)

    # Of "d", one key is missing; that of the other one nothing is known does not matter.
    wait_removed(["d", "e"])
    assert set(tracker._suspects) == {"b"}
    store.remove("b/1")
    wait_removed(["d", "e", "b"])
    silent.clear()
    store.remove("a/0")
    wait_removed(["d", "e", "b", "a"])
    tracker.close()
    connection.close()


def test_block_missing_when_added_is_reported_removed(track: Callable[..., TrackedCluster]) -> None:
    tracked = track()
    tracked.tracker.add(["never saved"])
    assert tracked.wait_removed(1) == ["never saved"]


def test_tracker_reports_exactly_the_evicted_blocks(track: Callable[..., TrackedCluster]) -> None:
    tracked = track(memory="64MiB")
    blocks = [f"block-{number}" for number in range(60)]
    for block in blocks:
        tracked.save([block], MIB)
    end = time.monotonic() + 30
    while True:
        removed, missing = set(tracked.take()), {block for block in blocks if not tracked.exists(block)}
        if missing and removed == missing:
            break
        assert time.monotonic() < end, (removed, missing)
        time.sleep(0.1)
    assert len(tracked.removed) == len(missing), "each is reported once"
    assert len(missing) >= 29, "120 MiB do not fit into 64"


def test_tracker_reports_blocks_lost_with_a_node(track: Callable[..., TrackedCluster]) -> None:
    tracked = track(nodes=2, master=["--session-ttl-ms", "1000"])
    blocks = [f"block-{number}" for number in range(40)]
    tracked.save(blocks)
    tracked.wait_checked(40)
    first = tracked.cluster.nodes[0].facts["node"]
    lost = {block for block in blocks if first in nodes_of(tracked.store, block)}
    assert lost and lost != set(blocks), "both nodes have blocks"
    tracked.cluster.nodes[0].end(kill=True)
    assert set(tracked.wait_removed(len(lost))) == lost
    time.sleep(1)
    assert len(tracked.take()) == len(lost)
    assert all(tracked.exists(block) for block in set(blocks) - lost)


def nodes_of(store: moontide.Store, block: str) -> set[str]:
    found = [store.stat(key) for key in keys_of(block)]
    return {location["node"] for each in found if each is not None for location in each["locations"]}


def test_tracker_reports_only_missing_blocks_after_master_restart(
    track: Callable[..., TrackedCluster], tmp_path: Path
) -> None:
    master = ["--session-ttl-ms", "1000", "--data-dir", str(tmp_path / "master")]
    tracked = track(nodes=2, master=master)
    blocks = [f"block-{number}" for number in range(40)]
    tracked.save(blocks)
    tracked.wait_checked(40)
    first = tracked.cluster.nodes[0].facts["node"]
    lost = {block for block in blocks if first in nodes_of(tracked.store, block)}
    assert lost and lost != set(blocks)
    # Objects lost without a master cause no invalidations.
    tracked.cluster.master_server.end(kill=True)
    tracked.cluster.nodes[0].end(kill=True)
    time.sleep(1)
    assert tracked.take() == [], "an unavailable store reports nothing"
    full_checks = tracked.tracker.counts.full_checks
    tracked.cluster.restart_master()
    assert set(tracked.wait_removed(len(lost))) == lost
    assert tracked.tracker.counts.full_checks > full_checks, "all blocks were checked"
    time.sleep(1)
    assert len(tracked.take()) == len(lost)
    assert all(tracked.exists(block) for block in set(blocks) - lost)
    # Removals after the restart are reported.
    kept = next(block for block in blocks if block not in lost)
    tracked.store.batch_remove(keys_of(kept), force=True)
    tracked.wait_removed(len(lost) + 1)


def test_tracker_without_store_warns_once_and_does_not_block(caplog: pytest.LogCaptureFixture) -> None:
    def connect() -> moontide.Store:
        raise moontide.Unreachable("no master")

    with caplog.at_level(logging.WARNING, "moontide"):
        tracker = kv.RemovalTracker(kv.StoreConnection(connect, retry_after=0.01), keys_of, blocks_max=1000)
        began = time.perf_counter()
        for number in range(3000):
            tracker.add([f"block-{number}"])
            tracker.take_removed()
        assert time.perf_counter() - began < 1.0
        deadline = time.monotonic() + 20
        while tracker.counts.dropped < 2000:
            assert time.monotonic() < deadline, "more than blocks_max blocks are tracked"
            time.sleep(0.01)
        time.sleep(0.5)
        tracker.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_tracker_over_capacity_reports_oldest_blocks_removed(track: Callable[..., TrackedCluster]) -> None:
    tracked = track({"blocks_max": 4})
    tracked.save([f"block-{number}" for number in range(6)])
    assert tracked.wait_removed(2) == ["block-0", "block-1"], "dropped blocks are reported as removed"
    tracked.store.remove("block-5/0")
    assert tracked.wait_removed(3)[2] == "block-5"
    assert tracked.tracker.counts.dropped == 2


def test_tracker_rechecks_all_blocks_periodically(track: Callable[..., TrackedCluster]) -> None:
    tracked = track({"check_interval": 0.5})
    tracked.save(["a", "b"])
    tracked.wait_checked(2)
    # Simulates a missed invalidation.
    tracked.tracker._of_object.clear()
    tracked.store.remove("a/0")
    assert tracked.wait_removed(1) == ["a"]


def test_tracker_reports_all_blocks_after_remove_all(track: Callable[..., TrackedCluster]) -> None:
    tracked = track()
    tracked.save(["a", "b"])
    tracked.wait_checked(2)
    tracked.store.remove_all(force=True)
    assert sorted(map(str, tracked.wait_removed(2))) == ["a", "b"]
