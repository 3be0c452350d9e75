"""Litmus tests of the two memory-ordering patterns that the kernels rely on, for the first run on a GPU.

    python -m moontide.kernels.litmus                          # on one or two GPUs
    python -m moontide.kernels.litmus --backend interpreter    # two processes, tests the logic only

**mp**, message passing: one side writes data and then a flag (release); if the other side sees the flag (acquire), it
must see the data. ``push`` and its readers use this pattern.

**sb**, store buffering: each side writes its own word, fences, and reads the other's word. At least one side must see
the other's word. The cell and the header word use this pattern (Dekker). **sb-unfenced** is the same without the fence.
A GPU may fail it; a failure shows that the test can detect a violation, but a success proves nothing.

The sides are two processes under the interpreter, two streams on one GPU, or one stream each on two GPUs
(``--devices 0 1``). With two GPUs the words are in pinned host memory, which both can access.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ._jit import INTERPRETED, WARPS, backend_of, jit
from .memory_order import backoff, fence, load_acquire, pointer, release_fence, translate

DATA_WORDS = 1024
PATTERNS = ("mp", "sb", "sb-unfenced")
_DATA_WORDS = tl.constexpr(DATA_WORDS)

# A region: the word that synchronizes the sides, the flag in its own cache line, the data, one word per round.
STEP_AT, FLAG_AT, DATA_AT = 0, 128, 4096
ROUNDS_AT = DATA_AT + 8 * DATA_WORDS
_STEP_AT, _FLAG_AT, _DATA_AT, _ROUNDS_AT = map(tl.constexpr, (STEP_AT, FLAG_AT, DATA_AT, ROUNDS_AT))


@jit
def sync_sides(
    bases: tl.tensor, me: tl.tensor, turn: tl.tensor, polls_max: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Publishes that this side is at ``turn`` and waits until the other side is too. Returns whether it arrived."""
    mine = tl.load(bases + me) + _STEP_AT
    theirs = translate(mine, bases, me, 1 - me)
    release_fence(BACKEND)
    tl.atomic_xchg(pointer(mine), turn, sem="release", scope="sys")
    seen = load_acquire(theirs, BACKEND)
    polls = tl.full([], 1, tl.int64)
    while (seen < turn) & (polls < polls_max):
        backoff(BACKEND)
        seen = load_acquire(theirs, BACKEND)
        polls += 1
    return seen >= turn


@jit
def message_passing(
    bases: tl.tensor, me: tl.int64, rounds: tl.int64, polls_max: tl.int64, result: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """Side 0 writes to side 1's region, side 1 reads. ``result``: number of rounds, and number of stale words seen."""
    lanes = tl.arange(0, _DATA_WORDS)
    region = tl.load(bases + 1)
    data = pointer(region + _DATA_AT) + lanes
    flag = region + _FLAG_AT
    made = tl.full([], 0, tl.int64)
    wrong = tl.full([], 0, tl.int64)
    together = sync_sides(bases, me, made + 1, polls_max, BACKEND)
    while (made < rounds) & together:
        made += 1
        if me == 0:
            tl.store(data, made * _DATA_WORDS + lanes)
            release_fence(BACKEND)
            tl.atomic_xchg(pointer(flag), made, sem="release", scope="sys")
        else:
            polls = tl.full([], 0, tl.int64)
            while (load_acquire(flag, BACKEND) != made) & (polls < polls_max):
                polls += 1
            seen = tl.load(data)
            wrong += tl.sum((seen != made * _DATA_WORDS + lanes).to(tl.int64), axis=0)
        together = sync_sides(bases, me, made + 1, polls_max, BACKEND)
    tl.store(result, made)
    tl.store(result + 1, wrong)


@jit
def store_buffering(
    bases: tl.tensor,
    me: tl.int64,
    rounds: tl.int64,
    polls_max: tl.int64,
    result: tl.tensor,
    missed: tl.tensor,
    FENCED: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Each round has two new words. ``missed[round]``: whether this side did not see the other's word."""
    mine = tl.load(bases + me) + _ROUNDS_AT
    theirs = translate(mine, bases, me, 1 - me)
    made = tl.full([], 0, tl.int64)
    together = sync_sides(bases, me, made + 1, polls_max, BACKEND)
    while (made < rounds) & together:
        # As `read.pin_and_check`.
        tl.atomic_xchg(pointer(mine + made * 8), made + 1, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        if FENCED:
            fence(BACKEND)
        seen = load_acquire(theirs + made * 8, BACKEND)
        tl.store(missed + made, (seen == 0).to(tl.int32))
        made += 1
        together = sync_sides(bases, me, made + 1, polls_max, BACKEND)
    tl.store(result, made)


@dataclass(frozen=True, slots=True)
class Side:
    """Buffers of one side of a run, on its device."""

    bases: torch.Tensor
    me: int
    rounds: int
    polls_max: int
    result: torch.Tensor
    missed: torch.Tensor

    @classmethod
    def new(cls, addresses: list[int], me: int, rounds: int, polls_max: int, device: torch.device) -> Side:
        bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        result = torch.zeros(2, dtype=torch.int64, device=device)
        return cls(bases, me, rounds, polls_max, result, torch.zeros(rounds, dtype=torch.int32, device=device))

    def launch(self, pattern: str) -> None:
        arguments = (self.bases, self.me, self.rounds, self.polls_max, self.result)
        backend = backend_of(self.bases)
        if pattern == "mp":
            message_passing[(1,)](*arguments, BACKEND=backend, num_warps=WARPS)
        else:
            fenced = pattern == "sb"
            store_buffering[(1,)](*arguments, self.missed, FENCED=fenced, BACKEND=backend, num_warps=WARPS)


def region_bytes(rounds: int) -> int:
    return -(-(ROUNDS_AT + 8 * rounds) // 4096) * 4096


def verdict(pattern: str, rounds: int, sides: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[str, bool]:
    """Returns a summary of a run, and whether it passed."""
    made = min(int(result[0]) for result, _ in sides)
    if made < rounds:
        return f"{pattern}: timed out waiting for the other side after {made} of {rounds} rounds", False
    if pattern == "mp":
        bad, what = int(sides[1][0][1]), "words older than their flag"
    else:
        both = sides[0][1].cpu() & sides[1][1].cpu()
        bad, what = int(both.sum()), "rounds in which neither side saw the other's word"
    allowed = " (allowed: there is no fence)" if pattern == "sb-unfenced" and bad else ""
    return f"{pattern}: {rounds} rounds, {bad} {what}{allowed}", bad == 0 or bool(allowed)


def run_on_devices(pattern: str, rounds: int, polls_max: int, devices: list[int]) -> tuple[str, bool]:
    """Runs both sides in this process, each in its own stream."""
    size = region_bytes(rounds)
    if len(set(devices)) == 1:
        memory = torch.zeros(2 * size, dtype=torch.uint8, device=f"cuda:{devices[0]}")
    else:
        memory = torch.zeros(2 * size, dtype=torch.uint8).pin_memory()
    addresses = [memory.data_ptr(), memory.data_ptr() + size]
    sides = []
    for me in (0, 1):
        device = torch.device("cuda", devices[me % len(devices)])
        sides.append(Side.new(addresses, me, rounds, polls_max, device))
    # First without rounds, to compile the kernels: compiling takes longer than the other side waits.
    for side in sides:
        with torch.cuda.device(side.bases.device):
            Side.new(addresses, side.me, 0, 1, side.bases.device).launch(pattern)
            torch.cuda.synchronize()
    memory.zero_()
    torch.cuda.synchronize()
    for side in sides:
        stream = torch.cuda.Stream(side.bases.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(side.bases.device), torch.cuda.stream(stream):
            side.launch(pattern)
    for side in sides:
        torch.cuda.synchronize(side.bases.device)
    return verdict(pattern, rounds, [(side.result.cpu(), side.missed.cpu()) for side in sides])


def run_in_processes(pattern: str, rounds: int, polls_max: int) -> tuple[str, bool]:
    """Runs each side in its own process, over files in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for me in (0, 1):
            with open(f"{folder}/{me}", "wb") as file:
                file.truncate(region_bytes(rounds))
        own = [sys.executable, "-m", "moontide.kernels.litmus", "--rounds", str(rounds), "--polls-max", str(polls_max)]
        commands = [[*own, "--only", pattern, "--side", str(me), "--folder", folder] for me in (0, 1)]
        running = [subprocess.Popen(command) for command in commands]
        if any([process.wait() for process in running]):
            return f"{pattern}: a side failed", False
        saved = [torch.load(f"{folder}/{me}.pt") for me in (0, 1)]
        return verdict(pattern, rounds, [(side["result"], side["missed"]) for side in saved])


def run_side(pattern: str, me: int, rounds: int, polls_max: int, folder: Path) -> None:
    """Runs one side in a child process of ``run_in_processes``."""
    addresses, mapped = [], []
    for rank in (me, 1 - me):
        # Each process maps its own region first, so that the regions have different addresses in the two processes.
        with open(folder / str(rank), "r+b") as file:
            mapped.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8))
        addresses.append(mapped[-1].data_ptr())
    side = Side.new([addresses[me], addresses[1 - me]], me, rounds, polls_max, torch.device("cpu"))
    side.launch(pattern)
    torch.save({"result": side.result, "missed": side.missed}, folder / f"{me}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    usual = "interpreter" if INTERPRETED else "device"
    parser.add_argument("--backend", choices=("interpreter", "device"), default=usual, help="[default: %(default)s]")
    parser.add_argument("--only", choices=PATTERNS, help="run one pattern [default: all]")
    parser.add_argument("--rounds", type=int, default=200 if INTERPRETED else 100_000)
    polls_default = 100_000 if INTERPRETED else 10_000_000
    parser.add_argument("--polls-max", type=int, default=polls_default, help="maximum number of polls of a wait")
    parser.add_argument("--devices", type=int, nargs="+", default=[0])
    parser.add_argument("--side", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend == "interpreter" and not INTERPRETED:
        # Triton reads the variable when it is imported.
        command = [sys.executable, "-m", "moontide.kernels.litmus", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "TRITON_INTERPRET": "1"})
    if arguments.backend == "device" and (INTERPRETED or not torch.cuda.is_available()):
        parser.error("no GPU found, or TRITON_INTERPRET is set; use --backend interpreter to run without a GPU")
    if arguments.side is not None:
        run_side(arguments.only, arguments.side, arguments.rounds, arguments.polls_max, arguments.folder)
        return
    all_good = True
    for pattern in PATTERNS if arguments.only is None else (arguments.only,):
        began = time.monotonic()
        if arguments.backend == "interpreter":
            line, good = run_in_processes(pattern, arguments.rounds, arguments.polls_max)
        else:
            line, good = run_on_devices(pattern, arguments.rounds, arguments.polls_max, arguments.devices)
        print(f"{line}; {time.monotonic() - began:.1f} s", flush=True)
        all_good &= good
    sys.exit(not all_good)


if __name__ == "__main__":
    main()
