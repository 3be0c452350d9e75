"""Views: zero-copy bytes of an object, their lifetime, and the release of their memory."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import moontide

MIB = 1 << 20


def mapped_from_nodes() -> list[range]:
    """Returns the address ranges of shared memory in this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)", line)
        assert found
        if "s" in found[3] and ("memfd" in found[4] or "/dev/shm" in found[4]):
            ranges.append(range(int(found[1], 16), int(found[2], 16)))
    return ranges


def draining_bytes(cluster) -> int:
    """Returns the draining bytes of all nodes: removed, but still held by readers or not yet reclaimed."""
    total = 0
    for node in cluster.nodes:
        page = urllib.request.urlopen(f"{node.facts['admin'].rstrip('/')}/metrics", timeout=5).read().decode()
        found = re.search(r"^moontide_node_memory_draining_bytes (\d+)", page, re.M)
        assert found, page
        total += int(found[1])
    return total


def wait_until(condition, seconds: float = 10) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.smoke
def test_view_supports_buffer_protocol(either, key):
    either.put(key("a"), b"tides")
    view = either.get_view(key("a"))
    assert (len(view), view.size(), bytes(view)) == (5, 5, b"tides")
    buffer = memoryview(view)
    assert (buffer.readonly, buffer.format, buffer.shape) == (True, "B", (5,))
    assert (buffer.strides, buffer.c_contiguous) == ((1,), True)
    assert buffer[1:3] == b"id"
    assert np.frombuffer(view, "u1").tobytes() == b"tides"
    assert np.asarray(view).dtype == np.uint8
    assert np.from_dlpack(view).tobytes() == b"tides"
    assert bytearray(view) == b"tides"
    assert b"".join([view, view]) == b"tidestides"
    assert view.verify()


def test_views_compare_with_bytes(either, key):
    either.put(key("a"), b"123")
    view = either.get_view(key("a"))
    assert view == b"123"
    assert view == bytearray(b"123")
    assert view == either.get_view(key("a"))
    assert view != b"12"
    assert view != "123"
    assert view != None  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


def test_view_repr(store, remote, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    assert repr(view) == "<moontide.View of 3 bytes, zero_copy=True>"
    assert repr(remote.get_view(key("a"))) == "<moontide.View of 3 bytes, zero_copy=False>"
    view.release()
    assert repr(view) == "<moontide.View, released>"


def test_view_is_read_only(either, key):
    either.put(key("a"), b"123")
    view = either.get_view(key("a"))
    for writing in (
        lambda: memoryview(view).__setitem__(0, 1),
        lambda: np.asarray(view).__setitem__(0, 1),
        lambda: np.frombuffer(view, "u1").__setitem__(0, 1),
        lambda: np.from_dlpack(view).__setitem__(0, 1),
    ):
        with pytest.raises((TypeError, ValueError)):
            writing()
    assert view == b"123"


def test_view_is_zero_copy_over_shm_and_copied_over_tcp(store, remote, key):
    remote.put(key("a"), b"x" * 100_000)
    ranges = mapped_from_nodes()
    view = store.get_view(key("a"))
    assert view.zero_copy
    assert any(view.ptr() in mapped for mapped in mapped_from_nodes()), "the bytes are in the node's memory"
    assert ranges == mapped_from_nodes(), "nothing was mapped for them"
    assert np.asarray(view).ctypes.data == np.from_dlpack(view).ctypes.data == view.ptr()
    copy = remote.get_view(key("a"))
    assert not copy.zero_copy
    assert not any(copy.ptr() in mapped for mapped in mapped_from_nodes())
    assert bytes(copy) == bytes(view)


def test_views_of_one_object_share_memory(store, key):
    store.put(key("a"), b"x" * MIB)
    views = [store.get_view(key("a")) for _ in range(100)]
    assert len({view.ptr() for view in views}) == 1
    assert len({view.ptr() for view in store.batch_get_view([key("a")] * 10)}) == 1


SEES = """
import sys, moontide
with moontide.Store(sys.argv[1]) as store:
    view = store.get_view(sys.argv[2])
    print(view.zero_copy, bytes(memoryview(view)[:4]), len(view))
    print(store.stats()["hits_local"])
"""


def test_another_process_reads_zero_copy(store, key, python):
    store.put(key("a"), b"tide" * 1000)
    ended = python(SEES, key("a"))
    assert (ended.stdout, ended.stderr) == ("True b'tide' 4000\n1\n", "")


@pytest.mark.parametrize("how", ["remove", "overwrite", "remove_all", "close"])
def test_view_is_unchanged_after_remove_overwrite_and_close(cluster, how):
    content = bytes(range(256)) * 256
    store = moontide.Store(cluster.master, tenant=f"view-{how}")
    store.put("a", content)
    view = store.get_view("a")
    array = np.asarray(store.get_view("a"))
    buffer = memoryview(store.get_view("a"))
    assert view.zero_copy
    match how:
        case "remove":
            assert store.remove("a")
        case "overwrite":
            assert store.put("a", b"other" * 1000, overwrite=True)
        case "remove_all":
            assert store.remove_all() == 1
        case "close":
            store.close()
    # Overwrites all free memory.
    with moontide.Store(cluster.master, tenant=f"view-{how}") as other:
        other.batch_put([f"after/{number}" for number in range(200)], [b"\xff" * len(content)] * 200)
        assert bytes(view) == bytes(array) == bytes(buffer) == content
        assert view.verify()
        other.remove_all()
    view.release()
    store.close()


def test_view_outlives_killed_node(own_cluster):
    cluster = own_cluster()
    with moontide.Store(cluster.master) as store:
        store.put("a", b"x" * MIB)
        view = store.get_view("a")
        cluster.nodes[0].end(kill=True)
        assert bytes(view) == b"x" * MIB


def test_view_holds_memory_until_dropped(own_cluster):
    cluster = own_cluster(nodes=1, memory="64MiB")
    with moontide.Store(cluster.master, timeout=2) as store:
        keys = [str(number) for number in range(24)]
        store.batch_put(keys, [bytes([number]) * 2 * MIB for number in range(24)])
        views = store.batch_get_view(keys)
        arrays = [np.asarray(view) for view in views]
        assert all(view.zero_copy for view in views)
        store.batch_remove(keys)
        wait_until(lambda: draining_bytes(cluster) >= 48 * MIB)
        assert store.put("small", b"x" * 8 * MIB), "there is free space besides the held memory"
        with pytest.raises(moontide.NoSpace):
            store.put("large", b"x" * 32 * MIB)
        assert all(array[0] == array[-1] == number for number, array in enumerate(arrays))
        del views
        gc.collect()
        assert draining_bytes(cluster) >= 48 * MIB, "arrays hold the memory as views do"
        del arrays
        gc.collect()
        wait_until(lambda: draining_bytes(cluster) == 0)
        assert store.put("large", b"x" * 32 * MIB)


def test_thousands_of_dropped_views_do_not_exhaust_cells(store, key):
    keys = [key(str(number)) for number in range(100)]
    store.batch_put(keys, [str(number).encode() for number in range(100)])
    for _ in range(20):
        views = store.batch_get_view(keys * 2)
        assert all(view.zero_copy for view in views)
        assert [bytes(view) for view in views] == [str(number).encode() for number in range(100)] * 2


def test_views_beyond_cell_limit_are_copies(store, key):
    store.put(key("a"), b"123")
    views = [store.get_view(key("a")) for _ in range(2000)]
    assert all(bytes(view) == b"123" for view in views)
    assert views[0].zero_copy
    assert not views[-1].zero_copy
    del views
    assert store.get_view(key("a")).zero_copy


def test_released_view_raises_closed(cluster, store, key):
    store.put(key("a"), b"x" * MIB)
    view = store.get_view(key("a"))
    store.remove(key("a"))
    view.release()
    view.release()
    for use in (
        lambda: bytes(view),
        lambda: memoryview(view),
        lambda: view.verify(),
        lambda: view.zero_copy,
        lambda: view.ptr(),
        lambda: np.from_dlpack(view),
        lambda: view.__array_interface__,
        lambda: view == b"",
    ):
        with pytest.raises(moontide.Closed, match="the view is closed"):
            use()
    assert len(view) == MIB


def test_release_fails_while_buffer_is_exported(either, key):
    either.put(key("a"), b"123")
    view = either.get_view(key("a"))
    buffer = memoryview(view)
    with pytest.raises(BufferError, match="still uses the memory"):
        view.release()
    assert buffer[0] == ord("1")
    buffer.release()
    view.release()


def test_with_block_releases_view(either, key):
    either.put(key("a"), b"123")
    with either.get_view(key("a")) as view:
        assert bytes(view) == b"123"
    with pytest.raises(moontide.Closed):
        bytes(view)
    with either.get_view(key("a")) as view:
        kept = np.asarray(view)
    assert kept.tobytes() == b"123", "arrays of the view outlive the block"


def test_with_block_propagates_exceptions(store, key):
    store.put(key("a"), b"123")
    with pytest.raises(KeyError, match="mine"), store.get_view(key("a")):
        raise KeyError("mine")


def test_dropped_array_releases_view_reference(store, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    before = sys.getrefcount(view)
    for make in (np.from_dlpack, np.asarray, memoryview, lambda view: np.frombuffer(view, "u1")):
        array = make(view)
        assert sys.getrefcount(view) > before
        del array
        assert sys.getrefcount(view) == before


def test_dlpack_copy_is_independent(store, key):
    store.put(key("a"), b"123")
    try:
        copy = np.from_dlpack(store.get_view(key("a")), copy=True)
    except BufferError:
        return
    copy[0] = 0
    assert store.get(key("a")) == b"123"


def test_unsupported_dlpack_requests_are_rejected(store, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    assert view.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        view.__dlpack__()
    with pytest.raises(BufferError):
        view.__dlpack__(max_version=(0, 8))
    with pytest.raises(BufferError):
        view.__dlpack__(max_version=(1, 0), dl_device=(2, 0))
    # An unused capsule releases its reference.
    view.__dlpack__(max_version=(1, 0))


def test_view_of_empty_object_is_empty(either, key):
    either.put(key("a"), b"")
    view = either.get_view(key("a"))
    assert (len(view), bytes(view), view == b"") == (0, b"", True)
    assert np.asarray(view).shape == (0,)
    assert np.from_dlpack(view).shape == (0,)
    assert view.verify()


# -------------------------------------------------------------------------------------------------- interpreter exit

AT_EXIT = {
    "stores": "store = moontide.Store(master)",
    "views": "store = moontide.Store(master); store.put(k, b'1' * 999); views = [store.get_view(k) for _ in range(99)]",
    "views without their store": "views = [moontide.Store(master).get_view('never')]; store = moontide.Store(master); "
    "store.put(k, b'1'); views = [store.get_view(k)]; del store",
    "buffers": "store = moontide.Store(master); store.put(k, b'1'); buffer = memoryview(store.get_view(k))",
    "arrays": "import numpy; store = moontide.Store(master); store.put_tensor(k, numpy.zeros(9)); "
    "arrays = [store.get_tensor(k).numpy(), numpy.from_dlpack(store.get_tensor(k)), numpy.asarray(store.get_view(k))]",
    "a cycle": "store = moontide.Store(master); store.put(k, b'1')\nclass Ring: pass\n"
    "ring = Ring(); ring.ring = ring; ring.store = store; ring.view = store.get_view(k)",
    "a dev cluster": "dev = moontide.dev(64 << 20); store = dev.store(); store.put(k, b'1'); view = store.get_view(k)",
    "a dev cluster, stores dropped last": "store = None; dev = moontide.dev(64 << 20); store = dev.store(); "
    "store.put(k, b'1'); view = store.get_view(k); dev.close()",
    "a thread in a call": "import threading, time; store = moontide.Store(master, timeout=1)\n"
    "def work():\n    while True: store.put(k, b'1' * 99999, overwrite=True); store.get(k)\n"
    "threading.Thread(target=work, daemon=True).start(); time.sleep(0.3)",
    "an async store": "import asyncio\n"
    "async def work():\n    global store, view\n    store = await moontide.AsyncStore.connect(master)\n"
    "    await store.put(k, b'1'); view = await store.get_view(k)\nasyncio.run(work())",
    "an async store that was closed": "import asyncio\n"
    "async def work():\n    async with await moontide.AsyncStore.connect(master) as store:\n"
    "        await store.put(k, b'1'); view = await store.get_view(k)\nasyncio.run(work())",
    "an async call that is not awaited": "import asyncio\n"
    "async def work():\n    store = await moontide.AsyncStore.connect(master, shm=False)\n"
    "    store.put(k, b'1' * 99999)\nasyncio.run(work())",
    "an exception": "store = moontide.Store(master)\n"
    "try: store.put('', b'')\nexcept moontide.Error as error: kept = error",
    "exit in a function": "def work():\n    store = moontide.Store(master); store.put(k, b'1')\n"
    "    view = store.get_view(k); sys.exit(0)\nwork()",
}


@pytest.mark.parametrize("what", AT_EXIT)
def test_interpreter_exits_cleanly_with_live_objects(python, key, what):
    # Threads disturb the exit only sometimes, so these cases run several times.
    for number in range(5 if "async" in what or "thread" in what else 1):
        program = f"import sys, moontide\nmaster, k = sys.argv[1:]\n{AT_EXIT[what]}\n"
        ended = python(program, key(str(number)), seconds=20)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_import_alone_exits_cleanly():
    program = "import moontide"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
