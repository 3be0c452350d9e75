"""Forked children of a process with stores and views: inherited objects, own connections, effects on the parent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

import moontide

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

FAILED = 13


def in_child(work, exits=os._exit) -> int:
    """Runs a function in a forked child. Returns its exit code, 0 if nothing was raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 0
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            code = FAILED
        exits(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_forked_child_cannot_use_inherited_store_and_views(cluster, store, key):
    store.put(key("a"), b"123")
    store.put_tensor(key("t"), np.arange(3))
    view, tensor, options = store.get_view(key("a")), store.get_tensor(key("t")), moontide.PutOptions(ttl=1)

    def child() -> None:
        for use in (
            lambda: store.get(key("a")),
            lambda: store.put(key("b"), b""),
            lambda: store.exists(key("a")),
            lambda: store.batch_get([key("a")]),
            lambda: store.get_view(key("a")),
            lambda: store.stats(),
            lambda: bytes(view),
            lambda: memoryview(view),
            lambda: view.verify(),
            lambda: tensor.numpy(),
        ):
            with pytest.raises(moontide.Closed, match="forked"):
                use()
        assert store.closed
        assert repr(options)
        store.close()
        view.release()

    assert in_child(child) == 0
    assert bytes(view) == b"123"
    assert store.get(key("a")) == b"123"


def test_forked_child_segfaults_on_zero_copy_array_of_parent(store, key):
    store.put(key("a"), b"123")
    array = np.asarray(store.get_view(key("a")))

    def child() -> None:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bytes(array)

    assert in_child(child) == -signal.SIGSEGV
    assert bytes(array) == b"123"
    assert in_child(lambda: None) == 0, "a child that does not use it exits cleanly"


def test_forked_child_can_open_its_own_store(cluster, store, key):
    store.put(key("a"), b"123")

    def child() -> None:
        with moontide.Store(cluster.master) as mine:
            view = mine.get_view(key("a"))
            assert (bytes(view), view.zero_copy) == (b"123", True)
            assert mine.put(key("child"), b"456")
            del view

    assert in_child(child) == 0
    assert store.get(key("child")) == b"456"


PARENT = """
import os, sys, gc, multiprocessing, warnings
import moontide, numpy
warnings.simplefilter("ignore", DeprecationWarning)
master, key, how = sys.argv[1:]
store = moontide.Store(master)
content = os.urandom(100_000)
store.put(key, content)
views = [store.get_view(key) for _ in range(10)]
array = numpy.asarray(store.get_view(key))
child = os.fork()
if child == 0:
    if how == "sys.exit": sys.exit(3)
    if how == "os._exit": os._exit(3)
    if how == "drop":
        del views, array, store
        gc.collect()
        sys.exit(3)
    if how == "connect":
        mine = moontide.Store(master)
        kept = mine.get_view(key)
        assert bytes(kept) == content
        sys.exit(3)
    if how == "exec": os.execv(sys.executable, [sys.executable, "-c", "import sys; sys.exit(3)"])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert store.remove(key)
store.batch_put([key + str(n) for n in range(100)], [b"x" * 100_000] * 100)
assert all(bytes(view) == content for view in views)
assert bytes(array) == content
assert store.get(key) is None
assert store.get_view(key + "0").zero_copy
print("good")
"""


@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "drop", "connect", "exec"])
def test_child_exit_does_not_affect_views_of_parent(python, key, how):
    ended = python(PARENT, key("a"), how)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("good\n", "", 0)


def _get_in_child(master: str, name: str) -> tuple[bytes, bool]:
    with moontide.Store(master) as store:
        view = store.get_view(name)
        return bytes(view), view.zero_copy


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_workers_can_open_stores(cluster, store, key, method):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(_get_in_child, [(cluster.master, key("a"))] * 4)
    assert found == [(b"123", True)] * 4
    assert bytes(view) == b"123"
    assert store.get(key("a")) == b"123"


def test_fork_is_safe_during_calls_of_other_threads(cluster, store, key):
    import threading

    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            name = key(str(number))
            store.put(name, b"x" * 10_000, overwrite=True)
            assert bytes(store.get_view(name)) == b"x" * 10_000

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    def child() -> None:
        with pytest.raises(moontide.Closed):
            store.get(key("0"))
        with moontide.Store(cluster.master) as mine:
            mine.put(key("child"), b"1", overwrite=True)

    try:
        assert [in_child(child) for _ in range(5)] == [0] * 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_forked_child_cannot_close_dev_cluster_of_parent(tmp_path):
    program = """
import os, moontide, warnings
warnings.simplefilter("ignore", DeprecationWarning)
with moontide.dev(64 << 20) as dev, dev.store() as store:
    store.put("a", b"1")
    child = os.fork()
    if child == 0:
        dev.close()
        with moontide.Store(dev.master) as mine:
            assert mine.get("a") == b"1"
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("a") == b"1"
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


ASYNC = """
import asyncio, os, sys, warnings, moontide
warnings.simplefilter("ignore", DeprecationWarning)
async def main(master, key):
    store = await moontide.AsyncStore.connect(master)
    await store.put(key, b"1")
    child = os.fork()
    if child == 0:
        try:
            await store.get(key)
        except moontide.Closed:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert await store.get(key) == b"1"
asyncio.run(main(*sys.argv[1:]))
"""


def test_forked_child_cannot_use_async_store(python, key):
    ended = python(ASYNC, key("a"))
    assert (ended.returncode, ended.stderr) == (0, "")


ASYNC_CHILD = """
import asyncio, os, sys, warnings, moontide
warnings.simplefilter("ignore", DeprecationWarning)
async def work(master, key):
    async with await moontide.AsyncStore.connect(master) as store:
        return await store.put(key, b"1", overwrite=True)
assert asyncio.run(work(*sys.argv[1:]))
child = os.fork()
if child == 0:
    try:
        assert asyncio.run(asyncio.wait_for(work(*sys.argv[1:]), 10))
    except moontide.Closed as error:
        assert "spawn" in str(error)
        os._exit(7)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_asyncio_in_forked_child_works_or_raises_closed(python, key):
    ended = python(ASYNC_CHILD, key("a"))
    assert (ended.returncode, ended.stderr) == (0, "")
