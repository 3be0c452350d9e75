"""``moontide.kv``: keys, prefix lookups and transfers, with a store that answers, one that is unavailable, and one that
hangs."""

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
    """A cache of two layers, each in its own array."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.layers = numpy.random.default_rng(seed).integers(0, 256, (2, blocks, BLOCK), dtype=numpy.uint8)
        runs = [kv.LayerRun(layer.ctypes.data, BLOCK, BLOCK) for layer in self.layers]
        self.pages = kv.BlockPages(runs, blocks)

    def batch(self, keys: list[str], blocks: list[int]) -> kv.Batch:
        return kv.Batch(keys, self.pages.addresses(blocks), self.pages.sizes(len(blocks)))


@pytest.fixture
def space(request: pytest.FixtureRequest, store: moontide.Store) -> Iterator[kv.Namespace]:
    """A namespace that no other test uses."""
    space = kv.Namespace(request.node.name, dtype="uint8", block_size=16)
    yield space
    store.batch_remove(store.keys(space.prefix), force=True)


def wait_until(what: str, condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: timed out"
        time.sleep(0.002)


def test_namespace_prefix_depends_on_every_field() -> None:
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
    assert kv.Namespace("a b/ü" * 100).prefix.isascii(), "the prefix is ASCII for any name"


def test_block_hash_covers_prefix_salt_and_adapter() -> None:
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


def test_saved_blocks_round_trip(either: moontide.Store, space: kv.Namespace, seed: int) -> None:
    memory, hashes = Memory(8, seed), kv.block_hashes(range(64), 16)
    before = memory.layers.copy()
    cache = kv.StoreBlockCache(either, space)
    assert cache.match(hashes) == 0
    assert cache.save(hashes, memory.pages, [6, 1, 3, 0]) == 4
    assert cache.match(hashes) == 4 and cache.match(hashes, ["0", "1"]) == 0, "the other rank has saved nothing"
    memory.layers[:] = 0
    assert cache.load(hashes, memory.pages, [0, 1, 2, 3]) == 4
    assert (memory.layers[:, :4] == before[:, [6, 1, 3, 0]]).all()
    assert not memory.layers[:, 4:].any(), "other blocks are unchanged"
    either.remove(space.keys(hashes)[2], force=True)
    assert cache.match(hashes) == 2 and cache.load(hashes, memory.pages, [4, 5, 6, 7]) == 2


class PartlySilent:
    """A store of several masters, one of which does not answer for some keys."""

    def __init__(self, store: moontide.Store, silent: set[str]) -> None:
        self._store = store
        self.silent = silent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _ask(self, keys: list[str], answers: list[Any]) -> list[Any]:
        if not self.silent & set(keys):
            return answers
        late = moontide.Unreachable("the master does not answer")
        raise moontide.BatchError([late if key in self.silent else own for key, own in zip(keys, answers, strict=True)])

    def batch_exists(self, keys: list[str]) -> list[bool]:
        return self._ask(keys, self._store.batch_exists(keys))

    def prefetch(self, keys: list[str]) -> list[bool]:
        return self._ask(keys, self._store.prefetch(keys))


def test_match_counts_blocks_before_first_unknown_one(store: moontide.Store, space: kv.Namespace) -> None:
    hashes = kv.block_hashes(range(16 * 5), 16)
    keys = space.keys(hashes, ["0", "1"])
    store.batch_put(keys, [b"x"] * len(keys))
    partly = PartlySilent(store, {keys[7]})
    cache = kv.StoreBlockCache(partly, space)  # type: ignore[arg-type]
    assert cache.match(hashes, ["0", "1"]) == 3
    partly.silent = {keys[9]}
    store.remove(keys[4], force=True)
    assert cache.match(hashes, ["0", "1"]) == 2, "a missing block before the unknown one"
    partly.silent = {keys[1]}
    with pytest.raises(moontide.Unreachable):
        cache.match(hashes, ["0", "1"])
    partly.silent = {keys[1]}
    store.remove(keys[0], force=True)
    assert cache.match(hashes, ["0", "1"]) == 0, "the first block is missing, whatever the master would say"


def test_failed_prefetch_changes_no_lookup(store: moontide.Store, space: kv.Namespace) -> None:
    keys = space.keys(kv.block_hashes(range(16 * 4), 16), ["0"])
    store.batch_put(keys, [b"x"] * len(keys))
    connection = kv.StoreConnection(lambda: PartlySilent(store, {keys[2]}))  # type: ignore[arg-type,return-value]
    lookups = kv.Lookups(connection, timeout=20)
    lookups.ask("request", 4, lambda: keys)
    wait_until("the prefetch fails", lambda: not connection.available)
    assert lookups.ask("request", 4, lambda: keys) == 4
    assert lookups.counts.answered == 1 and lookups.counts.hit_blocks == 4
    lookups.close()


def test_save_rejects_block_index_out_of_range(store: moontide.Store, space: kv.Namespace) -> None:
    cache = kv.StoreBlockCache(store, space)
    for blocks in ([8], [-1]):
        with pytest.raises(IndexError, match="has 8 blocks"):
            cache.save(kv.block_hashes(range(16), 16), Memory(8, 1).pages, blocks)
    with pytest.raises(moontide.InvalidArgument, match="one hash for each block"):
        cache.save([], Memory(8, 1).pages, [1])


def test_lookup_is_asynchronous_and_stops_at_first_gap(store: moontide.Store, space: kv.Namespace) -> None:
    hashes = kv.block_hashes(range(16 * 6), 16)
    keys = space.keys(hashes, ["0", "1"])
    missing = {5, 8}  # the second part of block 2, and the first part of block 4
    store.batch_put([key for at, key in enumerate(keys) if at not in missing], [b"x"] * (len(keys) - len(missing)))
    connection = kv.StoreConnection(lambda: store)
    lookups = kv.Lookups(connection, timeout=20)
    found: list[int | None] = [lookups.ask("request", 6, lambda: keys)]
    assert found == [None], "the call does not block"

    def answered() -> bool:
        found.append(lookups.ask("request", 6, lambda: keys))
        return found[-1] is not None

    wait_until("result of the lookup", answered)
    assert found[-1] == 2
    assert lookups.counts.blocks == 6 and lookups.counts.hit_blocks == 2
    lookups.close()


def test_transfers_report_failed_blocks_and_load_the_rest(
    store: moontide.Store, space: kv.Namespace, seed: int
) -> None:
    memory, hashes = Memory(8, seed), kv.block_hashes(range(64), 16)
    before, keys = memory.layers.copy(), space.keys(hashes)
    transfers = kv.Transfers(kv.StoreConnection(lambda: store))
    assert transfers.save("a", 3, lambda: memory.batch(keys[:3], [0, 1, 2]))
    assert transfers.wait_saved(["a"], 20) and not transfers.is_saving("a")
    loading = transfers.load("b", 4, lambda: memory.batch(keys, [4, 5, 6, 7]))
    assert loading.wait(20) == [3], "the last block was never saved"
    assert transfers.take_loaded() == [("b", [3])] and transfers.take_loaded() == []
    assert (memory.layers[:, 4:7] == before[:, :3]).all()
    assert (transfers.counts.saved_blocks, transfers.counts.loaded_blocks, transfers.counts.load_failures) == (3, 3, 1)
    transfers.close()


def test_unavailable_store_fails_fast() -> None:
    calls = itertools.count()

    def connect() -> moontide.Store:
        next(calls)
        raise moontide.Unreachable("no master")

    connection = kv.StoreConnection(connect, retry_after=60)
    lookups, transfers = kv.Lookups(connection, timeout=20), kv.Transfers(connection)
    wait_until("the first result", lambda: lookups.ask("first", 1, lambda: ["k"]) == 0)
    assert not connection.available
    began = time.perf_counter()
    for number in range(1000):
        assert lookups.ask(f"r{number}", 4, lambda: ["k"] * 4) == 0
        assert not transfers.save(f"r{number}", 4, lambda: pytest.fail("the batch must not be made"))
    assert time.perf_counter() - began < 1.0, "less than a millisecond per call"
    assert transfers.load("r", 2, lambda: pytest.fail("the batch must not be made")).wait(20) == [0, 1]
    assert next(calls) == 1, "no new attempt before retry_after"
    lookups.close()
    transfers.close()


def test_hanging_store_times_out_once_then_fails_fast(
    own_cluster: Callable[..., Any], stopped: Callable[..., AbstractContextManager[None]]
) -> None:
    cluster = own_cluster(nodes=1)
    connection = kv.StoreConnection(lambda: moontide.Store(cluster.master, timeout=1.0), retry_after=60)
    assert connection.store() is not None
    lookups = kv.Lookups(connection, timeout=0.2)
    with stopped(cluster.master_server):
        began = time.monotonic()
        wait_until("a result", lambda: lookups.ask("request", 1, lambda: ["k"]) == 0)
        assert time.monotonic() - began < 1.0, "the scheduler does not wait for the timeout of the store"
        wait_until("the connection is unavailable", lambda: not connection.available)
        assert lookups.ask("another", 1, lambda: ["k"]) == 0
    lookups.close()
