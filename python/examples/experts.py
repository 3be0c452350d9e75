"""A layer of a mixture of experts over four processes, by ``moontide.ep``, compared with the same layer in one.

    python experts.py               # four ranks
    python experts.py --ranks 8

Each process has two experts, which are small networks, and eight tokens of its own; a router sends every token to the two
experts that score highest. Tokens travel as bfloat16. All numbers are small whole ones, so that sums come to the same
however a library arranges them: then results can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import Any, TypeAlias

import numpy as np

from moontide.ep import Channel, World, reference

HIDDEN, WIDTH, TOKENS, TOP_K, EXPERTS_PER_RANK, STEPS = 64, 32, 8, 2, 2, 5
SETTINGS: Any = {"tokens_max": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "experts_per_rank": EXPERTS_PER_RANK}

#: Arrays, of whose types numpy's own annotations lose sight at the first operator.
Array: TypeAlias = Any


class Expert:
    """Up, a kink, and down."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng([7, number])
        self.up = random.integers(-1, 2, (HIDDEN, WIDTH)).astype(np.float32)
        self.down = random.integers(-1, 2, (WIDTH, HIDDEN)).astype(np.float32)

    def __call__(self, rows: Array) -> Array:
        return np.maximum(rows @ self.up, 0) @ self.down


def route(tokens: Array, experts: int) -> tuple[Array, Array]:
    """The experts of each token, and their weights, which are quarters."""
    scores = tokens @ np.random.default_rng(8).standard_normal((HIDDEN, experts)).astype(np.float32)
    chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
    return chosen, np.tile(np.array([0.75, 0.25], np.float32), (len(tokens), 1))


def rank_process(path: str, rank: int, ranks: int) -> None:
    """What each process does."""
    mine = [Expert(rank * EXPERTS_PER_RANK + local) for local in range(EXPERTS_PER_RANK)]
    every = [Expert(number) for number in range(ranks * EXPERTS_PER_RANK)]

    def compute(packed: Array, rows_per_expert: Array) -> Array:
        results = np.zeros_like(packed)
        for local, rows in enumerate(rows_per_expert):
            numbers = reference.to_numbers(packed[local, :rows], "bfloat16", hidden=HIDDEN)
            results[local, :rows] = reference.to_rows(mine[local](numbers), "bfloat16")
        return results

    size = Channel.bytes(ranks=ranks, **SETTINGS)
    with World(path, rank, ranks, size) as world, Channel(world, **SETTINGS) as channel:
        for step in range(STEPS):
            numbers = np.random.default_rng([9, step, rank]).integers(-4, 5, (TOKENS, HIDDEN)).astype(np.float32)
            # The first rank has no tokens in the first step, which is nothing special.
            numbers = numbers[: 0 if rank == step == 0 else TOKENS]
            experts, weights = route(numbers, len(every))
            tokens = reference.to_rows(numbers, "bfloat16")
            results, took_part = channel.moe_forward(tokens, experts, weights, compute)
            expected = reference.layer(
                tokens,
                experts,
                weights,
                lambda number, rows: every[number](rows),
                experts_per_rank=EXPERTS_PER_RANK,
                hidden=HIDDEN,
                ranks=took_part,
            )
            assert took_part == tuple(range(ranks)), took_part
            assert results.tobytes() == expected.tobytes(), f"rank {rank}, step {step}"


def main() -> None:
    arguments = argparse.ArgumentParser(description="A layer of experts over several processes.")
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--rank", nargs=2, metavar=("PATH", "RANK"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.rank is not None:
        path, rank = chosen.rank
        rank_process(path, int(rank), chosen.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(chosen.ranks), "--rank", os.path.join(folder, "ep")]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(chosen.ranks)]
        codes = [process.wait() for process in running]
    assert codes == [0] * chosen.ranks, codes
    tokens = STEPS * chosen.ranks * TOKENS - TOKENS
    print(f"{tokens} tokens through the experts of {chosen.ranks} processes: as in one, bit by bit")


if __name__ == "__main__":
    main()
