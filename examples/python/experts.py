"""A mixture-of-experts layer over four processes with ``moontide.ep``, compared with the same layer in one process.

    python experts.py               # four ranks
    python experts.py --ranks 8

Each process has two experts, which are small networks, and eight tokens. A router sends every token to the two experts
with the highest scores. Tokens are sent as bfloat16. All numbers are small integers, so that sums do not depend on the
order of additions and the results can be compared bit by bit.
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

#: A numpy array. numpy's annotations lose the element type at the first operator.
Array: TypeAlias = Any


class Expert:
    """A network of two linear layers with a ReLU between them."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng([7, number])
        self.up = random.integers(-1, 2, (HIDDEN, WIDTH)).astype(np.float32)
        self.down = random.integers(-1, 2, (WIDTH, HIDDEN)).astype(np.float32)

    def __call__(self, rows: Array) -> Array:
        return np.maximum(rows @ self.up, 0) @ self.down


def route(tokens: Array, experts: int) -> tuple[Array, Array]:
    """Returns the experts of each token, and their weights (multiples of 1/4)."""
    scores = tokens @ np.random.default_rng(8).standard_normal((HIDDEN, experts)).astype(np.float32)
    chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
    return chosen, np.tile(np.array([0.75, 0.25], np.float32), (len(tokens), 1))


def rank_process(path: str, rank: int, ranks: int) -> None:
    """Runs one rank."""
    own = [Expert(rank * EXPERTS_PER_RANK + local) for local in range(EXPERTS_PER_RANK)]
    all_experts = [Expert(number) for number in range(ranks * EXPERTS_PER_RANK)]

    def compute(packed: Array, rows_per_expert: Array) -> Array:
        results = np.zeros_like(packed)
        for local, rows in enumerate(rows_per_expert):
            numbers = reference.to_numbers(packed[local, :rows], "bfloat16", hidden=HIDDEN)
            results[local, :rows] = reference.to_rows(own[local](numbers), "bfloat16")
        return results

    size = Channel.bytes(ranks=ranks, **SETTINGS)
    with World(path, rank, ranks, size) as world, Channel(world, **SETTINGS) as channel:
        for step in range(STEPS):
            numbers = np.random.default_rng([9, step, rank]).integers(-4, 5, (TOKENS, HIDDEN)).astype(np.float32)
            # The first rank has no tokens in the first step, which is valid.
            numbers = numbers[: 0 if rank == step == 0 else TOKENS]
            experts, weights = route(numbers, len(all_experts))
            tokens = reference.to_rows(numbers, "bfloat16")
            results, took_part = channel.moe_forward(tokens, experts, weights, compute)
            expected = reference.layer(
                tokens,
                experts,
                weights,
                lambda number, rows: all_experts[number](rows),
                experts_per_rank=EXPERTS_PER_RANK,
                hidden=HIDDEN,
                ranks=took_part,
            )
            assert took_part == tuple(range(ranks)), took_part
            assert results.tobytes() == expected.tobytes(), f"rank {rank}, step {step}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a mixture-of-experts layer over several processes.")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks [default: %(default)s]")
    parser.add_argument("--rank", nargs=2, metavar=("PATH", "RANK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        path, rank = arguments.rank
        rank_process(path, int(rank), arguments.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--rank", os.path.join(folder, "ep")]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(arguments.ranks)]
        codes = [process.wait() for process in running]
    assert codes == [0] * arguments.ranks, codes
    tokens = STEPS * arguments.ranks * TOKENS - TOKENS
    print(f"{tokens} tokens through the experts of {arguments.ranks} processes: equal to one process, bit by bit")


if __name__ == "__main__":
    main()
