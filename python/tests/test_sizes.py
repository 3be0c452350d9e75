"""Objects of every size, from empty to 1 GiB."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

import moontide

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def pattern(size: int) -> np.ndarray:
    """Returns bytes in which all pages differ."""
    words = np.arange((size + 7) // 8, dtype="<u8")
    words *= 0x9E3779B97F4A7C15
    return words.view("u1")[:size]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 1, MIB + 1, 9 * MIB])
def test_objects_of_many_sizes_round_trip(caller, key, size):
    content = pattern(size)
    assert caller.put(key("a"), content)
    assert caller.get(key("a")) == content.tobytes()
    space = np.zeros(size + 3, "u1")
    assert caller.get_into(key("a"), space) == size
    assert (space[:size] == content).all()
    assert not space[size:].any()
    view = caller.get_view(key("a"))
    assert bytes(view) == content.tobytes()
    assert caller.batch_get([key("a")]) == [content.tobytes()]
    cut = size // 3
    parts = [np.zeros(cut, "u1"), np.zeros(size - cut, "u1")]
    assert caller.get_into(key("a"), parts) == size
    assert (np.concatenate(parts) == content).all()


def check_huge(start, size: int) -> None:
    """Makes all calls with an object of this size, over shm and TCP."""
    cluster = start(nodes=1, memory=f"{size // MIB * 5 // 4 + 64}MiB", groups=1)
    content = pattern(size)

    def same(found) -> bool:
        # Compares eight bytes at a time, because the result has one byte per comparison.
        return len(found) == size and bool((np.frombuffer(found, "<u8") == content.view("<u8")).all())

    with (
        moontide.Store(cluster.master, timeout=60) as store,
        moontide.Store(cluster.master, timeout=60, shm=False) as remote,
    ):
        assert remote.put("huge", content)
        view = store.get_view("huge")
        assert view.zero_copy or store.stat("huge")["locations"][1:], "only striped objects are copied"
        assert same(view)
        assert view.verify()
        del view
        space = np.zeros(size, "u1")
        for each in (store, remote):
            space[:] = 0
            assert each.get_into("huge", space) == size
            assert same(space)
        del space
        assert same(remote.get("huge"))
        assert store.remove("huge")
        assert store.put("again", content)
        assert same(store.get("again"))


def test_256_mib_object_round_trips(own_cluster):
    check_huge(own_cluster, 256 * MIB)


@pytest.mark.slow
def test_1_gib_object_round_trips(own_cluster):
    available = int(re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) * KIB
    if available < 5 * GIB:
        pytest.skip(f"needs 5 GiB of free memory, there are {available // MIB} MiB")
    check_huge(own_cluster, GIB)


def test_object_larger_than_memory_is_rejected(own_cluster):
    cluster = own_cluster(memory="64MiB")
    with moontide.Store(cluster.master, timeout=4) as store:
        with pytest.raises((moontide.NoSpace, moontide.TooLarge)):
            store.put("a", bytes(65 * MIB))
        assert store.get("a") is None
        assert store.put("b", bytes(MIB)), "a failed put leaves nothing behind"


def test_eviction_frees_space_for_new_objects(own_cluster, seed):
    draw = random.Random(seed)
    cluster = own_cluster(memory="64MiB")
    with moontide.Store(cluster.master) as store:
        kept: dict[str, bytes] = {}
        for number in range(300):
            content = draw.randbytes(draw.randrange(1, 1 << 20))
            assert store.put(str(number), content)
            kept[str(number)] = content
        found = store.batch_get(list(kept))
        assert all(got is None or got == content for got, content in zip(found, kept.values(), strict=True))
        assert 10 < sum(got is not None for got in found) < 300
