"""The Triton kernels: run in the interpreter, in four processes over shared memory, and compiled for two GPUs.

The interpreter copies about 15 MB/s, so all sizes from 64 KiB to 8 MiB are tried, the large ones once. What it cannot
show is the order in which a GPU does things; for that there is the assembly, and ``python -m moontide.kernels.litmus``
for whoever has one.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from kernel_rank import bytes_of  # noqa: E402
from kernel_world import World, full_fence  # noqa: E402
from moontide.kernels import digest_on_cpu, layout  # noqa: E402

pytestmark = pytest.mark.short

KIB, MIB = 1 << 10, 1 << 20
READY, WRITING, DEAD, FREE = layout.READY, layout.WRITING, layout.DEAD, layout.FREE


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = World(Path(folder))
        yield made
        made.end()


def sha(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def test_no_two_processes_have_a_region_at_one_address(world: World) -> None:
    for region in zip(*world.bases, strict=True):
        assert len(set(region)) == len(world.ranks)


def test_the_interpreters_atomics_hold_between_processes(world: World) -> None:
    """Everything that is interpreted here rests on it."""
    world.cells[100] = 0
    for rank in world.ranks:
        rank.tell("add", times=500)
    for rank in world.ranks:
        rank.answer()
    assert world.cells[100] == 500 * len(world.ranks)


SIZES = [(64 * KIB, 128), (64 * KIB + 1, 256), (256 * KIB, 256), (256 * KIB + 15, 256), (MIB + 7, 128), (3 * MIB, 512)]


@pytest.mark.parametrize(("bytes_total", "page_kib"), [*SIZES, (8 * MIB - 3, 256)])
def test_what_one_process_pushes_another_reads(world: World, bytes_total: int, page_kib: int) -> None:
    record = world.record(owner=1, bytes_total=bytes_total, page_bytes=page_kib * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=bytes_total) == "PUBLISHED"
    assert world.is_published(record)
    assert int(world.flag(record)[2]) == 0, "no digest was asked for"
    world.set_header(0, record["epoch"], READY)
    seen = world.ranks[2].ask("read", record=record, slot=0)
    print(f"{bytes_total} bytes read in {seen['seconds']:.2f} s", end=" ")
    assert (seen["status"], seen["sha"]) == ("OK", sha(bytes_of(bytes_total, bytes_total)))
    assert world.cells[2] == 0


@pytest.mark.parametrize("tail", range(1, 16))
@pytest.mark.parametrize("off_by", [0, 3], ids=["aligned", "beside"])
def test_tails_are_copied_to_the_byte(world: World, tail: int, off_by: int) -> None:
    """The bytes behind the record stay as they are, at the owner and at the reader."""
    length = 128 * KIB + tail
    record = world.record(owner=3, bytes_total=length, page_bytes=128 * KIB)
    room = world.payload(record | {"bytes_total": length + 64})
    room[:] = 0xEE
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=tail, off_by=off_by, digest=True) == "PUBLISHED"
    assert sha(room[:length]) == sha(bytes_of(tail, length))
    assert (room[length:] == 0xEE).all()
    world.set_header(0, record["epoch"], READY)
    seen = world.ranks[1].ask("read", record=record, slot=0, off_by=off_by)
    assert (seen["status"], seen["sha"]) == ("OK", sha(bytes_of(tail, length)))
    assert seen["digest"] == int(world.flag(record)[2]) == digest_on_cpu(bytes_of(tail, length), 128 * KIB)


def test_a_record_of_one_byte(world: World) -> None:
    record = world.record(owner=0, bytes_total=1)
    world.begin(record)
    assert world.ranks[1].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.payload(record)[0] == bytes_of(1, 1)[0]


@pytest.mark.parametrize("turn", range(6))
def test_of_many_programs_exactly_one_publishes(world: World, turn: int) -> None:
    """Four processes push a quarter each, at once, with a program a page or fewer; one slot, epoch after epoch."""
    record = world.record(owner=turn % 4, bytes_total=31 * 128 * KIB + 1 + turn, page_bytes=128 * KIB)
    world.begin(record)
    programs = [None, 3, 1][turn % 3]
    for nth, rank in enumerate(world.ranks):
        rank.tell("push", record=record, seed=turn, first_page=8 * nth, pages=8, programs=programs, digest=True)
    found = [rank.answer() for rank in world.ranks]
    assert sorted(found) == ["PENDING", "PENDING", "PENDING", "PUBLISHED"]
    assert world.is_published(record)
    expected = bytes_of(turn, record["bytes_total"])
    assert sha(world.payload(record)) == sha(expected)
    assert int(world.flag(record)[2]) == digest_on_cpu(expected, 128 * KIB)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_pages_may_come_in_any_order(world: World, order: list[int]) -> None:
    record = world.record(owner=2, bytes_total=3 * 128 * KIB + 5, page_bytes=128 * KIB)
    world.begin(record)
    for nth, page in enumerate(order):
        assert not world.is_published(record)
        found = world.ranks[page].ask("push", record=record, seed=9, first_page=page, pages=1)
        assert found == ("PUBLISHED" if nth == 3 else "PENDING")
        missing = int(world.flag(record)[1])
        assert missing == layout.left(record["epoch"], 3 - nth)
    assert world.is_published(record)


STALE: dict[str, Callable[[int], tuple[int, int]]] = {
    "the slot went on": lambda epoch: (layout.word(epoch + 1, WRITING), layout.left(epoch + 1, 2)),
    "the low half of the epoch is the same": lambda e: (layout.word(e + (1 << 32), WRITING), layout.left(e, 2)),
    "it was published": lambda epoch: (layout.word(epoch, READY), layout.left(epoch, 0)),
    "it was killed": lambda epoch: (layout.word(epoch, DEAD), layout.left(epoch, 2)),
    "nothing was begun": lambda epoch: (0, 0),
}


@pytest.mark.parametrize("case", STALE)
def test_a_stale_push_touches_nothing(world: World, case: str) -> None:
    record = world.record(owner=1, bytes_total=256 * KIB + 1)
    flag, payload = world.flag(record), world.payload(record)
    payload[:] = 0xEE
    flag[:] = 0
    flag[:2] = STALE[case](record["epoch"])
    before = flag.copy()
    assert world.ranks[0].ask("push", record=record, seed=1, digest=True) == "STALE"
    assert (flag == before).all()
    assert (payload == 0xEE).all()


@pytest.mark.parametrize("missing", [layout.left(5, 2), layout.left(0, 0)], ids=["another epoch", "too few"])
def test_what_turns_stale_while_it_copies_is_not_counted(world: World, missing: int) -> None:
    """The word still says WRITING, but the counter is another record's, or expects fewer pages than were pushed."""
    record = world.record(owner=1, bytes_total=256 * KIB + 1)
    world.begin(record)
    low = layout.left(record["epoch"], 0) if missing == 0 else 0
    world.flag(record)[1] = low | missing
    assert world.ranks[0].ask("push", record=record, seed=1) == "STALE"
    assert int(world.flag(record)[1]) == low | missing
    assert int(world.flag(record)[0]) == layout.word(record["epoch"], WRITING)


def test_a_page_that_is_pushed_again_after_publishing_changes_nothing(world: World) -> None:
    record = world.record(owner=1, bytes_total=2 * 256 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.ranks[3].ask("push", record=record, seed=2, first_page=1) == "STALE"
    assert world.is_published(record)
    assert sha(world.payload(record)) == sha(bytes_of(1, record["bytes_total"]))


def test_a_wait_ends_when_another_process_publishes(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    world.ranks[2].tell("wait", record=record, slot=0, looks=100_000)
    time.sleep(0.3)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.ranks[2].answer() == "OK"


def test_a_wait_is_bounded(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[2].ask("wait", record=record, slot=0, looks=50) == "TIMED_OUT"
    assert world.ranks[2].ask("wait", record=record, slot=0, looks=0) == "TIMED_OUT"


GONE = [(0, DEAD), (0, FREE), (1, WRITING), (1, READY), (1, FREE), (1 << 32, READY)]


@pytest.mark.parametrize(("later", "state"), GONE)
def test_a_wait_ends_when_the_slot_is_gone(world: World, later: int, state: int) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    world.ranks[2].tell("wait", record=record, slot=0, looks=100_000)
    time.sleep(0.05)
    world.set_header(0, record["epoch"] + later, state)
    assert world.ranks[2].answer() == "GONE"


def test_a_commit_that_shuts_the_word_for_a_moment_is_no_loss(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    world.set_header(0, record["epoch"], DEAD)
    assert world.ranks[2].ask("wait", record=record, slot=0, looks=1) == "OK"
    # Whether it may be read is another question.
    assert world.ranks[2].ask("read", record=record, slot=0)["status"] == "MISS"


def test_acquire_copy_release(world: World) -> None:
    record = world.record(owner=1, bytes_total=700 * KIB + 9)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=4, digest=True) == "PUBLISHED"
    world.set_header(7, record["epoch"], READY)
    reader, epoch = world.ranks[3], record["epoch"]
    assert reader.ask("acquire", slot=7, epoch=epoch) == "OK"
    assert world.cells[3] == 8, "the name of slot 7"
    # Killed now, it drains: what was pinned is still read.
    world.set_header(7, epoch, DEAD)
    for programs, off_by in ((None, 0), (1, 0), (2, 5)):
        seen = reader.ask("copy", record=record, programs=programs, off_by=off_by)
        assert seen["sha"] == sha(bytes_of(4, record["bytes_total"]))
        assert seen["digest"] == int(world.flag(record)[2])
    assert world.cells[3] == 8
    reader.ask("release", slot=7)
    assert world.cells[3] == 0


@pytest.mark.parametrize(("later", "state"), [(0, DEAD), (0, WRITING), (0, FREE), (1, READY), (-1, READY)])
def test_a_refused_acquire_leaves_nothing_behind(world: World, later: int, state: int) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.set_header(7, record["epoch"] + later, state)
    world.payload(record)[:] = 0xEE
    reader = world.ranks[3]
    assert reader.ask("acquire", slot=7, epoch=record["epoch"]) == "MISS"
    assert world.cells[3] == 0
    # The calls that follow in the stream do nothing.
    assert reader.ask("copy", record=record)["sha"] == sha(np.zeros(64 * KIB, np.uint8))
    world.cells[3] = 99
    reader.ask("release", slot=7)
    assert world.cells[3] == 99, "it was not ours to clear"
    world.cells[3] = 0
    late = "TIMED_OUT" if (later, state) == (0, WRITING) else "MISS"
    assert reader.ask("read", record=record, slot=7, looks=3)["status"] == late
    assert world.cells[3] == 0


def test_a_read_waits_for_the_commit(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    world.ranks[2].tell("read", record=record, slot=0, looks=100_000)
    time.sleep(0.1)
    assert world.cells[2] == 0, "who waits pins nothing"
    world.set_header(0, record["epoch"], READY)
    assert world.ranks[2].answer()["status"] == "OK"


def kill_while_others_read(world: World, seconds: float, checked: bool) -> tuple[list[dict[str, int]], int, int]:
    """An owner that publishes, kills, scans and scribbles over what it freed. Returns what readers found, how many
    versions there were, and how many of them were found pinned."""
    slot, length = 5, 64 * KIB
    record = world.record(owner=0, bytes_total=length)
    payload = world.payload(record)
    dice = random.Random(1)
    world.set_header(slot, record["epoch"], FREE)
    for rank in world.ranks[1:3]:
        rank.tell("read_many", record=record, slot=slot, seconds=seconds, checked=checked)
    versions = pinned = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        world.epoch += 1
        epoch = world.epoch
        payload[:] = epoch % 251 + 1
        world.set_header(slot, epoch, READY)
        time.sleep(dice.choice([0.002, 0.02, 0.06]))
        world.set_header(slot, epoch, DEAD)
        full_fence()
        was_pinned = False
        drained_by = time.monotonic() + 20
        while (world.cells[:4] == slot + 1).any():
            was_pinned = True
            assert time.monotonic() < drained_by, "a reader keeps its pin"
        payload[:] = 0
        world.set_header(slot, epoch, FREE)
        versions, pinned = versions + 1, pinned + was_pinned
    return [rank.answer() for rank in world.ranks[1:3]], versions, pinned


def test_nothing_is_freed_under_a_cell(world: World) -> None:
    found, versions, pinned = kill_while_others_read(world, 6, checked=True)
    print(f"{versions} versions, {pinned} of them pinned when they were killed; {found}", end=" ")
    assert sum(reader["torn"] for reader in found) == 0
    assert sum(reader["ok"] for reader in found) > 5 and sum(reader["miss"] for reader in found) > 5
    assert pinned > 0


def test_a_reader_that_does_not_check_the_word_is_caught(world: World) -> None:
    """So the test above sees what it looks for."""
    found, _, _ = kill_while_others_read(world, 4, checked=False)
    print(found, end=" ")
    assert 0 < sum(reader["torn"] for reader in found) < sum(reader["ok"] for reader in found)


def test_a_digest_finds_what_happens_to_pages() -> None:
    page_bytes = 128 * KIB
    payload = bytes_of(3, 3 * page_bytes + 11)
    good = digest_on_cpu(payload, page_bytes)
    dice = random.Random(2)
    for _ in range(50):
        bad = payload.copy()
        bad[dice.randrange(bad.size)] ^= 1 << dice.randrange(8)
        assert digest_on_cpu(bad, page_bytes) != good
    exchanged = payload.copy()
    exchanged[:page_bytes], exchanged[page_bytes : 2 * page_bytes] = (
        payload[page_bytes : 2 * page_bytes],
        payload[:page_bytes],
    )
    assert digest_on_cpu(exchanged, page_bytes) != good
    assert digest_on_cpu(payload[:-1], page_bytes) != good
    zeros = [digest_on_cpu(np.zeros(length, np.uint8), page_bytes) for length in (1, 2, 8, 9, 16, page_bytes + 1)]
    assert len(set(zeros)) == len(zeros)


def test_a_reader_notices_a_flipped_bit(world: World) -> None:
    record = world.record(owner=1, bytes_total=300 * KIB + 3)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=8, digest=True) == "PUBLISHED"
    world.set_header(0, record["epoch"], READY)
    expected = int(world.flag(record)[2])
    assert expected == digest_on_cpu(bytes_of(8, record["bytes_total"]), record["page_bytes"])
    assert world.ranks[2].ask("read", record=record, slot=0)["digest"] == expected
    for at in (0, 256 * KIB, record["bytes_total"] - 1):
        world.payload(record)[at] ^= 0x10
        assert world.ranks[2].ask("read", record=record, slot=0)["digest"] != expected
        world.payload(record)[at] ^= 0x10


def test_litmus_runs_in_the_interpreter() -> None:
    words = [sys.executable, "-m", "moontide.kernels.litmus", "--backend", "interpreter", "--rounds", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["mp", "sb", "sb-unfenced"]


def test_without_triton_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['triton'] = None\nimport moontide.kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: moontide.kernels needs numpy, torch and triton: pip install 'moontide[kernels]'" in done.stderr


def test_a_record_that_cannot_be_is_refused() -> None:
    good = {"owner": 0, "payload_offset": 512, "flag_offset": 64, "bytes_total": 1, "epoch": 1}
    layout.Record(**good)
    places = [("payload_offset", 8), ("flag_offset", 8), ("owner", -1)]
    for name, value in [*places, ("bytes_total", 0), ("page_bytes", 4096), ("epoch", 0), ("epoch", 1 << 62)]:
        with pytest.raises(ValueError):
            layout.Record(**(good | {name: value}))


# What was compiled.


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By target and kernel, without directives and comments."""
    folder = tmp_path_factory.mktemp("kernels") / "assembly"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder.parent / "cache")
    script = Path(__file__).with_name("compile_kernels.py")
    subprocess.run([sys.executable, str(script), str(folder)], env=environment, check=True, timeout=300)

    def read(file: Path) -> str:
        bare = (re.sub(r"(//|;;|; %).*", "", line) for line in file.read_text().splitlines())
        lines = (" ".join(line.split()) for line in bare)
        return "\n".join(line for line in lines if line and not line.startswith((".loc", ";")))

    return {target.name: {file.stem: read(file) for file in target.iterdir()} for target in folder.iterdir()}


EVERY_KERNEL = ["acquire", "copy", "mp", "push", "read", "release", "sb", "sb-unfenced", "wait"]


def test_every_kernel_is_compiled_for_both(assembly: dict[str, dict[str, str]]) -> None:
    for target in ("sm_90", "gfx942"):
        assert set(EVERY_KERNEL) <= set(assembly[target])


# Atomics of kernels, in order, as `operation ordering`. Triton writes the ordering in front of the scope for CAS, and
# behind it for the rest.
SM_90_ATOMICS = {
    "push": ["cas acq_rel", "cas acq_rel", "cas release"],
    "acquire": ["exch acq_rel", "exch release"],
    "release": ["exch release"],
    "read": ["exch acq_rel", "exch release", "exch release"],
    "wait": [],
    "copy": [],
    "sb": ["exch release", "exch acq_rel", "exch release"],
}


@pytest.mark.parametrize("kernel", SM_90_ATOMICS)
def test_ptx_has_the_atomics_at_system_scope(assembly: dict[str, dict[str, str]], kernel: str) -> None:
    ptx = assembly["sm_90"][kernel]
    found = re.findall(r"atom\.global\.(?:sys\.(acq_rel|release)|(acq_rel|release)\.sys)\.(cas|exch)\.b64", ptx)
    assert [f"{operation} {one or other}" for one, other, operation in found] == SM_90_ATOMICS[kernel]
    # Beside them there are only those for this process: the status, and sums.
    rest = [line for line in ptx.splitlines() if "atom." in line and ".sys." not in line]
    assert all(".gpu.relaxed." in line for line in rest), rest


def test_ptx_adds_digests_relaxed_at_system_scope(assembly: dict[str, dict[str, str]]) -> None:
    assert "atom.global.sys.relaxed.add.u64" in assembly["sm_90"]["push-digest"]
    assert "relaxed.add" not in assembly["sm_90"]["push"]


def test_ptx_fences_between_the_cell_and_the_word(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("acquire", "read", "sb"):
        calm = r"(?:(?!atom\.|ld\.acquire).)*?"
        steps = [r"acq_rel\.exch\.b64", r"bar\.sync", r"fence\.sc\.sys;", r"ld\.acquire\.sys\.global\.b64"]
        assert re.search(calm.join(steps), assembly["sm_90"][kernel], re.S), kernel
    assert "fence.sc.sys" not in assembly["sm_90"]["sb-unfenced"]


def test_ptx_loads_words_by_acquire_and_never_writes_them(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("push", "wait", "acquire", "read"):
        assert "ld.acquire.sys.global.b64" in assembly["sm_90"][kernel]
    assert "atom." not in assembly["sm_90"]["wait"]


VECTORS = {
    "sm_90": (r"ld\.global\.(v4\.b32|v2\.b64)", r"st\.global\.(v4\.b32|v2\.b64)"),
    "gfx942": ("global_load_dwordx4", "global_store_dwordx4"),
}


@pytest.mark.parametrize("target", VECTORS)
@pytest.mark.parametrize("kernel", ["push", "push-digest", "copy", "copy-digest", "read", "read-digest"])
def test_pages_are_copied_in_vectors_of_16_bytes(assembly: dict[str, dict[str, str]], target: str, kernel: str) -> None:
    for pattern in VECTORS[target]:
        assert re.search(pattern, assembly[target][kernel])


def test_no_vectors_where_the_source_is_not_aligned(assembly: dict[str, dict[str, str]]) -> None:
    for target, (load, store) in VECTORS.items():
        for kernel in ("push-narrow", "copy-narrow", "read-narrow"):
            assert not re.search(load, assembly[target][kernel]) and not re.search(store, assembly[target][kernel])


FENCE = r"buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt\(0\) lgkmcnt\(0\)\nbuffer_inv sc0 sc1"
LOOK = r"global_load_dwordx2 v\[\d+:\d+\], v\[\d+:\d+\], off sc0 sc1\ns_waitcnt vmcnt\(0\)\nbuffer_inv sc0 sc1"
SETTLE = r"buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt\(0\) lgkmcnt\(0\)\nv_mov"


def test_gcn_fences_between_the_cell_and_the_word(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("acquire", "read", "sb"):
        calm = r"(?:(?!global_atomic|global_load).)*?"
        pattern = r"global_atomic_swap_x2 [^\n]* sc1\n" + calm + "s_barrier" + calm + FENCE + calm + LOOK
        assert re.search(pattern, assembly["gfx942"][kernel], re.S), kernel
    assert re.search(FENCE, assembly["gfx942"]["copy"])


RELEASING = ["push", "push-narrow", "push-digest", "release", "read", "read-digest", "acquire", "mp"]


@pytest.mark.parametrize("kernel", RELEASING)
def test_gcn_waits_in_every_wave_before_a_release(assembly: dict[str, dict[str, str]], kernel: str) -> None:
    """Failure: LLVM leaves out the wait between the write-back and the atomic, and a barrier waits for no stores.
    Fix: ``order.settle``, in front of the barrier that is in front of the atomic."""
    calm = r"(?:(?!global_load|global_store|global_atomic).)*?"
    release = r"buffer_wbl2 sc0 sc1\n(?:s_waitcnt[^\n]*\n)?global_atomic_(cmp)?swap_x2"
    assert re.search(calm.join([SETTLE, "s_barrier", release]), assembly["gfx942"][kernel], re.S)


@pytest.mark.parametrize("kernel", ["push", "acquire", "read", "release", "sb", "mp"])
def test_gcn_atomics_are_at_system_scope(assembly: dict[str, dict[str, str]], kernel: str) -> None:
    lines = assembly["gfx942"][kernel].splitlines()
    atomics = [nth for nth, line in enumerate(lines) if re.match(r"global_atomic_(cmp)?swap_x2", line)]
    assert atomics
    for nth in atomics:
        assert lines[nth].endswith("sc1"), lines[nth]
        assert any(line == "buffer_wbl2 sc0 sc1" for line in lines[nth - 3 : nth]), lines[nth - 3 : nth + 1]
    acquiring = [nth for nth in atomics if "buffer_inv sc0 sc1" in lines[nth : nth + 3]]
    assert (len(acquiring) > 0) == (kernel in ("push", "acquire", "read", "sb"))
