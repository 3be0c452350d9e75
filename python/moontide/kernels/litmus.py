"""Litmus tests for the first day on a GPU: do the two patterns that everything here rests on hold on this machine?

    python -m moontide.kernels.litmus                          # on the GPU, or on two of them
    python -m moontide.kernels.litmus --backend interpreter    # two processes, the logic alone

**mp**, message passing: one side writes data and then a flag (release), the other sees the flag (acquire) and must see
the data. This is ``push`` and its readers.

**sb**, store buffering: each side writes its own word, fences, and looks at the other's. Not both may miss the other.
This is the cell and the header word, Dekker's pattern. **sb-unfenced** is the same without the fence. A GPU is allowed
to fail it, and if it does the test has shown that it can see what it looks for; that it does not fail proves nothing.

The sides are two processes under the interpreter; on one GPU two streams, on two GPUs (``--devices 0 1``) one stream
each, and the words then lie in pinned host memory, which both reach.
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
from .order import fence, look, pause, pointer, settle, translate

DATA_WORDS = 1024
PATTERNS = ("mp", "sb", "sb-unfenced")
_DATA_WORDS = tl.constexpr(DATA_WORDS)

# A region: the word by which the sides keep step, the flag on a line of its own, the data, a word for each round.
STEP_AT, FLAG_AT, DATA_AT = 0, 128, 4096
ROUNDS_AT = DATA_AT + 8 * DATA_WORDS
_STEP_AT, _FLAG_AT, _DATA_AT, _ROUNDS_AT = map(tl.constexpr, (STEP_AT, FLAG_AT, DATA_AT, ROUNDS_AT))


@jit
def meet(bases: tl.tensor, me: tl.tensor, turn: tl.tensor, looks: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """Says that I am at ``turn`` and waits until the other one is there too. Whether it came."""
    mine = tl.load(bases + me) + _STEP_AT
    theirs = translate(mine, bases, me, 1 - me)
    settle(BACKEND)
    tl.atomic_xchg(pointer(mine), turn, sem="release", scope="sys")
    seen = look(theirs, BACKEND)
    looked = tl.full([], 1, tl.int64)
    while (seen < turn) & (looked < looks):
        pause(BACKEND)
        seen = look(theirs, BACKEND)
        looked += 1
    return seen >= turn


@jit
def message_passing(
    bases: tl.tensor, me: tl.int64, rounds: tl.int64, looks: tl.int64, result: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """Side 0 writes into side 1's region, side 1 reads. ``result``: rounds made, and wrong words that were seen."""
    lanes = tl.arange(0, _DATA_WORDS)
    region = tl.load(bases + 1)
    data = pointer(region + _DATA_AT) + lanes
    flag = region + _FLAG_AT
    made = tl.full([], 0, tl.int64)
    wrong = tl.full([], 0, tl.int64)
    together = meet(bases, me, made + 1, looks, BACKEND)
    while (made < rounds) & together:
        made += 1
        if me == 0:
            tl.store(data, made * _DATA_WORDS + lanes)
            settle(BACKEND)
            tl.atomic_xchg(pointer(flag), made, sem="release", scope="sys")
        else:
            looked = tl.full([], 0, tl.int64)
            while (look(flag, BACKEND) != made) & (looked < looks):
                looked += 1
            seen = tl.load(data)
            wrong += tl.sum((seen != made * _DATA_WORDS + lanes).to(tl.int64), axis=0)
        together = meet(bases, me, made + 1, looks, BACKEND)
    tl.store(result, made)
    tl.store(result + 1, wrong)


@jit
def store_buffering(
    bases: tl.tensor,
    me: tl.int64,
    rounds: tl.int64,
    looks: tl.int64,
    result: tl.tensor,
    missed: tl.tensor,
    FENCED: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Each round has two fresh words. ``missed[round]``: whether this side did not see the other's."""
    mine = tl.load(bases + me) + _ROUNDS_AT
    theirs = translate(mine, bases, me, 1 - me)
    made = tl.full([], 0, tl.int64)
    together = meet(bases, me, made + 1, looks, BACKEND)
    while (made < rounds) & together:
        # As `read.name_and_check`.
        tl.atomic_xchg(pointer(mine + made * 8), made + 1, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        if FENCED:
            fence(BACKEND)
        seen = look(theirs + made * 8, BACKEND)
        tl.store(missed + made, (seen == 0).to(tl.int32))
        made += 1
        together = meet(bases, me, made + 1, looks, BACKEND)
    tl.store(result, made)


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a run needs, on its device."""

    bases: torch.Tensor
    me: int
    rounds: int
    looks: int
    result: torch.Tensor
    missed: torch.Tensor

    @classmethod
    def new(cls, addresses: list[int], me: int, rounds: int, looks: int, device: torch.device) -> Side:
        bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        result = torch.zeros(2, dtype=torch.int64, device=device)
        return cls(bases, me, rounds, looks, result, torch.zeros(rounds, dtype=torch.int32, device=device))

    def launch(self, pattern: str) -> None:
        told = (self.bases, self.me, self.rounds, self.looks, self.result)
        backend = backend_of(self.bases)
        if pattern == "mp":
            message_passing[(1,)](*told, BACKEND=backend, num_warps=WARPS)
        else:
            fenced = pattern == "sb"
            store_buffering[(1,)](*told, self.missed, FENCED=fenced, BACKEND=backend, num_warps=WARPS)


def region_bytes(rounds: int) -> int:
    return -(-(ROUNDS_AT + 8 * rounds) // 4096) * 4096


def verdict(pattern: str, rounds: int, sides: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[str, bool]:
    """A line about a run, and whether it is as it must be."""
    made = min(int(result[0]) for result, _ in sides)
    if made < rounds:
        return f"{pattern}: the sides lost each other after {made} of {rounds} rounds", False
    if pattern == "mp":
        bad, what = int(sides[1][0][1]), "words older than their flag"
    else:
        both = sides[0][1].cpu() & sides[1][1].cpu()
        bad, what = int(both.sum()), "rounds in which both missed the other"
    allowed = " (allowed: there is no fence)" if pattern == "sb-unfenced" and bad else ""
    return f"{pattern}: {rounds} rounds, {bad} {what}{allowed}", bad == 0 or bool(allowed)


def run_on_devices(pattern: str, rounds: int, looks: int, devices: list[int]) -> tuple[str, bool]:
    """Both sides in this process, each with a stream."""
    size = region_bytes(rounds)
    if len(set(devices)) == 1:
        memory = torch.zeros(2 * size, dtype=torch.uint8, device=f"cuda:{devices[0]}")
    else:
        memory = torch.zeros(2 * size, dtype=torch.uint8).pin_memory()
    addresses = [memory.data_ptr(), memory.data_ptr() + size]
    sides = []
    for me in (0, 1):
        device = torch.device("cuda", devices[me % len(devices)])
        sides.append(Side.new(addresses, me, rounds, looks, device))
    # With no rounds first: compiling takes long enough for the other side to give up.
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


def run_in_processes(pattern: str, rounds: int, looks: int) -> tuple[str, bool]:
    """Each side in a process of its own, over files in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for me in (0, 1):
            with open(f"{folder}/{me}", "wb") as file:
                file.truncate(region_bytes(rounds))
        own = [sys.executable, "-m", "moontide.kernels.litmus", "--rounds", str(rounds), "--looks", str(looks)]
        told = [[*own, "--only", pattern, "--side", str(me), "--folder", folder] for me in (0, 1)]
        running = [subprocess.Popen(words) for words in told]
        if any([process.wait() for process in running]):
            return f"{pattern}: a side has failed", False
        saved = [torch.load(f"{folder}/{me}.pt") for me in (0, 1)]
        return verdict(pattern, rounds, [(side["result"], side["missed"]) for side in saved])


def be_a_side(pattern: str, me: int, rounds: int, looks: int, folder: Path) -> None:
    """The other end of ``run_in_processes``."""
    addresses, mapped = [], []
    for rank in (me, 1 - me):
        # Each maps its own region first, so that the two processes have them at different addresses.
        with open(folder / str(rank), "r+b") as file:
            mapped.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8))
        addresses.append(mapped[-1].data_ptr())
    side = Side.new([addresses[me], addresses[1 - me]], me, rounds, looks, torch.device("cpu"))
    side.launch(pattern)
    torch.save({"result": side.result, "missed": side.missed}, folder / f"{me}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    usual = "interpreter" if INTERPRETED else "device"
    parser.add_argument("--backend", choices=("interpreter", "device"), default=usual, help="%(default)s unless told")
    parser.add_argument("--only", choices=PATTERNS, help="one pattern instead of all")
    parser.add_argument("--rounds", type=int, default=200 if INTERPRETED else 100_000)
    parser.add_argument("--looks", type=int, default=100_000 if INTERPRETED else 10_000_000, help="of a wait")
    parser.add_argument("--devices", type=int, nargs="+", default=[0])
    parser.add_argument("--side", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.backend == "interpreter" and not INTERPRETED:
        # Triton decides when it is imported.
        again = [sys.executable, "-m", "moontide.kernels.litmus", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "TRITON_INTERPRET": "1"})
    if told.backend == "device" and (INTERPRETED or not torch.cuda.is_available()):
        parser.error("there is no device, or TRITON_INTERPRET is set; --backend interpreter runs without one")
    if told.side is not None:
        be_a_side(told.only, told.side, told.rounds, told.looks, told.folder)
        return
    all_good = True
    for pattern in PATTERNS if told.only is None else (told.only,):
        began = time.monotonic()
        if told.backend == "interpreter":
            line, good = run_in_processes(pattern, told.rounds, told.looks)
        else:
            line, good = run_on_devices(pattern, told.rounds, told.looks, told.devices)
        print(f"{line}; {time.monotonic() - began:.1f} s", flush=True)
        all_good &= good
    sys.exit(not all_good)


if __name__ == "__main__":
    main()
