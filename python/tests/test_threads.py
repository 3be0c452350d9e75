"""Many threads with one store."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_views import draining_bytes, wait_until

import moontide

MIB = 1 << 20


def work(store, prefix: str, draw: random.Random, rounds: int) -> dict[str, bytes]:
    """Makes mixed calls for keys that no other thread uses, checks every result, and returns the final contents."""
    expected: dict[str, bytes] = {}
    for _ in range(rounds):
        name = f"{prefix}{draw.randrange(8)}"
        content = draw.randbytes(draw.choice([0, 1, 100, 5000, 70_000]))
        match draw.choice(["put", "put", "get", "get", "view", "into", "exists", "remove", "batch", "tensor"]):
            case "put":
                assert store.put(name, content, overwrite=True)
                expected[name] = content
            case "get":
                assert store.get(name) == expected.get(name)
            case "view":
                view = store.get_view(name)
                assert (view if view is None else bytes(view)) == expected.get(name)
            case "into":
                space = bytearray(70_000)
                length = store.get_into(name, space)
                assert (length if length is None else space[:length]) == expected.get(name)
            case "exists":
                assert store.exists(name) == (name in expected)
            case "remove":
                assert store.remove(name) == (expected.pop(name, None) is not None)
            case "batch":
                names = [f"{prefix}{number}" for number in range(8)]
                assert store.batch_get(names) == [expected.get(name) for name in names]
            case "tensor":
                array = np.frombuffer(content, "u1")
                assert store.put_tensor(name, array, overwrite=True)
                assert (store.get_tensor(name).numpy() == array).all()
                assert store.remove(name)
                expected.pop(name, None)
    return expected


def test_64_threads_read_their_own_writes(either, key, seed):
    with ThreadPoolExecutor(64) as pool:
        done = [pool.submit(work, either, key(f"{number}/"), random.Random(seed + number), 40) for number in range(64)]
        expected = {name: content for each in done for name, content in each.result().items()}
    assert len(expected) > 64
    assert sorted(either.keys(key())) == sorted(name.encode() for name in expected)
    assert either.batch_get(list(expected)) == list(expected.values())


def test_concurrent_reads_and_writes_of_same_keys_are_never_torn(store, remote, key, seed):
    names = [key(str(number)) for number in range(4)]
    ends = time.monotonic() + 2

    def whole(content: bytes | None) -> bool:
        return content is None or (len(content) >= 1000 and content == content[:1] * len(content))

    def each(number: int) -> int:
        draw = random.Random(seed + number)
        connection = draw.choice([store, remote])
        done = 0
        while time.monotonic() < ends:
            name = draw.choice(names)
            try:
                match draw.randrange(5):
                    case 0:
                        letter = bytes([draw.randrange(256)])
                        connection.put(name, letter * draw.randrange(1000, 100_000), overwrite=True)
                    case 1:
                        assert whole(connection.get(name))
                    case 2:
                        view = connection.get_view(name)
                        assert view is None or whole(bytes(view))
                    case 3:
                        space = bytearray(100_000)
                        length = connection.get_into(name, space)
                        assert length is None or whole(bytes(space[:length]))
                    case 4:
                        connection.remove(name)
            except moontide.Error as error:
                assert error.retryable, error
            done += 1
        return done

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(each, range(16))) > 500


def test_exactly_one_concurrent_put_succeeds(store, key):
    barrier = threading.Barrier(16)

    def put(number: int) -> bool:
        barrier.wait()
        try:
            return store.put(key("a"), bytes([number]) * 1000)
        except moontide.InProgress:
            return False

    with ThreadPoolExecutor(16) as pool:
        stored = list(pool.map(put, range(16)))
    assert sum(stored) == 1
    assert store.get(key("a")) == bytes([stored.index(True)]) * 1000


@pytest.mark.parametrize("call", ["get", "get_into", "get_view", "put", "batch_get", "put_from"])
def test_calls_release_the_gil(remote, key, call):
    """A call of 64 MiB over TCP takes tens of milliseconds; another thread runs meanwhile."""
    content = bytes(64 * MIB)
    remote.put(key("a"), content)
    space = bytearray(64 * MIB)
    slices: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            slices.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    time.sleep(0.01)
    before = len(slices)
    begun = time.perf_counter()
    match call:
        case "get":
            remote.get(key("a"))
        case "get_into":
            remote.get_into(key("a"), space)
        case "get_view":
            remote.get_view(key("a"))
        case "put":
            remote.put(key("b"), content)
        case "put_from":
            remote.put_from(key("b"), [content[: 32 * MIB], content[32 * MIB :]])
        case "batch_get":
            remote.batch_get([key("a")])
    took = time.perf_counter() - begun
    ticks = len(slices) - before
    ended.set()
    ticking.join()
    assert ticks >= took / 0.02, f"{ticks} ticks in {took:.3f} s"


def test_blocked_call_releases_the_gil(own_cluster, stopped):
    cluster = own_cluster()
    with moontide.Store(cluster.master, timeout=1) as store, stopped(cluster.master_server):
        counted = 0
        waiting = threading.Thread(target=lambda: pytest.raises(moontide.Error, store.exists, "a"))
        waiting.start()
        while waiting.is_alive():
            counted += 1
            time.sleep(0.001)
        assert counted > 100


def test_close_ends_concurrent_calls_with_closed(cluster, key):
    store = moontide.Store(cluster.master, shm=False)
    store.put(key("a"), b"x" * MIB)
    seen: list[str] = []

    def read() -> None:
        try:
            while True:
                assert len(store.get(key("a"))) == MIB
        except moontide.Closed:
            seen.append("closed")

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    store.close()
    for thread in threads:
        thread.join(10)
    assert seen == ["closed"] * 8


def test_views_can_be_dropped_by_any_thread(own_cluster):
    cluster = own_cluster()
    with moontide.Store(cluster.master) as store:
        store.put("a", b"x" * 1000)
        with ThreadPoolExecutor(8) as pool:
            for _ in range(50):
                views = [store.get_view("a") for _ in range(8)]
                arrays = [np.from_dlpack(view) for view in views]
                assert all(view.zero_copy for view in views)
                assert list(pool.map(lambda view: view.verify(), views)) == [True] * 8
                assert list(pool.map(lambda array: int(array.sum()), arrays)) == [1000 * ord("x")] * 8
                for view in views:
                    pool.submit(lambda view: None, view)
                del views, arrays, view
        # The node frees the memory only if no thread has left a pin.
        assert store.remove("a")
        wait_until(lambda: draining_bytes(cluster) == 0)
