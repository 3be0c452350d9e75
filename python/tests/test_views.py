"""Views: an object's bytes without a copy, how long they stay, and when their memory is given back."""

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
    """Where memory that is shared with other processes is mapped in this one."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)", line)
        assert found
        if "s" in found[3] and ("memfd" in found[4] or "/dev/shm" in found[4]):
            ranges.append(range(int(found[1], 16), int(found[2], 16)))
    return ranges


def draining_bytes(cluster) -> int:
    """What was removed and is held by readers, or not given back yet, on all nodes."""
    total = 0
    for node in cluster.nodes:
        page = urllib.request.urlopen(f"{node.facts['admin'].rstrip('/')}/metrics", timeout=5).read().decode()
        found = re.search(r"^moontide_node_memory_draining_bytes (\d+)", page, re.M)
        assert found, page
        total += int(found[1])
    return total


def wait_until(true, seconds: float = 10) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.smoke
def test_a_view_is_a_buffer(either, key):
    either.put(key("a"), b"tides")
    view = either.get_view(key("a"))
    assert (len(view), view.size(), bytes(view)) == (5, 5, b"tides")
    lent = memoryview(view)
    assert (lent.readonly, lent.format, lent.shape, lent.strides, lent.c_contiguous) == (True, "B", (5,), (1,), True)
    assert lent[1:3] == b"id"
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


def test_a_view_shows_itself(store, far, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    assert repr(view) == "<moontide.View of 3 bytes, in_place=True>"
    assert repr(far.get_view(key("a"))) == "<moontide.View of 3 bytes, in_place=False>"
    view.release()
    assert repr(view) == "<moontide.View, released>"


def test_bytes_of_a_view_cannot_be_written(either, key):
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


def test_near_is_in_place_and_far_is_a_copy(store, far, key):
    far.put(key("a"), b"x" * 100_000)
    places = mapped_from_nodes()
    near = store.get_view(key("a"))
    assert near.in_place
    assert any(near.ptr() in place for place in mapped_from_nodes()), "the bytes are in the node's memory"
    assert places == mapped_from_nodes(), "and nothing was mapped for them"
    assert np.asarray(near).ctypes.data == np.from_dlpack(near).ctypes.data == near.ptr()
    copy = far.get_view(key("a"))
    assert not copy.in_place
    assert not any(copy.ptr() in place for place in mapped_from_nodes())
    assert bytes(copy) == bytes(near)


def test_many_views_of_one_object_share_its_bytes(store, key):
    store.put(key("a"), b"x" * MIB)
    views = [store.get_view(key("a")) for _ in range(100)]
    assert len({view.ptr() for view in views}) == 1
    assert len({view.ptr() for view in store.batch_get_view([key("a")] * 10)}) == 1


SEES = """
import sys, moontide
with moontide.Store(sys.argv[1]) as store:
    view = store.get_view(sys.argv[2])
    print(view.in_place, bytes(memoryview(view)[:4]), len(view))
    print(store.stats()["hits_local"])
"""


def test_another_process_reads_in_place(store, key, python):
    store.put(key("a"), b"tide" * 1000)
    ended = python(SEES, key("a"))
    assert (ended.stdout, ended.stderr) == ("True b'tide' 4000\n1\n", "")


@pytest.mark.parametrize("how", ["remove", "overwrite", "remove_all", "close"])
def test_bytes_stay_whatever_happens(cluster, how):
    content = bytes(range(256)) * 256
    store = moontide.Store(cluster.master, tenant=f"stay-{how}")
    store.put("a", content)
    view = store.get_view("a")
    array = np.asarray(store.get_view("a"))
    lent = memoryview(store.get_view("a"))
    assert view.in_place
    match how:
        case "remove":
            assert store.remove("a")
        case "overwrite":
            assert store.put("a", b"other" * 1000, overwrite=True)
        case "remove_all":
            assert store.remove_all() == 1
        case "close":
            store.close()
    # Whatever is free is written over now.
    with moontide.Store(cluster.master, tenant=f"stay-{how}") as other:
        other.batch_put([f"after/{number}" for number in range(200)], [b"\xff" * len(content)] * 200)
        assert bytes(view) == bytes(array) == bytes(lent) == content
        assert view.verify()
        other.remove_all()
    view.release()
    store.close()


def test_a_view_outlives_the_node(own_cluster):
    cluster = own_cluster()
    with moontide.Store(cluster.master) as store:
        store.put("a", b"x" * MIB)
        view = store.get_view("a")
        cluster.nodes[0].end(kill=True)
        assert bytes(view) == b"x" * MIB


def test_a_view_that_is_held_keeps_its_memory_until_it_is_dropped(own_cluster):
    cluster = own_cluster(nodes=1, memory="64MiB")
    with moontide.Store(cluster.master, deadline=2) as store:
        keys = [str(number) for number in range(24)]
        store.batch_put(keys, [bytes([number]) * 2 * MIB for number in range(24)])
        views = store.batch_get_view(keys)
        arrays = [np.asarray(view) for view in views]
        assert all(view.in_place for view in views)
        store.batch_remove(keys)
        wait_until(lambda: draining_bytes(cluster) >= 48 * MIB)
        assert store.put("small", b"x" * 8 * MIB), "there is room beside what is held"
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


def test_thousands_of_views_come_and_go(store, key):
    keys = [key(str(number)) for number in range(100)]
    store.batch_put(keys, [str(number).encode() for number in range(100)])
    for _ in range(20):
        views = store.batch_get_view(keys * 2)
        assert all(view.in_place for view in views)
        assert [bytes(view) for view in views] == [str(number).encode() for number in range(100)] * 2


def test_more_views_than_can_be_in_place_are_copies(store, key):
    store.put(key("a"), b"123")
    views = [store.get_view(key("a")) for _ in range(2000)]
    assert all(bytes(view) == b"123" for view in views)
    assert views[0].in_place
    assert not views[-1].in_place
    del views
    assert store.get_view(key("a")).in_place


def test_release_gives_memory_back(cluster, store, key):
    store.put(key("a"), b"x" * MIB)
    view = store.get_view(key("a"))
    store.remove(key("a"))
    view.release()
    view.release()
    for use in (
        lambda: bytes(view),
        lambda: memoryview(view),
        lambda: view.verify(),
        lambda: view.in_place,
        lambda: view.ptr(),
        lambda: np.from_dlpack(view),
        lambda: view.__array_interface__,
        lambda: view == b"",
    ):
        with pytest.raises(moontide.Closed, match="the view is closed"):
            use()
    assert len(view) == MIB


def test_release_while_lent_is_refused(either, key):
    either.put(key("a"), b"123")
    view = either.get_view(key("a"))
    lent = memoryview(view)
    with pytest.raises(BufferError, match="lent"):
        view.release()
    assert lent[0] == ord("1")
    lent.release()
    view.release()


def test_a_with_block_releases(either, key):
    either.put(key("a"), b"123")
    with either.get_view(key("a")) as view:
        assert bytes(view) == b"123"
    with pytest.raises(moontide.Closed):
        bytes(view)
    with either.get_view(key("a")) as view:
        kept = np.asarray(view)
    assert kept.tobytes() == b"123", "what was made from it outlives the block"


def test_a_with_block_passes_exceptions_on(store, key):
    store.put(key("a"), b"123")
    with pytest.raises(KeyError, match="mine"), store.get_view(key("a")):
        raise KeyError("mine")


def test_an_array_lets_go_of_a_view_at_once(store, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    before = sys.getrefcount(view)
    for make in (np.from_dlpack, np.asarray, memoryview, lambda view: np.frombuffer(view, "u1")):
        array = make(view)
        assert sys.getrefcount(view) > before
        del array
        assert sys.getrefcount(view) == before


def test_a_copy_through_dlpack_is_the_callers_own(store, key):
    store.put(key("a"), b"123")
    try:
        copy = np.from_dlpack(store.get_view(key("a")), copy=True)
    except BufferError:
        return
    copy[0] = 0
    assert store.get(key("a")) == b"123"


def test_dlpack_that_cannot_be_given_is_refused(store, key):
    store.put(key("a"), b"123")
    view = store.get_view(key("a"))
    assert view.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        view.__dlpack__()
    with pytest.raises(BufferError):
        view.__dlpack__(max_version=(0, 8))
    with pytest.raises(BufferError):
        view.__dlpack__(max_version=(1, 0), dl_device=(2, 0))
    # A capsule that nobody takes gives its part back by itself.
    view.__dlpack__(max_version=(1, 0))


def test_an_empty_view(either, key):
    either.put(key("a"), b"")
    view = either.get_view(key("a"))
    assert (len(view), bytes(view), view == b"") == (0, b"", True)
    assert np.asarray(view).shape == (0,)
    assert np.from_dlpack(view).shape == (0,)
    assert view.verify()


# --------------------------------------------------------------------------------------------- the interpreter's end

AT_EXIT = {
    "stores": "store = moontide.Store(master)",
    "views": "store = moontide.Store(master); store.put(k, b'1' * 999); views = [store.get_view(k) for _ in range(99)]",
    "views without their store": "views = [moontide.Store(master).get_view('never')]; store = moontide.Store(master); "
    "store.put(k, b'1'); views = [store.get_view(k)]; del store",
    "buffers": "store = moontide.Store(master); store.put(k, b'1'); lent = memoryview(store.get_view(k))",
    "arrays": "import numpy; store = moontide.Store(master); store.put_tensor(k, numpy.zeros(9)); "
    "arrays = [store.get_tensor(k).numpy(), numpy.from_dlpack(store.get_tensor(k)), numpy.asarray(store.get_view(k))]",
    "a cycle": "store = moontide.Store(master); store.put(k, b'1')\nclass Ring: pass\n"
    "ring = Ring(); ring.ring = ring; ring.store = store; ring.view = store.get_view(k)",
    "a dev cluster": "dev = moontide.dev(64 << 20); store = dev.store(); store.put(k, b'1'); view = store.get_view(k)",
    "a dev cluster, stores dropped last": "store = None; dev = moontide.dev(64 << 20); store = dev.store(); "
    "store.put(k, b'1'); view = store.get_view(k); dev.close()",
    "a thread in a call": "import threading, time; store = moontide.Store(master, deadline=1)\n"
    "def work():\n    while True: store.put(k, b'1' * 99999, overwrite=True); store.get(k)\n"
    "threading.Thread(target=work, daemon=True).start(); time.sleep(0.3)",
    "an async store": "import asyncio\n"
    "async def work():\n    global store, view\n    store = await moontide.AsyncStore.connect(master)\n"
    "    await store.put(k, b'1'); view = await store.get_view(k)\nasyncio.run(work())",
    "an async store that was closed": "import asyncio\n"
    "async def work():\n    async with await moontide.AsyncStore.connect(master) as store:\n"
    "        await store.put(k, b'1'); view = await store.get_view(k)\nasyncio.run(work())",
    "an async call that nobody waits for": "import asyncio\n"
    "async def work():\n    store = await moontide.AsyncStore.connect(master, local=False)\n"
    "    store.put(k, b'1' * 99999)\nasyncio.run(work())",
    "an exception": "store = moontide.Store(master)\n"
    "try: store.put('', b'')\nexcept moontide.Error as error: kept = error",
    "exit in a function": "def work():\n    store = moontide.Store(master); store.put(k, b'1')\n"
    "    view = store.get_view(k); sys.exit(0)\nwork()",
}


@pytest.mark.parametrize("what", AT_EXIT)
def test_a_program_may_end_with_anything_alive(python, key, what):
    # Threads that are in the way of the end are so only now and then.
    for number in range(5 if "async" in what or "thread" in what else 1):
        program = f"import sys, moontide\nmaster, k = sys.argv[1:]\n{AT_EXIT[what]}\n"
        ended = python(program, key(str(number)), seconds=20)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_module_that_is_imported_and_nothing_else():
    program = "import moontide"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
