"""``moontide.kv``: names, prefixes, and blocks on their way, with a store that answers, one that is away, and one that hangs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest

import moontide
from moontide import kv

BLOCK = 4096


class Memory:
    """A cache of two layers, each with its own array."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.layers = numpy.random.default_rng(seed).integers(0, 256, (2, blocks, BLOCK), dtype=numpy.uint8)
        runs = [kv.Run(layer.ctypes.data, BLOCK, BLOCK) for layer in self.layers]
        self.pages = kv.Pages(runs, blocks)

    def batch(self, keys: list[str], blocks: list[int]) -> kv.Batch:
        return kv.Batch(keys, self.pages.addresses(blocks), self.pages.sizes(len(blocks)))


@pytest.fixture
def space(request: pytest.FixtureRequest, store: moontide.Store) -> Iterator[kv.Namespace]:
    """A namespace that no other test has."""
    space = kv.Namespace(request.node.name, dtype="uint8", block_size=16)
    yield space
    store.batch_remove(store.keys(space.prefix), force=True)


def until(what: str, is_so: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what}: not in time"
        time.sleep(0.002)


def test_every_field_of_a_namespace_makes_another_one() -> None:
    one = kv.Namespace("m")
    others = [
        kv.Namespace("n"),
        kv.Namespace("m", revision="2"),
        kv.Namespace("m", dtype="float16"),
        kv.Namespace("m", block_size=32),
        kv.Namespace("m", layout="x"),
        kv.Namespace("m", ranks="tp2"),
        kv.Namespace("m", hashing="other"),
        kv.Namespace("m", more={"a": "b"}),
    ]
    assert len({space.prefix for space in [one, *others]}) == len(others) + 1
    assert kv.Namespace("a b/ü" * 100).prefix.isascii(), "a key for whatever name"


def test_a_hash_stands_for_everything_before_it() -> None:
    tokens = list(range(64))
    plain = kv.block_hashes(tokens, 16)
    assert len(set(plain)) == 4 and kv.block_hashes(tokens[:40], 16) == plain[:2]
    for at in range(4):
        changed = tokens[:]
        changed[at * 16] += 1
        other = kv.block_hashes(changed, 16)
        assert other[:at] == plain[:at] and not set(other[at:]) & set(plain[at:])
    assert not set(plain) & set(kv.block_hashes(tokens, 16, salt="tenant"))
    assert not set(plain) & set(kv.block_hashes(tokens, 16, adapter="lora"))
    assert kv.block_hashes(tokens, 16, salt="ab") != kv.block_hashes(tokens, 16, salt="a", adapter="b")


def test_blocks_come_back_as_they_were(either: moontide.Store, space: kv.Namespace, seed: int) -> None:
    memory, hashes = Memory(8, seed), kv.block_hashes(range(64), 16)
    before = memory.layers.copy()
    cache = kv.BlockCache(either, space)
    assert cache.match(hashes) == 0
    assert cache.save(hashes, memory.pages, [6, 1, 3, 0]) == 4
    assert cache.match(hashes) == 4 and cache.match(hashes, ["0", "1"]) == 0, "another rank has saved nothing"
    memory.layers[:] = 0
    assert cache.load(hashes, memory.pages, [0, 1, 2, 3]) == 4
    assert (memory.layers[:, :4] == before[:, [6, 1, 3, 0]]).all()
    assert not memory.layers[:, 4:].any(), "nothing else was touched"
    either.remove(space.keys(hashes)[2], force=True)
    assert cache.match(hashes) == 2 and cache.load(hashes, memory.pages, [4, 5, 6, 7]) == 2


def test_a_block_that_is_not_there_is_no_address(store: moontide.Store, space: kv.Namespace) -> None:
    cache = kv.BlockCache(store, space)
    for blocks in ([8], [-1]):
        with pytest.raises(IndexError, match="there are 8"):
            cache.save(kv.block_hashes(range(16), 16), Memory(8, 1).pages, blocks)
    with pytest.raises(moontide.InvalidArgument, match="one hash for each block"):
        cache.save([], Memory(8, 1).pages, [1])


def test_lookups_answer_later_and_only_what_has_no_gap(store: moontide.Store, space: kv.Namespace) -> None:
    hashes = kv.block_hashes(range(16 * 6), 16)
    keys = space.keys(hashes, ["0", "1"])
    missing = {5, 8}  # of block 2 its second part, and of block 4 its first
    store.batch_put([key for at, key in enumerate(keys) if at not in missing], [b"x"] * (len(keys) - len(missing)))
    door = kv.Door(lambda: store)
    lookups = kv.Lookups(door, patience=20)
    found: list[int | None] = [lookups.ask("request", 6, lambda: keys)]
    assert found == [None], "nobody waits"

    def answered() -> bool:
        found.append(lookups.ask("request", 6, lambda: keys))
        return found[-1] is not None

    until("the answer", answered)
    assert found[-1] == 2
    assert lookups.counts.blocks_asked == 6 and lookups.counts.blocks_found == 2
    lookups.close()


def test_transfers_tell_what_failed_and_leave_the_rest(store: moontide.Store, space: kv.Namespace, seed: int) -> None:
    memory, hashes = Memory(8, seed), kv.block_hashes(range(64), 16)
    before, keys = memory.layers.copy(), space.keys(hashes)
    transfers = kv.Transfers(kv.Door(lambda: store))
    assert transfers.save("a", 3, lambda: memory.batch(keys[:3], [0, 1, 2]))
    assert transfers.wait_saved(["a"], 20) and not transfers.saving("a")
    loading = transfers.load("b", 4, lambda: memory.batch(keys, [4, 5, 6, 7]))
    assert loading.wait(20) == [3], "the last was never saved"
    assert transfers.loaded() == [("b", [3])] and transfers.loaded() == []
    assert (memory.layers[:, 4:7] == before[:, :3]).all()
    assert (transfers.counts.saved_blocks, transfers.counts.loaded_blocks, transfers.counts.failed_loads) == (3, 3, 1)
    transfers.close()


def test_a_store_that_is_away_costs_nothing() -> None:
    calls = itertools.count()

    def nobody() -> moontide.Store:
        next(calls)
        raise moontide.Unreachable("nobody is there")

    door = kv.Door(nobody, pause=60)
    lookups, transfers = kv.Lookups(door, patience=20), kv.Transfers(door)
    until("the first answer", lambda: lookups.ask("first", 1, lambda: ["k"]) == 0)
    assert not door.is_open
    began = time.perf_counter()
    for number in range(1000):
        assert lookups.ask(f"r{number}", 4, lambda: ["k"] * 4) == 0
        assert not transfers.save(f"r{number}", 4, lambda: pytest.fail("nobody needs it"))
    assert time.perf_counter() - began < 1.0, "less than a millisecond for each"
    assert transfers.load("r", 2, lambda: pytest.fail("nobody needs it")).wait(20) == [0, 1]
    assert next(calls) == 1, "nobody is asked again while the door is shut"
    lookups.close()
    transfers.close()


def test_a_store_that_hangs_is_waited_for_once(
    own_cluster: Callable[..., Any], stopped: Callable[..., AbstractContextManager[None]]
) -> None:
    cluster = own_cluster(nodes=1)
    door = kv.Door(lambda: moontide.Store(cluster.master, deadline=1.0), pause=60)
    assert door.store() is not None
    lookups = kv.Lookups(door, patience=0.2)
    with stopped(cluster.master_server):
        began = time.monotonic()
        until("an answer", lambda: lookups.ask("request", 1, lambda: ["k"]) == 0)
        assert time.monotonic() - began < 1.0, "the scheduler does not wait for the store's deadline"
        until("the door", lambda: not door.is_open)
        assert lookups.ask("another", 1, lambda: ["k"]) == 0
    lookups.close()
