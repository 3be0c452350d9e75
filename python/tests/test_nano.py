"""``moontide.nano``: ranks as processes that push pages to each other's memory, also if ranks are killed, are late, or
have no space. ``python/e2e/test_nano_kernels.py`` does the same with kernels."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nano_rank import Rank

import moontide
from moontide.nano import NanoKVCache, NOT_READY, Ticket

World = Callable[..., list[Rank]]


@pytest.fixture(params=["host", "cuda", "hip"])
def memory(request: pytest.FixtureRequest) -> str:
    """Memory of the records: of the host, or of a device of the fake driver (docs/devices.md)."""
    if request.param != "host" and "MOONTIDE_FAKE_DRIVER_LIB" not in os.environ:
        pytest.skip("MOONTIDE_FAKE_DRIVER_LIB is not set")
    return str(request.param)


@pytest.fixture
def world(memory: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Starts ranks, and ends them."""
    started: list[Rank] = []

    def start(ranks: int, **settings: Any) -> list[Rank]:
        path = tmp_path_factory.mktemp("n") / "w"
        if memory != "host":
            settings["device"] = memory
        started.extend(Rank(path, rank, ranks, **settings) for rank in range(ranks))
        assert [rank.receive() for rank in started] == ["ready"] * ranks
        return started

    yield start
    for rank in reversed(started):
        rank.end()


def test_four_ranks_read_objects_of_all_ranks(world: World) -> None:
    ranks = world(4)
    sizes = [1, 511, 64 << 10, 100_001, (256 << 10) + 3, 1 << 20]
    for number, rank in enumerate(ranks):
        code = """
            for at, size in enumerate(sizes):
                cache.put(f"{me}-{at}", noise(at + 10 * me, size), preferred_segment=(me + 1) % 4)
            out = sorted({cache.get_location(f"{me}-{at}").owner_rank for at in range(len(sizes))})
        """
        assert rank.run(code, me=number, sizes=sizes) == [(number + 1) % 4]
    for rank in ranks:
        code = """
            out = 0
            for other in range(4):
                for at, size in enumerate(sizes):
                    buffer = numpy.zeros(size, numpy.uint8)
                    cache.get_into(f"{other}-{at}", buffer)
                    out += bool((buffer == noise(at + 10 * other, size)).all())
        """
        assert rank.run(code, sizes=sizes) == 4 * len(sizes)
    assert len({tuple(rank.run("out = cache.bases")) for rank in ranks}) == 4, "two processes have the same addresses"


def test_consumer_waits_for_pages_in_flight(world: World) -> None:
    producer, consumer = world(2)
    code = """
        plan = cache.open_for_write("k", 700_001, preferred_segment=1)
        out = [packed(plan.ticket), plan.dst_rank, plan.n_pages, plan.last_page_bytes]
    """
    packed, rank, pages, last = producer.run(code)
    assert (rank, pages, last) == (1, 3, 700_001 - 2 * (256 << 10))
    waiting = """
        meta = cache.open_for_read(ticket_of(packed_ticket))
        out = [meta.ready, repr(cache.get_location("k"))]
        try:
            meta.wait(0.05)
        except moontide.DeadlineExceeded:
            out.append("late")
    """
    assert consumer.run(waiting, packed_ticket=packed) == [False, "NOT_READY", "late"]
    reading = """
        meta.wait(30)
        buffer = numpy.zeros(700_001, numpy.uint8)
        meta.copy_into(buffer)
        out = int(buffer.sum())
    """
    consumer.send(reading)
    expected = producer.run("value = noise(5, 700_001); plan.write(value); out = int(value.sum())")
    assert consumer.receive() == expected
    # The cache commits complete plans automatically.
    found = """
        import time
        deadline = time.monotonic() + 30
        while not (found := cache.get_location("k")) and time.monotonic() < deadline:
            time.sleep(0.001)
        out = [found.epoch == meta.epoch, found.payload_ptr == meta.payload_ptr]
        found.release(), meta.release()
    """
    assert consumer.run(found) == [True, True]
    assert producer.run('cache.commit("k"); out = cache.stats()["committed"]') == 1, "a second commit does nothing"


def test_pages_are_written_one_by_one_and_only_once(world: World) -> None:
    producer, consumer = world(2)
    code = """
        plan = cache.open_for_write("k", 600_000, preferred_segment=1)
        value = noise(4, 600_000)
        pages = [value[at : at + plan.page_bytes] for at in range(0, 600_000, plan.page_bytes)]
        plan.write_page(2, pages[2])
        out = [packed(plan.ticket), plan.complete]
        for wrong in ((2, pages[2]), (3, pages[0]), (1, pages[1][:-1])):
            try:
                plan.write_page(*wrong)
            except moontide.InvalidArgument:
                out.append("rejected")
    """
    packed, *results = producer.run(code)
    assert results == [False, "rejected", "rejected", "rejected"]
    expecting = "meta = cache.open_for_read(ticket_of(packed_ticket)); out = meta.ready"
    assert consumer.run(expecting, packed_ticket=packed) is False
    assert producer.run("plan.write_page(0, pages[0]); plan.write_page(1, pages[1]); out = plan.complete") is True
    code = """
        meta.wait(30)
        buffer = numpy.zeros(600_000, numpy.uint8)
        meta.copy_into(buffer)
        out = bool((buffer == noise(4, 600_000)).all())
    """
    assert consumer.run(code) is True


def test_memory_of_killed_producer_is_reclaimed_after_release(world: World) -> None:
    owner, producer, consumer = world(3)
    planning = """plan = cache.open_for_write("k", 1 << 20, preferred_segment=0); out = packed(plan.ticket)"""
    packed = producer.run(planning)
    opening = "meta = cache.open_for_read(ticket_of(packed_ticket)); out = meta.ready"
    assert consumer.run(opening, packed_ticket=packed) is False
    os.kill(producer.process.pid, signal.SIGKILL)
    producer.process.wait()
    gone = """
        try:
            meta.wait(60)
        except moontide.Gone:
            out = "gone"
    """
    assert consumer.run(gone) == "gone"
    used = """
        import time
        deadline = time.monotonic() + 60
        while (cache.stats()["bytes_used"] or cache.stats()["bytes_draining"] > limit) and time.monotonic() < deadline:
            time.sleep(0.01)
        out = [cache.stats()["bytes_used"], cache.stats()["bytes_draining"] > 0]
    """
    # The consumer still holds the record, so its memory is not reused yet.
    assert owner.run(used, limit=2 << 20) == [0, True]
    consumer.run("meta.release()")
    assert owner.run(used, limit=0) == [0, False]
    assert owner.run('cache.put("k", noise(1, 1000)); out = len(cache.store.get("k"))') == 1000


def test_write_plan_expires_after_write_timeout(world: World) -> None:
    producer, consumer = world(2, write_timeout=0.5)
    packed = producer.run("""plan = cache.open_for_write("k", 1000, preferred_segment=1); out = packed(plan.ticket)""")
    late = """
        meta = cache.open_for_read(ticket_of(packed_ticket))
        try:
            meta.wait(60)
        except moontide.Gone:
            out = "gone"
    """
    assert consumer.run(late, packed_ticket=packed) == "gone"
    # The writer still holds the claim, so it cannot write to memory of other records. The record does not become an
    # object.
    code = """
        import time
        time.sleep(0.1)
        plan.write(bytes(1000))
        try:
            cache.commit("k")
        except moontide.Gone:
            pass  # the cache may have counted the loss before
        out = [repr(cache.get_location("k")), cache.stats()["lost"]]
    """
    assert producer.run(code) == ["NOT_READY", 1]


def test_reused_slot_rejects_old_ticket(world: World) -> None:
    producer, consumer = world(2)
    code = """
        old = None
        slots, rejected = set(), 0
        for turn in range(60):
            plan = cache.open_for_write("k", 3000, preferred_segment=1)
            ticket = plan.ticket
            plan.write(noise(turn, 3000))
            cache.commit("k")
            buffer = numpy.zeros(3000, numpy.uint8)
            cache.get_into("k", buffer)
            assert (buffer == noise(turn, 3000)).all()
            slots.add((ticket.segment, ticket.slot))
            if old is not None:
                try:
                    cache.open_for_read(old).release()
                except moontide.Gone:
                    rejected += 1
            old = ticket
            assert cache.store.remove("k", force=True)
        out = [len(slots) < 60, rejected]
    """
    assert producer.run(code) == [True, 59]


def test_reads_during_eviction_return_whole_objects(world: World) -> None:
    # One rank puts four times the memory, while two ranks read all objects that they find.
    writer, *readers = world(3, heap_bytes=8 << 20)
    reading = """
        import random, time
        random.seed(me)
        seen = wrong = 0
        deadline = time.monotonic() + 60
        while cache.get_location("end") is NOT_READY and time.monotonic() < deadline:
            number = random.randrange(400)
            meta = cache.get_location(f"o{number}")
            if meta is NOT_READY:
                continue
            with meta:
                buffer = numpy.zeros(meta.bytes_total, numpy.uint8)
                meta.copy_into(buffer)
            seen += 1
            wrong += not (buffer == buffer[0]).all() or buffer[0] != number % 251
        out = [seen > 0, int(wrong)]
    """
    for number, reader in enumerate(readers):
        reader.send(reading, me=number)
    code = """
        for number in range(400):
            value = numpy.full(250_000 + number, number % 251, numpy.uint8)
            cache.put(f"o{number}", value, preferred_segment=number % 3)
        cache.put("end", b"x")
        out = sum(cache.get_location(f"o{number}") is NOT_READY for number in range(400)) > 200
    """
    assert writer.run(code) is True, "objects must be evicted"
    assert [reader.receive() for reader in readers] == [[True, 0], [True, 0]]


def test_evict_until_below_removes_oldest_objects_of_own_rank(world: World) -> None:
    owner, other = world(2, heap_bytes=16 << 20)
    code = """
        for number in range(12):
            cache.put(f"o{number}", bytes(1 << 20), preferred_segment=0)
        cache.put("elsewhere", bytes(1 << 20), preferred_segment=1)
        out = cache.stats()["bytes_used"] > 12 << 20
    """
    assert owner.run(code) is True
    code = """
        import time
        time.sleep(6)  # longer than the leases of readers
        cache.evict_until_below(0.5)
        left = [number for number in range(12) if cache.store.exists(f"o{number}")]
        out = [left, cache.store.exists("elsewhere"), cache.stats()["bytes_used"] <= 8 << 20]
    """
    left, elsewhere, below = owner.run(code)
    assert (elsewhere, below) == (True, True)
    assert left == list(range(12 - len(left), 12)), "the oldest are removed first"


def test_ordinary_store_shares_objects_with_nano(world: World, memory: str) -> None:
    first, second = world(2)
    master = first.run('cache.put("k", noise(1, 700_001), preferred_segment=1); out = cache.store.master')
    sent = first.run("out = noise(1, 700_001).tobytes().hex()")
    for shm in (True, False):
        with moontide.Store(master, shm=shm) as store:
            assert store.get("k") == bytes.fromhex(sent)
    if memory != "host":
        # No node has host memory for objects of an ordinary store.
        with moontide.Store(master, timeout=0.5) as store, pytest.raises(moontide.NoSpace):
            store.put("other", b"from a store")
        assert first.run("out = cache.store.stat('k')['locations'][0]['medium']") == "device"
        assert second.run("out = bytes(cache.store.get('k')) == noise(1, 700_001).tobytes()") is True
        return
    with moontide.Store(master) as store:
        store.put("other", b"from a store")
    code = """
        with cache.get_location("other") as meta:
            buffer = bytearray(meta.bytes_total)
            meta.copy_into(buffer)
        out = buffer.decode()
    """
    assert second.run(code) == "from a store"
    assert second.run('cache.remove("k"); out = repr(cache.get_location("k"))') == "NOT_READY"


def certificates(folder: Path) -> tuple[dict[str, str], list[dict[str, str]], dict[str, str]]:
    """Creates certificates of a cluster. Returns the settings of a client, of two nodes, and of a master."""
    certs = [moontide.binary(), "certs"]
    subprocess.run([*certs, "init", str(folder), "--cluster", "nano"], check=True)
    roles = ["master", "node/one", "node/two", "tenant/default"]
    subprocess.run([*certs, "issue", str(folder), *roles], check=True)

    def pair(part: str, key: Path) -> dict[str, str]:
        return {f"{part}cert": str(key).replace("-key.pem", ".pem"), f"{part}key": str(key)}

    client = {"ca": str(folder / "ca.pem")} | pair("", folder / "tenant-default-key.pem")
    nodes = [pair("node_", key) for key in sorted(folder.glob("node-*-key.pem"))]
    assert len(nodes) == 2
    return client, nodes, pair("master_", folder / "master-key.pem")


def test_ranks_with_certificates_refuse_clients_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, nodes, master = certificates(tmp_path / "certs")
    ranks = [Rank(tmp_path / "w", 0, 2, **client, **nodes[0], **master)]
    try:
        # One rank has its settings by name, the other by variables.
        with monkeypatch.context() as environment:
            for name, file in (client | nodes[1]).items():
                environment.setenv(f"MOONTIDE_{name.upper()}", file)
            ranks.append(Rank(tmp_path / "w", 1, 2))
        assert [rank.receive() for rank in ranks] == ["ready", "ready"]
        assert ranks[0].run("value = noise(1, 300_000); cache.put('k', value, preferred_segment=1); out = 'put'") == "put"
        code = """
            import time
            buffer = numpy.zeros(300_000, numpy.uint8)
            cache.get_into("k", buffer)
            out = [bool((buffer == noise(1, 300_000)).all()), cache.store.get("k") == buffer.tobytes()]
        """
        assert ranks[1].run(code) == [True, True]
        address = ranks[0].run("out = cache.store.master")
        with pytest.raises(moontide.Unreachable):
            moontide.Store(address, connect_timeout=5.0)
        with moontide.Store(address, **client) as store:
            assert len(store.get("k") or b"") == 300_000
    finally:
        for rank in reversed(ranks):
            rank.end()


def test_rank_with_a_certificate_for_its_client_only_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, nodes, _ = certificates(tmp_path / "certs")
    for name, file in client.items():
        monkeypatch.setenv(f"MOONTIDE_{name.upper()}", file)
    settings: dict[str, Any] = {"path": tmp_path / "w", "rank": 0, "ranks": 1}
    with pytest.raises(moontide.InvalidArgument, match="none for its node; set node_cert and node_key"):
        NanoKVCache(1 << 20, **settings)
    with pytest.raises(moontide.InvalidArgument, match="none for its master; set master_cert and master_key"):
        NanoKVCache(1 << 20, **settings, **nodes[0])
    with pytest.raises(moontide.InvalidArgument, match="cert"):
        NanoKVCache(1 << 20, **settings, cert="none")
    with NanoKVCache(1 << 20, **settings, ca="none", cert="none", key="none") as cache:
        cache.put("k", b"bytes")
        assert cache.store.get("k") == b"bytes"


def test_invalid_arguments_and_states_are_rejected(tmp_path: Path) -> None:
    with NanoKVCache(8 << 20, path=tmp_path / "w", rank=0, ranks=1) as cache:
        cache.put("k", b"x" * 1000)
        with pytest.raises(moontide.AlreadyExists):
            cache.put("k", b"x")
        with pytest.raises(moontide.InvalidArgument):
            cache.put("empty", b"")
        with pytest.raises(moontide.InvalidArgument):
            cache.put("r", b"x", preferred_segment=7)
        with pytest.raises(moontide.NotFound):
            cache.get("nothing", dst=bytearray(1))
        assert bytes(cache.get("k")) == b"x" * 1000
        with pytest.raises(moontide.InvalidArgument):
            cache.evict_until_below(30)
        with pytest.raises(moontide.InvalidArgument):
            cache.get_into("k", bytearray(999))
        with pytest.raises(moontide.TooLarge, match="more heap_bytes"):
            cache.open_for_write("large", 8 << 20)
        assert bytes(cache.get("k")) == b"x" * 1000, "nothing was evicted"
        cache.open_for_write("large", 7 << 20).abort()
        plan = cache.open_for_write("p", 1000)
        with pytest.raises(moontide.InProgress):
            cache.open_for_write("p", 1000)
        with pytest.raises(moontide.InvalidArgument):
            plan.write(bytes(999))
        with pytest.raises(moontide.InvalidArgument):
            cache.open_for_read(plan.ticket)  # this process writes the record
        with pytest.raises(moontide.NotReady):
            cache.commit("p")  # pages are missing
        assert plan.payload_ptr
        plan.abort()
        with pytest.raises(moontide.Closed):
            assert plan.payload_ptr
        with pytest.raises(moontide.Gone):
            cache.commit("p")
        with pytest.raises(moontide.Closed):
            plan.write(bytes(1000))
        with cache.open_for_write("w", 1000):
            pass  # not written: aborted at the end of the block
        with pytest.raises(KeyError), cache.open_for_write("x", 1000) as plan:
            plan.write(bytes(1000))
            raise KeyError
        with cache.open_for_write("v", 1000) as plan:
            plan.write(bytes(1000))
        cache.commit("v")
        assert len(cache.get("v")) == 1000
        meta = cache.get_location("k")
        assert meta is not NOT_READY
        good = meta.ticket  # type: ignore[union-attr]
        names = ("rank", "segment", "slot", "payload_offset", "bytes_total", "flag_offset")
        for at, name in zip((0, 1, 3, 5, 6, 8), names, strict=True):
            words = list(good._words())
            words[at] += 1 << 20
            with pytest.raises(moontide.Error):
                cache.open_for_read(Ticket(*words)).release()
                pytest.fail(f"wrong {name} was accepted")
        with pytest.raises(moontide.InvalidArgument):
            Ticket.from_bytes(b"short")
        assert Ticket.from_bytes(bytes(good)) == good
        assert len(bytes(good)) == struct.calcsize("<IIQIQQQQQ")
        meta.release()  # type: ignore[union-attr]
    cache.close()
    with pytest.raises(moontide.Closed):
        cache.open_for_write("late", 1)
    for wrong in ({"master_rank": 1}, {"page_bytes": 1000}, {"heap_bytes": 1000}, {"device": "npu:0"}):
        with pytest.raises(moontide.InvalidArgument):
            NanoKVCache(**({"heap_bytes": 8 << 20} | wrong), path=tmp_path / "v", rank=0, ranks=1)
    begun = time.monotonic()
    with pytest.raises(moontide.Error):
        NanoKVCache(8 << 20, path=tmp_path / "v", rank=1, ranks=2, timeout=0.3)
    assert time.monotonic() - begun < 20


def test_ticket_with_altered_bounds_is_rejected(world: World) -> None:
    producer, consumer = world(2)
    code = """
        cache.put("neighbour", noise(1, 100_000), preferred_segment=1)
        plan = cache.open_for_write("k", 1000, preferred_segment=1)
        out = packed(plan.ticket)
    """
    packed = producer.run(code)
    altered = """
        import dataclasses
        ticket = ticket_of(packed_ticket)
        out = []
        for changed in ({"bytes_total": 900_000}, {"payload_offset": ticket.payload_offset + 512}):
            try:
                cache.open_for_read(dataclasses.replace(ticket, **changed))
            except moontide.InvalidArgument:
                out.append("rejected")
    """
    assert consumer.run(altered, packed_ticket=packed) == ["rejected"] * 2, "while it is written"
    producer.run('plan.write(bytes(1000)); cache.commit("k")')
    assert consumer.run(altered, packed_ticket=packed) == ["rejected"] * 2, "when it is complete"


def test_open_for_read_in_writer_process_does_not_break_commits(tmp_path: Path) -> None:
    with NanoKVCache(16 << 20, path=tmp_path / "w", rank=0, ranks=1) as cache:
        for number in range(60):
            plan = cache.open_for_write(f"k{number}", 1000)
            stop = threading.Event()
            seen = []

            def poll(ticket: Ticket = plan.ticket, stop: threading.Event = stop, seen: list[bool] = seen) -> None:
                while not stop.is_set():
                    try:
                        with cache.open_for_read(ticket) as meta:
                            seen.append(meta.ready)
                    except moontide.InvalidArgument:
                        pass

            polling = threading.Thread(target=poll)
            polling.start()
            plan.write(bytes(1000))
            cache.commit(f"k{number}")
            stop.set()
            polling.join()
            assert all(seen)
        assert cache.stats()["lost"] == 0


def test_stale_cached_location_is_refreshed(world: World) -> None:
    first, second = world(2)
    first.run('cache.put("k", noise(1, 1000), preferred_segment=0); out = cache.get_location("k").bytes_total')
    read = 'buffer = bytearray(1000); cache.get_into("k", buffer); out = bytes(buffer) == noise(seed, 1000).tobytes()'
    assert second.run(read, seed=1) is True
    first.run('assert cache.store.remove("k", force=True); cache.put("k", noise(2, 1000), preferred_segment=1)')
    assert second.run(read, seed=2) is True, "the location of the first one was cached"
