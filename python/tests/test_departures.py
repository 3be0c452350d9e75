"""What has left the store: the feed says it, and ``moontide.kv.Departures`` of blocks that others were told of."""

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
    """Two objects a block, as of two ranks."""
    return [f"{block}/0", f"{block}/1"]


class Watched:
    """A cluster of the test's own, a store, and somebody who remembers what was announced."""

    def __init__(self, cluster: Any, **settings: Any) -> None:
        self.cluster = cluster
        self.store = moontide.Store(cluster.master)
        self.door = kv.Door(lambda: self.store, pause=0.2)
        self.departures = kv.Departures(self.door, keys_of, **settings)
        self.gone: list[Hashable] = []

    def save(self, blocks: list[str], size: int = 100) -> None:
        for block in blocks:
            for key in keys_of(block):
                assert self.store.put(key, bytes(size), near=False)
        self.departures.announced(blocks)

    def there(self, block: str) -> bool:
        return all(self.store.batch_exists(keys_of(block)))

    def take(self) -> list[Hashable]:
        self.gone += self.departures.take()
        return self.gone

    def until_gone(self, count: int, seconds: float = 30) -> list[Hashable]:
        end = time.monotonic() + seconds
        while len(self.take()) < count:
            assert time.monotonic() < end, f"{self.gone} of {count}, {self.departures.counts}"
            time.sleep(0.01)
        return self.gone

    def settled(self, blocks: int, seconds: float = 10) -> None:
        """All that was announced is remembered and was looked at."""
        end = time.monotonic() + seconds
        while self.departures.counts.announced < blocks or self.departures._suspects:
            assert time.monotonic() < end, self.departures.counts
            time.sleep(0.01)

    def close(self) -> None:
        self.departures.close()
        self.door.close()


@pytest.fixture
def watch(own_cluster: Callable[..., Any]) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(settings: dict[str, Any] | None = None, **cluster: Any) -> Watched:
        made.append(Watched(own_cluster(**cluster), **(settings or {})))
        return made[-1]

    yield start
    for watched in made:
        watched.close()


def test_the_feed_names_what_was_removed(store: moontide.Store, key: Callable[[str], str]) -> None:
    store.put(key("leaves"), b"...")
    store.put(key("stays"), b"...")
    feed = store.departures()
    ids, gap = feed.next(20) or ([], False)
    assert gap and not ids, "nothing is known of the time before"
    assert feed.next(0.05) is None
    store.remove(key("leaves"))
    began, heard = time.monotonic(), set[bytes]()
    while store.object_id(key("leaves")) not in heard:
        ids, gap = feed.next(20) or ([], True)
        assert not gap
        heard |= set(ids)
    assert time.monotonic() - began < 1
    assert all(len(id) == 16 for id in heard) and store.object_id(key("stays")) not in heard
    feed.close()
    feed.close()
    with pytest.raises(moontide.Closed, match="the feed is closed"):
        feed.next(1)
    with pytest.raises(moontide.InvalidArgument, match="timeout"):
        store.departures().next(-1)


def test_a_block_goes_with_the_first_of_its_objects_and_once(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.save(["a", "b", "c"])
    watched.settled(3)
    assert watched.take() == [], "all are there"
    began = time.monotonic()
    watched.store.remove("b/1")
    assert watched.until_gone(1) == ["b"]
    assert time.monotonic() - began < 5
    watched.store.remove("b/0")
    watched.store.remove("never announced")
    time.sleep(1)
    assert watched.take() == ["b"], "it is said once"
    # Saved again, it is announced again, and may go again.
    watched.save(["b"])
    watched.settled(4)
    assert watched.take() == ["b"]
    watched.store.batch_remove(keys_of("b"))
    assert watched.until_gone(2) == ["b", "b"]
    assert watched.departures.counts.removed == 2 and watched.there("a") and watched.there("c")


def test_what_had_left_before_it_was_announced_is_noticed(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.departures.announced(["never saved"])
    assert watched.until_gone(1) == ["never saved"]


def test_evicted_blocks_are_said_and_no_others(watch: Callable[..., Watched]) -> None:
    watched = watch(memory="64MiB")
    blocks = [f"block-{number}" for number in range(60)]
    for block in blocks:
        watched.save([block], MIB)
    end = time.monotonic() + 30
    while True:
        gone, missing = set(watched.take()), {block for block in blocks if not watched.there(block)}
        if missing and gone == missing:
            break
        assert time.monotonic() < end, (gone, missing)
        time.sleep(0.1)
    assert len(watched.gone) == len(missing), "each once"
    assert len(missing) >= 29, "120 MiB do not fit into 64"


def test_blocks_that_were_lost_with_a_node_are_said(watch: Callable[..., Watched]) -> None:
    watched = watch(nodes=2, master=["--session-ttl-ms", "1000"])
    blocks = [f"block-{number}" for number in range(40)]
    watched.save(blocks)
    watched.settled(40)
    first = watched.cluster.nodes[0].facts["node"]
    lost = {block for block in blocks if first in nodes_of(watched.store, block)}
    assert lost and lost != set(blocks), "both nodes have some"
    watched.cluster.nodes[0].end(kill=True)
    assert set(watched.until_gone(len(lost))) == lost
    time.sleep(1)
    assert len(watched.take()) == len(lost)
    assert all(watched.there(block) for block in set(blocks) - lost)


def nodes_of(store: moontide.Store, block: str) -> set[str]:
    found = [store.stat(key) for key in keys_of(block)]
    return {place["node"] for each in found if each is not None for place in each["places"]}


def test_after_a_masters_end_only_what_is_really_missing_is_said(watch: Callable[..., Watched], tmp_path: Path) -> None:
    master = ["--session-ttl-ms", "1000", "--data-dir", str(tmp_path / "master")]
    watched = watch(nodes=2, master=master)
    blocks = [f"block-{number}" for number in range(40)]
    watched.save(blocks)
    watched.settled(40)
    first = watched.cluster.nodes[0].facts["node"]
    lost = {block for block in blocks if first in nodes_of(watched.store, block)}
    assert lost and lost != set(blocks)
    # Of what goes while there is no master nobody tells.
    watched.cluster.master_server.end(kill=True)
    watched.cluster.nodes[0].end(kill=True)
    time.sleep(1)
    assert watched.take() == [], "a store that is away makes nothing go"
    looked = watched.departures.counts.looked
    watched.cluster.restart_master()
    assert set(watched.until_gone(len(lost))) == lost
    assert watched.departures.counts.looked > looked, "by looking for all of them"
    time.sleep(1)
    assert len(watched.take()) == len(lost)
    assert all(watched.there(block) for block in set(blocks) - lost)
    # And it goes on: what is removed now is heard of.
    stays = next(block for block in blocks if block not in lost)
    watched.store.batch_remove(keys_of(stays), force=True)
    watched.until_gone(len(lost) + 1)


def test_without_a_store_nothing_happens_but_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def nobody() -> moontide.Store:
        raise moontide.Unreachable("nobody is there")

    with caplog.at_level(logging.WARNING, "moontide"):
        departures = kv.Departures(kv.Door(nobody, pause=0.01), keys_of, most=1000)
        began = time.perf_counter()
        for number in range(3000):
            departures.announced([f"block-{number}"])
            departures.take()
        assert time.perf_counter() - began < 1.0
        end = time.monotonic() + 20
        while departures.counts.forgotten < 2000:
            assert time.monotonic() < end, "more is kept than is allowed"
            time.sleep(0.01)
        time.sleep(0.5)
        departures.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_no_more_is_remembered_than_is_allowed(watch: Callable[..., Watched]) -> None:
    watched = watch({"most": 4})
    watched.save([f"block-{number}" for number in range(6)])
    assert watched.until_gone(2) == ["block-0", "block-1"], "better unknown than believed in for ever"
    watched.store.remove("block-5/0")
    assert watched.until_gone(3)[2] == "block-5"
    assert watched.departures.counts.forgotten == 2


def test_now_and_then_everything_is_looked_for(watch: Callable[..., Watched]) -> None:
    watched = watch({"again": 0.5})
    watched.save(["a", "b"])
    watched.settled(2)
    # As if the feed had not said it.
    watched.departures._of_object.clear()
    watched.store.remove("a/0")
    assert watched.until_gone(1) == ["a"]


def test_everything_of_a_tenant_goes_at_once(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.save(["a", "b"])
    watched.settled(2)
    watched.store.remove_all(force=True)
    assert sorted(map(str, watched.until_gone(2))) == ["a", "b"]
