"""The Triton kernels: run in the interpreter, in four processes over shared memory, and compiled for two GPUs.

The interpreter copies about 15 MB/s, so the tests cover sizes from 64 KiB to 8 MiB, the large ones once. It cannot test
the memory ordering of a GPU. For that the tests check the assembly, and ``python -m moontide.kernels.litmus`` runs on a
GPU.
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


def test_region_base_addresses_differ_between_processes(world: World) -> None:
    for region in zip(*world.bases, strict=True):
        assert len(set(region)) == len(world.ranks)


def test_interpreter_atomics_work_across_processes(world: World) -> None:
    """All other tests in the interpreter rely on it."""
    world.cells[100] = 0
    for rank in world.ranks:
        rank.send("add", times=500)
    for rank in world.ranks:
        rank.receive()
    assert world.cells[100] == 500 * len(world.ranks)


SIZES = [(64 * KIB, 128), (64 * KIB + 1, 256), (256 * KIB, 256), (256 * KIB + 15, 256), (MIB + 7, 128), (3 * MIB, 512)]


@pytest.mark.parametrize(("bytes_total", "page_kib"), [*SIZES, (8 * MIB - 3, 256)])
def test_pushed_record_is_readable_from_another_process(world: World, bytes_total: int, page_kib: int) -> None:
    record = world.record(owner=1, bytes_total=bytes_total, page_bytes=page_kib * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=bytes_total) == "PUBLISHED"
    assert world.is_published(record)
    assert int(world.flag(record)[2]) == 0, "the push has no digest"
    world.set_header(0, record["epoch"], READY)
    seen = world.ranks[2].ask("read", record=record, slot=0)
    print(f"{bytes_total} bytes read in {seen['seconds']:.2f} s", end=" ")
    assert (seen["status"], seen["sha"]) == ("OK", sha(bytes_of(bytes_total, bytes_total)))
    assert world.cells[2] == 0


@pytest.mark.parametrize("tail", range(1, 16))
@pytest.mark.parametrize("misalignment", [0, 3], ids=["aligned", "misaligned"])
def test_unaligned_tail_is_copied_without_overrun(world: World, tail: int, misalignment: int) -> None:
    """The bytes behind the record do not change, neither at the owner nor at the reader."""
    length = 128 * KIB + tail
    record = world.record(owner=3, bytes_total=length, page_bytes=128 * KIB)
    memory = world.payload(record | {"bytes_total": length + 64})
    memory[:] = 0xEE
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=tail, misalignment=misalignment, digest=True) == "PUBLISHED"
    assert sha(memory[:length]) == sha(bytes_of(tail, length))
    assert (memory[length:] == 0xEE).all()
    world.set_header(0, record["epoch"], READY)
    seen = world.ranks[1].ask("read", record=record, slot=0, misalignment=misalignment)
    assert (seen["status"], seen["sha"]) == ("OK", sha(bytes_of(tail, length)))
    assert seen["digest"] == int(world.flag(record)[2]) == digest_on_cpu(bytes_of(tail, length), 128 * KIB)


def test_one_byte_record_is_published(world: World) -> None:
    record = world.record(owner=0, bytes_total=1)
    world.begin(record)
    assert world.ranks[1].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.payload(record)[0] == bytes_of(1, 1)[0]


@pytest.mark.parametrize("turn", range(6))
def test_exactly_one_of_concurrent_pushers_publishes(world: World, turn: int) -> None:
    """Four processes push a quarter each concurrently, with one program per page or fewer; one slot, many epochs."""
    record = world.record(owner=turn % 4, bytes_total=31 * 128 * KIB + 1 + turn, page_bytes=128 * KIB)
    world.begin(record)
    programs = [None, 3, 1][turn % 3]
    for nth, rank in enumerate(world.ranks):
        rank.send("push", record=record, seed=turn, first_page=8 * nth, pages=8, programs=programs, digest=True)
    found = [rank.receive() for rank in world.ranks]
    assert sorted(found) == ["PENDING", "PENDING", "PENDING", "PUBLISHED"]
    assert world.is_published(record)
    expected = bytes_of(turn, record["bytes_total"])
    assert sha(world.payload(record)) == sha(expected)
    assert int(world.flag(record)[2]) == digest_on_cpu(expected, 128 * KIB)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_pages_can_be_pushed_in_any_order(world: World, order: list[int]) -> None:
    record = world.record(owner=2, bytes_total=3 * 128 * KIB + 5, page_bytes=128 * KIB)
    world.begin(record)
    for nth, page in enumerate(order):
        assert not world.is_published(record)
        found = world.ranks[page].ask("push", record=record, seed=9, first_page=page, pages=1)
        assert found == ("PUBLISHED" if nth == 3 else "PENDING")
        missing = int(world.flag(record)[1])
        assert missing == layout.pages_left(record["epoch"], 3 - nth)
    assert world.is_published(record)


STALE: dict[str, Callable[[int], tuple[int, int]]] = {
    "the slot was reused": lambda epoch: (layout.word(epoch + 1, WRITING), layout.pages_left(epoch + 1, 2)),
    "the low half of the epoch is the same": lambda e: (layout.word(e + (1 << 32), WRITING), layout.pages_left(e, 2)),
    "it was published": lambda epoch: (layout.word(epoch, READY), layout.pages_left(epoch, 0)),
    "it was killed": lambda epoch: (layout.word(epoch, DEAD), layout.pages_left(epoch, 2)),
    "nothing was written": lambda epoch: (0, 0),
}


@pytest.mark.parametrize("case", STALE)
def test_stale_push_leaves_flag_and_payload_unchanged(world: World, case: str) -> None:
    record = world.record(owner=1, bytes_total=256 * KIB + 1)
    flag, payload = world.flag(record), world.payload(record)
    payload[:] = 0xEE
    flag[:] = 0
    flag[:2] = STALE[case](record["epoch"])
    before = flag.copy()
    assert world.ranks[0].ask("push", record=record, seed=1, digest=True) == "STALE"
    assert (flag == before).all()
    assert (payload == 0xEE).all()


@pytest.mark.parametrize(
    "missing", [layout.pages_left(5, 2), layout.pages_left(0, 0)], ids=["another epoch", "too few"]
)
def test_push_stale_after_copy_leaves_page_counter_unchanged(world: World, missing: int) -> None:
    """The word is still WRITING, but the counter belongs to another record, or expects fewer pages than were pushed."""
    record = world.record(owner=1, bytes_total=256 * KIB + 1)
    world.begin(record)
    low = layout.pages_left(record["epoch"], 0) if missing == 0 else 0
    world.flag(record)[1] = low | missing
    assert world.ranks[0].ask("push", record=record, seed=1) == "STALE"
    assert int(world.flag(record)[1]) == low | missing
    assert int(world.flag(record)[0]) == layout.word(record["epoch"], WRITING)


def test_repeated_push_after_publish_is_stale(world: World) -> None:
    record = world.record(owner=1, bytes_total=2 * 256 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.ranks[3].ask("push", record=record, seed=2, first_page=1) == "STALE"
    assert world.is_published(record)
    assert sha(world.payload(record)) == sha(bytes_of(1, record["bytes_total"]))


def test_wait_ends_when_another_process_publishes(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    world.ranks[2].send("wait", record=record, slot=0, polls_max=100_000)
    time.sleep(0.3)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    assert world.ranks[2].receive() == "OK"


def test_wait_times_out_after_polls_max(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[2].ask("wait", record=record, slot=0, polls_max=50) == "TIMED_OUT"
    assert world.ranks[2].ask("wait", record=record, slot=0, polls_max=0) == "TIMED_OUT"


GONE = [(0, DEAD), (0, FREE), (1, WRITING), (1, READY), (1, FREE), (1 << 32, READY)]


@pytest.mark.parametrize(("later", "state"), GONE)
def test_wait_returns_gone_when_slot_is_dead_free_or_reused(world: World, later: int, state: int) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    world.ranks[2].send("wait", record=record, slot=0, polls_max=100_000)
    time.sleep(0.05)
    world.set_header(0, record["epoch"] + later, state)
    assert world.ranks[2].receive() == "GONE"


def test_wait_succeeds_for_published_record_while_word_is_dead(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    world.set_header(0, record["epoch"], DEAD)
    assert world.ranks[2].ask("wait", record=record, slot=0, polls_max=1) == "OK"
    # The bytes must still not be read.
    assert world.ranks[2].ask("read", record=record, slot=0)["status"] == "MISS"


def test_acquired_record_can_be_copied_after_kill(world: World) -> None:
    record = world.record(owner=1, bytes_total=700 * KIB + 9)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=4, digest=True) == "PUBLISHED"
    world.set_header(7, record["epoch"], READY)
    reader, epoch = world.ranks[3], record["epoch"]
    assert reader.ask("acquire", slot=7, epoch=epoch) == "OK"
    assert world.cells[3] == 8, "the cell contains the name of slot 7"
    # After the kill the slot drains: the pinned record is still readable.
    world.set_header(7, epoch, DEAD)
    for programs, misalignment in ((None, 0), (1, 0), (2, 5)):
        seen = reader.ask("copy", record=record, programs=programs, misalignment=misalignment)
        assert seen["sha"] == sha(bytes_of(4, record["bytes_total"]))
        assert seen["digest"] == int(world.flag(record)[2])
    assert world.cells[3] == 8
    reader.ask("release", slot=7)
    assert world.cells[3] == 0


@pytest.mark.parametrize(("later", "state"), [(0, DEAD), (0, WRITING), (0, FREE), (1, READY), (-1, READY)])
def test_failed_acquire_leaves_cell_and_destination_unchanged(world: World, later: int, state: int) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.set_header(7, record["epoch"] + later, state)
    world.payload(record)[:] = 0xEE
    reader = world.ranks[3]
    assert reader.ask("acquire", slot=7, epoch=record["epoch"]) == "MISS"
    assert world.cells[3] == 0
    # The following calls in the stream do nothing.
    assert reader.ask("copy", record=record)["sha"] == sha(np.zeros(64 * KIB, np.uint8))
    world.cells[3] = 99
    reader.ask("release", slot=7)
    assert world.cells[3] == 99, "release without a pin does not clear the cell"
    world.cells[3] = 0
    late = "TIMED_OUT" if (later, state) == (0, WRITING) else "MISS"
    assert reader.ask("read", record=record, slot=7, polls_max=3)["status"] == late
    assert world.cells[3] == 0


def test_read_waits_for_commit_without_pinning(world: World) -> None:
    record = world.record(owner=1, bytes_total=64 * KIB)
    world.begin(record)
    assert world.ranks[0].ask("push", record=record, seed=1) == "PUBLISHED"
    world.ranks[2].send("read", record=record, slot=0, polls_max=100_000)
    time.sleep(0.1)
    assert world.cells[2] == 0, "a waiting reader pins nothing"
    world.set_header(0, record["epoch"], READY)
    assert world.ranks[2].receive()["status"] == "OK"


def kill_while_others_read(world: World, seconds: float, checked: bool) -> tuple[list[dict[str, int]], int, int]:
    """Runs an owner that publishes, kills, scans, and overwrites freed memory. Returns the results of the readers, the
    number of versions, and how many of them were pinned when they were killed."""
    slot, length = 5, 64 * KIB
    record = world.record(owner=0, bytes_total=length)
    payload = world.payload(record)
    rng = random.Random(1)
    world.set_header(slot, record["epoch"], FREE)
    for rank in world.ranks[1:3]:
        rank.send("read_many", record=record, slot=slot, seconds=seconds, checked=checked)
    versions = pinned = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        world.epoch += 1
        epoch = world.epoch
        payload[:] = epoch % 251 + 1
        world.set_header(slot, epoch, READY)
        time.sleep(rng.choice([0.002, 0.02, 0.06]))
        world.set_header(slot, epoch, DEAD)
        full_fence()
        was_pinned = False
        drained_by = time.monotonic() + 20
        while (world.cells[:4] == slot + 1).any():
            was_pinned = True
            assert time.monotonic() < drained_by, "a reader does not release its pin"
        payload[:] = 0
        world.set_header(slot, epoch, FREE)
        versions, pinned = versions + 1, pinned + was_pinned
    return [rank.receive() for rank in world.ranks[1:3]], versions, pinned


def test_slot_is_not_freed_while_a_cell_pins_it(world: World) -> None:
    found, versions, pinned = kill_while_others_read(world, 6, checked=True)
    print(f"{versions} versions, {pinned} of them pinned when they were killed; {found}", end=" ")
    assert sum(reader["torn"] for reader in found) == 0
    assert sum(reader["ok"] for reader in found) > 5 and sum(reader["miss"] for reader in found) > 5
    assert pinned > 0


def test_mutation_read_without_word_check_is_detected(world: World) -> None:
    """The previous test detects torn reads."""
    found, _, _ = kill_while_others_read(world, 4, checked=False)
    print(found, end=" ")
    assert 0 < sum(reader["torn"] for reader in found) < sum(reader["ok"] for reader in found)


def test_digest_detects_bit_flips_swapped_pages_and_truncation() -> None:
    page_bytes = 128 * KIB
    payload = bytes_of(3, 3 * page_bytes + 11)
    good = digest_on_cpu(payload, page_bytes)
    rng = random.Random(2)
    for _ in range(50):
        bad = payload.copy()
        bad[rng.randrange(bad.size)] ^= 1 << rng.randrange(8)
        assert digest_on_cpu(bad, page_bytes) != good
    swapped = payload.copy()
    swapped[:page_bytes], swapped[page_bytes : 2 * page_bytes] = (
        payload[page_bytes : 2 * page_bytes],
        payload[:page_bytes],
    )
    assert digest_on_cpu(swapped, page_bytes) != good
    assert digest_on_cpu(payload[:-1], page_bytes) != good
    zeros = [digest_on_cpu(np.zeros(length, np.uint8), page_bytes) for length in (1, 2, 8, 9, 16, page_bytes + 1)]
    assert len(set(zeros)) == len(zeros)


def test_flipped_bit_changes_digest_of_read(world: World) -> None:
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
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["mp", "sb", "sb-unfenced"]


def test_import_without_triton_names_pip_extra() -> None:
    code = "import sys; sys.modules['triton'] = None\nimport moontide.kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: moontide.kernels needs numpy, torch and triton: pip install 'moontide[kernels]'" in done.stderr


def test_invalid_record_layout_is_rejected() -> None:
    good = {"owner": 0, "payload_offset": 512, "flag_offset": 64, "bytes_total": 1, "epoch": 1}
    layout.Record(**good)
    locations = [("payload_offset", 8), ("flag_offset", 8), ("owner", -1)]
    for name, value in [*locations, ("bytes_total", 0), ("page_bytes", 4096), ("epoch", 0), ("epoch", 1 << 62)]:
        with pytest.raises(ValueError):
            layout.Record(**(good | {name: value}))


# Compiled kernels.


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Assembly by target and kernel, without directives and comments."""
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


def test_every_kernel_compiles_for_nvidia_and_amd(assembly: dict[str, dict[str, str]]) -> None:
    for target in ("sm_90", "gfx942"):
        assert set(EVERY_KERNEL) <= set(assembly[target])


# Atomics of the kernels, in order, as `operation ordering`. Triton writes the ordering before the scope for CAS, and
# after it for the others.
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
def test_ptx_atomics_have_system_scope_and_expected_ordering(assembly: dict[str, dict[str, str]], kernel: str) -> None:
    ptx = assembly["sm_90"][kernel]
    found = re.findall(r"atom\.global\.(?:sys\.(acq_rel|release)|(acq_rel|release)\.sys)\.(cas|exch)\.b64", ptx)
    assert [f"{operation} {one or other}" for one, other, operation in found] == SM_90_ATOMICS[kernel]
    # All other atomics have GPU scope: the status, and sums.
    rest = [line for line in ptx.splitlines() if "atom." in line and ".sys." not in line]
    assert all(".gpu.relaxed." in line for line in rest), rest


def test_ptx_digest_add_is_relaxed_at_system_scope(assembly: dict[str, dict[str, str]]) -> None:
    assert "atom.global.sys.relaxed.add.u64" in assembly["sm_90"]["push-digest"]
    assert "relaxed.add" not in assembly["sm_90"]["push"]


def test_ptx_has_fence_between_cell_store_and_word_load(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("acquire", "read", "sb"):
        no_access = r"(?:(?!atom\.|ld\.acquire).)*?"
        steps = [r"acq_rel\.exch\.b64", r"bar\.sync", r"fence\.sc\.sys;", r"ld\.acquire\.sys\.global\.b64"]
        assert re.search(no_access.join(steps), assembly["sm_90"][kernel], re.S), kernel
    assert "fence.sc.sys" not in assembly["sm_90"]["sb-unfenced"]


def test_ptx_loads_words_with_acquire_and_wait_has_no_atomics(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("push", "wait", "acquire", "read"):
        assert "ld.acquire.sys.global.b64" in assembly["sm_90"][kernel]
    assert "atom." not in assembly["sm_90"]["wait"]


VECTORS = {
    "sm_90": (r"ld\.global\.(v4\.b32|v2\.b64)", r"st\.global\.(v4\.b32|v2\.b64)"),
    "gfx942": ("global_load_dwordx4", "global_store_dwordx4"),
}


@pytest.mark.parametrize("target", VECTORS)
@pytest.mark.parametrize("kernel", ["push", "push-digest", "copy", "copy-digest", "read", "read-digest"])
def test_pages_are_copied_in_16_byte_vectors(assembly: dict[str, dict[str, str]], target: str, kernel: str) -> None:
    for pattern in VECTORS[target]:
        assert re.search(pattern, assembly[target][kernel])


def test_unaligned_source_is_copied_without_vectors(assembly: dict[str, dict[str, str]]) -> None:
    for target, (load, store) in VECTORS.items():
        for kernel in ("push-narrow", "copy-narrow", "read-narrow"):
            assert not re.search(load, assembly[target][kernel]) and not re.search(store, assembly[target][kernel])


FENCE = r"buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt\(0\) lgkmcnt\(0\)\nbuffer_inv sc0 sc1"
LOAD_ACQUIRE = r"global_load_dwordx2 v\[\d+:\d+\], v\[\d+:\d+\], off sc0 sc1\ns_waitcnt vmcnt\(0\)\nbuffer_inv sc0 sc1"
RELEASE_FENCE = r"buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt\(0\) lgkmcnt\(0\)\nv_mov"


def test_gcn_has_fence_between_cell_store_and_word_load(assembly: dict[str, dict[str, str]]) -> None:
    for kernel in ("acquire", "read", "sb"):
        no_access = r"(?:(?!global_atomic|global_load).)*?"
        pattern = no_access.join([r"global_atomic_swap_x2 [^\n]* sc1\n", "s_barrier", FENCE, LOAD_ACQUIRE])
        assert re.search(pattern, assembly["gfx942"][kernel], re.S), kernel
    assert re.search(FENCE, assembly["gfx942"]["copy"])


RELEASING = ["push", "push-narrow", "push-digest", "release", "read", "read-digest", "acquire", "mp"]


@pytest.mark.parametrize("kernel", RELEASING)
def test_gcn_waits_for_stores_before_barrier_and_release(assembly: dict[str, dict[str, str]], kernel: str) -> None:
    """Failure: LLVM omits the wait between the write-back and the atomic, and a barrier does not wait for stores.
    Fix: ``memory_order.release_fence``, before the barrier that precedes the atomic."""
    no_access = r"(?:(?!global_load|global_store|global_atomic).)*?"
    release = r"buffer_wbl2 sc0 sc1\n(?:s_waitcnt[^\n]*\n)?global_atomic_(cmp)?swap_x2"
    assert re.search(no_access.join([RELEASE_FENCE, "s_barrier", release]), assembly["gfx942"][kernel], re.S)


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
