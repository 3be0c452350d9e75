"""A rank of a world: the program that test_ep.py starts once per rank.

    python ep_ranks.py SCENARIO PATH RANK RANKS SEED EXTRA

Each rank derives the tokens of all ranks from the seed, so that it can check the tokens and results that it receives.
Its standard output is for the test. A failed check ends the program with an error.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moontide.ep import Channel, RanksMissing, World, reference

#: Timeout of waits that must succeed; long, because a machine may be busy.
TIMEOUT_S = 60.0
#: Timeout after which a killed rank is excluded.
RANK_TIMEOUT_S = 3.0

ROUTES = ["any", "one rank", "two ranks", "sparse"]


@dataclass
class Shape:
    """Settings of a channel."""

    ranks: int
    tokens_max: int = 5
    hidden: int = 40
    top_k: int = 4
    experts_per_rank: int = 8
    dispatch_dtype: Any = "bfloat16"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def combine_dtype(self) -> Any:
        return "bfloat16" if self.dispatch_dtype == "float8" else self.dispatch_dtype

    @property
    def settings(self) -> dict[str, Any]:
        names = ("tokens_max", "hidden", "top_k", "experts_per_rank", "dispatch_dtype")
        return {name: getattr(self, name) for name in names} | self.extra

    def bytes(self) -> int:
        return Channel.bytes(ranks=self.ranks, **self.settings)


@dataclass
class Batch:
    tokens: Any
    experts: Any
    weights: Any


def draw(shape: Shape, count: int, routes: str, seed: list[int]) -> Batch:
    """Draws the tokens of a rank for a step, and their experts."""
    random = np.random.default_rng(seed)
    numbers = random.uniform(-1, 1, (count, shape.hidden)).astype(np.float32)
    ranks, per_rank = shape.ranks, shape.experts_per_rank
    experts = np.full((count, shape.top_k), -1, np.int32 if seed[-1] % 2 else np.int64)
    for row in experts:
        # Experts on the last rank only; or on two ranks, as with group-limited routing; or on any rank.
        allowed = {"one rank": [ranks - 1], "two ranks": random.permutation(ranks)[:2]}.get(routes, range(ranks))
        candidates = [rank * per_rank + local for rank in allowed for local in range(per_rank)]
        count = random.integers(0, shape.top_k + 1) if routes == "sparse" else shape.top_k
        count = min(int(count), len(candidates))
        row[:count] = random.permutation(candidates)[:count]
    weights = random.uniform(-1, 1, experts.shape).astype(np.float32)
    return Batch(reference.to_rows(numbers, shape.dispatch_dtype), experts, weights)


def expert(number: int, numbers: Any) -> Any:
    """Returns the result of an expert for numbers. Every expert computes another function."""
    return numbers * np.float32(1 + number * 0.125) + np.float32((number + 1) * 0.25)


def compute(shape: Shape, rank: int, packed: Any, rows_per_expert: Any) -> Any:
    """Runs a rank's experts on the grouped layout. Masked rows of the result are NaN."""
    results = np.full((*packed.shape[:2], shape.hidden), np.nan, np.float32)
    for local, rows in enumerate(rows_per_expert):
        numbers = reference.to_numbers(packed[local, :rows], shape.dispatch_dtype, hidden=shape.hidden)
        results[local, :rows] = expert(rank * shape.experts_per_rank + local, numbers)
    return reference.to_rows(results, shape.combine_dtype)


def expected(shape: Shape, batch: Batch, ranks: tuple[int, ...]) -> Any:
    return reference.layer(
        batch.tokens,
        batch.experts,
        batch.weights,
        expert,
        experts_per_rank=shape.experts_per_rank,
        hidden=shape.hidden,
        dispatch_dtype=shape.dispatch_dtype,
        combine_dtype=shape.combine_dtype,
        ranks=ranks,
    )


def by_parts(channel: Channel, shape: Shape, batches: list[Batch]) -> tuple[Any, tuple[int, ...]]:
    """Runs a step in its parts, and checks all intermediate data."""
    me = channel.rank
    own = batches[me]
    dispatched = channel.start_dispatch(own.tokens, own.experts, own.weights).wait_packed(timeout=TIMEOUT_S)
    assert dispatched.sources == tuple(range(shape.ranks))
    rows, slots = reference.grouped(
        [batch.tokens for batch in batches],
        [batch.experts for batch in batches],
        rank=me,
        experts_per_rank=shape.experts_per_rank,
        tokens_max=shape.tokens_max,
    )
    counts = dispatched.rows_per_expert
    assert counts.tolist() == [len(group) for group in slots]
    for local, group in enumerate(slots):
        assert dispatched.group(local).tolist() == group
        for row, slot in enumerate(group):
            assert (dispatched.packed[local, row] == rows[local][row]).all()
            source, token = divmod(slot, shape.tokens_max)
            assert (dispatched.tokens(source).numpy()[token] == rows[local][row]).all()
    dispatched.scatter(compute(shape, me, dispatched.packed, counts))
    return dispatched.combine(timeout=TIMEOUT_S)


def sweep(world: World, rank: int, ranks: int, seed: int, extra: str) -> None:
    """Runs every top_k, all dtypes, pull and push, one and two buffers, and the size of a real model."""
    dtypes = ["bfloat16", "float16", "float32", "float8"]
    shapes = [
        Shape(
            ranks,
            top_k=k,
            dispatch_dtype=dtypes[k % 4],
            extra={"combine_mode": ["pull", "push"][k // 4 % 2], "buffers": 1 + k % 2},
        )
        for k in range(1, 9)
    ]
    shapes.append(Shape(ranks, hidden=300, dispatch_dtype="float8"))
    shapes.append(Shape(ranks, hidden=7168, top_k=8, tokens_max=2))
    digest = hashlib.sha256()
    for number, shape in enumerate(shapes):
        with Channel(world, **shape.settings, timeout=TIMEOUT_S) as channel:
            random = np.random.default_rng([seed, number])
            packed = np.empty(
                (shape.experts_per_rank, ranks * shape.tokens_max, row_len(shape)), plain(shape.dispatch_dtype)
            )
            for step in range(2 if shape.hidden > 1000 else 6):
                # No rank has tokens; all ranks have the maximum; one rank has none; random numbers.
                counts = random.integers(0, shape.tokens_max + 1, ranks)
                if step < 2:
                    counts[:] = step * shape.tokens_max
                elif step == 2:
                    counts[0] = 0
                routes = ROUTES[step % len(ROUTES)]
                batches = [draw(shape, int(counts[of]), routes, [seed, number, step, of]) for of in range(ranks)]
                own = batches[rank]
                if step % 2:
                    results, took_part = by_parts(channel, shape, batches)
                else:
                    out = np.full((len(own.tokens), shape.hidden), 77, plain(shape.combine_dtype))
                    results, took_part = channel.moe_forward(
                        own.tokens,
                        own.experts,
                        own.weights,
                        lambda packed, rows, shape=shape: compute(shape, rank, packed, rows),
                        out=out,
                        packed=packed,
                        timeout=TIMEOUT_S,
                    )
                    assert results is out
                assert took_part == tuple(range(ranks))
                correct = expected(shape, own, took_part)
                assert results.dtype == correct.dtype and results.tobytes() == correct.tobytes(), (number, step)
                digest.update(results.tobytes())
    print("digest", digest.hexdigest())


def plain(dtype: str) -> str:
    return {"bfloat16": "uint16", "float8": "uint8"}.get(dtype, dtype)


def row_len(shape: Shape) -> int:
    return int(reference.to_rows(np.zeros(shape.hidden), shape.dispatch_dtype).shape[-1])


STEPS = 12


def kills(world: World, rank: int, ranks: int, seed: int, extra: str) -> None:
    """Ranks kill themselves at the points in ``extra``: ``rank@step:point,…``. The others exclude them and continue."""
    shape = Shape(ranks)
    planned = {}
    for kill in extra.split(","):
        when, point = kill.split(":")
        victim, step = (int(word) for word in when.split("@"))
        planned[step, point] = victim
    members = tuple(range(ranks))
    with Channel(world, **shape.settings, timeout=TIMEOUT_S) as channel:

        def kill_at(point: str) -> None:
            if planned.get((step, point)) == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        def excluding_missing(wait: Any) -> Any:
            while True:
                began = time.monotonic()
                try:
                    return wait()
                except RanksMissing as missing:
                    # At most once per wait: an excluded rank is not waited for again.
                    print("late", *missing.ranks, f"{time.monotonic() - began:.3f}", flush=True)
                    channel.exclude(missing.ranks)

        for step in range(STEPS):
            batch = draw(shape, shape.tokens_max, "any", [seed, step, rank])
            kill_at("idle")
            dispatching = channel.start_dispatch(batch.tokens, batch.experts, batch.weights)
            kill_at("dispatching")
            dispatched = excluding_missing(lambda step=dispatching: step.wait_packed(timeout=RANK_TIMEOUT_S))
            kill_at("dispatched")
            dispatched.scatter(compute(shape, rank, dispatched.packed, dispatched.rows_per_expert))
            kill_at("scattered")
            results, took_part = excluding_missing(lambda step=dispatched: step.combine(timeout=RANK_TIMEOUT_S))
            assert results.tobytes() == expected(shape, batch, took_part).tobytes(), step
            assert set(took_part) <= set(members)
            if took_part != members:
                print("lost", step, *sorted(set(members) - set(took_part)), flush=True)
            members = took_part
    print("done", *members)


def main() -> None:
    scenario, path, *numbers, extra = sys.argv[1:]
    rank, ranks, seed = (int(number) for number in numbers)
    with World(path, rank, ranks, 64 << 20, timeout=TIMEOUT_S) as world:
        {"sweep": sweep, "kills": kills}[scenario](world, rank, ranks, seed, extra)


if __name__ == "__main__":
    main()
