"""asyncio: many tasks, cancelled tasks, and event loops that end. ``test_calls.py`` tests the calls."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
import weakref

import pytest

import moontide

MIB = 1 << 20


def test_200_concurrent_tasks_read_their_own_writes(cluster, key, seed):
    async def work(store: moontide.AsyncStore, number: int) -> None:
        draw = random.Random(seed + number)
        name, content = key(f"task/{number}"), draw.randbytes(draw.randrange(20_000))
        assert await store.put(name, content)
        assert await store.get(name) == content
        view = await store.get_view(name)
        assert bytes(view) == content
        space = bytearray(20_000)
        assert await store.get_into(name, space) == len(content)
        assert space[: len(content)] == content
        assert await store.exists(name)
        assert await store.remove(name)
        assert await store.get(name) is None

    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master) as store:
            assert store.master == cluster.master
            await asyncio.gather(*(work(store, number) for number in range(200)))

    asyncio.run(main())


def test_event_loop_runs_during_a_call(cluster, store, key):
    async def main() -> int:
        async with await moontide.AsyncStore.connect(cluster.master, shm=False) as remote:
            waiting = asyncio.ensure_future(remote.get(key("a")))
            ticks = 0
            while not waiting.done():
                ticks += 1
                await asyncio.sleep(0.001)
            assert len(await waiting) == 64 * MIB
            return ticks

    store.put(key("a"), bytes(64 * MIB))
    assert asyncio.run(main()) >= 3


def test_cancelled_tasks_leave_store_usable(cluster, key):
    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master, shm=False) as store:
            assert await store.put(key("a"), bytes(8 * MIB))
            spaces = [bytearray(8 * MIB) for _ in range(4)]
            for delay in (0, 0.0005, 0.002, 0.005):
                tasks = [asyncio.ensure_future(store.get_into(key("a"), space)) for space in spaces]
                tasks += [asyncio.ensure_future(store.put(key(f"b{delay}"), spaces[0], overwrite=True))]
                await asyncio.sleep(delay)
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    assert ended in (8 * MIB, True) or isinstance(ended, (asyncio.CancelledError, moontide.Error))
            assert await store.get(key("a")) == bytes(8 * MIB)

    asyncio.run(main())


def test_asyncio_timeout_cancels_call(own_cluster, stopped):
    cluster = own_cluster()

    async def main() -> float:
        store = await moontide.AsyncStore.connect(cluster.master, timeout=4)
        with stopped(cluster.master_server):
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await store.exists("a")
            store.close()
            return time.monotonic() - begun

    assert asyncio.run(main()) < 2


def test_closed_async_store_raises_closed_and_views_remain_valid(cluster, key):
    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master) as store:
            await store.put(key("a"), b"123")
            view = await store.get_view(key("a"))
            assert store.stats()["puts"] == 1
            assert not store.closed
        assert store.closed
        assert bytes(view) == b"123"
        store.close()
        with pytest.raises(moontide.Closed, match="the store is closed"):
            await store.get(key("a"))

    asyncio.run(main())


def test_async_remove_all_returns_count(cluster):
    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master, tenant="tasks") as store:
            await store.batch_put(["a", "b"], [b"1", b"2"])
            assert await store.remove_all() == 2
            assert await store.batch_exists(["a", "b"]) == [False, False]

    asyncio.run(main())


def test_async_call_without_running_loop_raises(cluster):
    async def connect() -> moontide.AsyncStore:
        return await moontide.AsyncStore.connect(cluster.master)

    store = asyncio.run(connect())
    with pytest.raises(RuntimeError, match="loop"):
        store.get("a")

    async def again() -> bool:
        return await store.exists("never put")

    assert asyncio.run(again()) is False, "another loop of the same process can use it"
    store.close()


MANY_LOOPS = """
import asyncio, os, sys, threading, moontide
master, key = sys.argv[1:]
async def connect():
    return await moontide.AsyncStore.connect(master)
store = asyncio.run(connect())
done = []
async def work(number):
    for round in range(100):
        name = f"{key}/{number}/{round}"
        assert await store.put(name, name.encode())
        assert await asyncio.gather(store.get(name), store.exists(name)) == [name.encode(), True]
    if number == 0:
        print("few files are open:", len(os.listdir("/proc/self/fd")) < 100)
    done.append(number)
threads = [threading.Thread(target=lambda number=number: asyncio.run(work(number))) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
store.close()
print("done:", len(done))
"""


def test_async_store_serves_event_loops_of_many_threads(python, key):
    # In a separate process: a deadlock with the GIL held would stop the whole process.
    ended = python(MANY_LOOPS, key("a"), seconds=30)
    assert (ended.stdout, ended.stderr) == ("few files are open: True\ndone: 8\n", "")


CLOSED_ELSEWHERE = """
import asyncio, sys, threading, moontide
master, key = sys.argv[1:]
async def main():
    store = await moontide.AsyncStore.connect(master)
    await store.put(key, b"1")
    closing = threading.Thread(target=store.close)
    closing.start()
    try:
        while True:
            await store.get(key)
    except moontide.Closed:
        print("closed")
    closing.join()
for _ in range(10):
    asyncio.run(main())
    async def remove():
        async with await moontide.AsyncStore.connect(master) as store:
            await store.remove(key)
    asyncio.run(remove())
"""


def test_async_store_can_be_closed_by_another_thread(python, key):
    ended = python(CLOSED_ELSEWHERE, key("a"), seconds=30)
    assert (ended.stdout, ended.stderr) == ("closed\n" * 10, "")


def test_closed_event_loops_leak_no_files_or_objects(cluster, key):
    async def connect() -> moontide.AsyncStore:
        return await moontide.AsyncStore.connect(cluster.master)

    store = asyncio.run(connect())

    async def work() -> None:
        assert await store.put(key("a"), b"1", overwrite=True)
        assert await store.get(key("a")) == b"1"

    for _ in range(10):
        asyncio.run(work())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    loops = []
    for _ in range(100):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(work())
        loop.close()
        loops.append(weakref.ref(loop))
        del loop
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert sum(loop() is not None for loop in loops) <= 2
    store.close()


def test_failed_connects_leak_no_files():
    async def main() -> int:
        async def attempt() -> None:
            with pytest.raises(moontide.Unreachable):
                await moontide.AsyncStore.connect("127.0.0.1:1")

        await attempt()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await attempt()
        gc.collect()
        return len(os.listdir("/proc/self/fd")) - before

    assert asyncio.run(main()) <= 3


def test_store_survives_event_loop_that_ends_during_calls(cluster, store, key):
    async def leave() -> moontide.AsyncStore:
        remote = await moontide.AsyncStore.connect(cluster.master, shm=False)
        for number in range(50):
            remote.put(key(str(number)), bytes(MIB))
        return remote

    async def again(remote: moontide.AsyncStore) -> None:
        assert await remote.put(key("last"), b"1")
        assert await remote.get(key("last")) == b"1"

    remote = asyncio.run(leave())
    asyncio.run(again(remote))
    remote.close()


def test_async_calls_release_their_buffers(cluster, key):
    class Value(bytearray):
        pass

    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master) as store:
            value, space = Value(b"123"), Value(3)
            seen = [weakref.ref(value), weakref.ref(space)]
            await store.put(key("a"), value)
            await store.get_into(key("a"), space)
            value.append(1)
            space.append(1)
            del value, space
            gc.collect()
            assert [each() for each in seen] == [None, None]

    asyncio.run(main())


def test_errors_are_raised_in_awaiting_task(cluster, key):
    async def main() -> None:
        async with await moontide.AsyncStore.connect(cluster.master) as store:
            ended = await asyncio.gather(
                store.put(key("a"), b"1"),
                store.put("", b""),
                store.get_into(key("b"), bytearray(1)),
                store.batch_put(["k" * 5000], [b""]),
                return_exceptions=True,
            )
            assert [type(each) for each in ended] == [
                bool,
                moontide.InvalidArgument,
                type(None),
                moontide.BatchError,
            ]
            with pytest.raises(TypeError):
                store.put(3, b"")

    asyncio.run(main())
