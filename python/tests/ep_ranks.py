"""A rank of a world: the program that test_ep.py starts, once for each rank.

    python ep_ranks.py SCENE PATH RANK RANKS SEED EXTRA

Each rank draws everybody's tokens from the seed, so that it can tell what it must receive and what must come back. What
it says on its standard output is for the test; a check that fails ends it with an error.
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

#: For what must happen: a machine may be busy.
PATIENCE = 60.0
#: After which a rank is given up where ranks die.
DEADLINE = 3.0

ROUTES = ["any", "one rank", "two ranks", "sparse"]


@dataclass
class Shape:
    """Settings of a channel, and what tests need to know of them."""

    ranks: int
    tokens_max: int = 5
    hidden: int = 40
    top_k: int = 4
    experts_per_rank: int = 8
    send: Any = "bfloat16"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def back(self) -> Any:
        return "bfloat16" if self.send == "float8" else self.send

    @property
    def settings(self) -> dict[str, Any]:
        names = ("tokens_max", "hidden", "top_k", "experts_per_rank", "send")
        return {name: getattr(self, name) for name in names} | self.more

    def bytes(self) -> int:
        return Channel.bytes(ranks=self.ranks, **self.settings)


@dataclass
class Batch:
    tokens: Any
    experts: Any
    weights: Any


def draw(shape: Shape, count: int, routes: str, seed: list[int]) -> Batch:
    """A rank's tokens of a step, and where they go."""
    random = np.random.default_rng(seed)
    numbers = random.uniform(-1, 1, (count, shape.hidden)).astype(np.float32)
    ranks, per_rank = shape.ranks, shape.experts_per_rank
    experts = np.full((count, shape.top_k), -1, np.int32 if seed[-1] % 2 else np.int64)
    for row in experts:
        # All tokens of all ranks to the last one; or to experts of two ranks, as groups limit it; or to any.
        allowed = {"one rank": [ranks - 1], "two ranks": random.permutation(ranks)[:2]}.get(routes, range(ranks))
        candidates = [rank * per_rank + local for rank in allowed for local in range(per_rank)]
        wanted = random.integers(0, shape.top_k + 1) if routes == "sparse" else shape.top_k
        wanted = min(int(wanted), len(candidates))
        row[:wanted] = random.permutation(candidates)[:wanted]
    weights = random.uniform(-1, 1, experts.shape).astype(np.float32)
    return Batch(reference.to_rows(numbers, shape.send), experts, weights)


def expert(number: int, numbers: Any) -> Any:
    """What an expert makes of numbers. Each is another."""
    return numbers * np.float32(1 + number * 0.125) + np.float32((number + 1) * 0.25)


def compute(shape: Shape, rank: int, packed: Any, rows_per_expert: Any) -> Any:
    """A rank's experts on the grouped layout. What the mask leaves out is poison."""
    results = np.full((*packed.shape[:2], shape.hidden), np.nan, np.float32)
    for local, rows in enumerate(rows_per_expert):
        numbers = reference.to_numbers(packed[local, :rows], shape.send, hidden=shape.hidden)
        results[local, :rows] = expert(rank * shape.experts_per_rank + local, numbers)
    return reference.to_rows(results, shape.back)


def expected(shape: Shape, batch: Batch, ranks: tuple[int, ...]) -> Any:
    return reference.layer(
        batch.tokens,
        batch.experts,
        batch.weights,
        expert,
        experts_per_rank=shape.experts_per_rank,
        hidden=shape.hidden,
        send=shape.send,
        back=shape.back,
        ranks=ranks,
    )


def by_parts(channel: Channel, shape: Shape, batches: list[Batch]) -> tuple[Any, tuple[int, ...]]:
    """A step in its parts, with everything looked at on the way."""
    me = channel.rank
    mine = batches[me]
    received = channel.send(mine.tokens, mine.experts, mine.weights).wait_packed(timeout=PATIENCE)
    assert received.sources == tuple(range(shape.ranks))
    rows, slots = reference.grouped(
        [batch.tokens for batch in batches],
        [batch.experts for batch in batches],
        rank=me,
        experts_per_rank=shape.experts_per_rank,
        tokens_max=shape.tokens_max,
    )
    counts = received.rows_per_expert
    assert counts.tolist() == [len(group) for group in slots]
    for local, group in enumerate(slots):
        assert received.group(local).tolist() == group
        for row, slot in enumerate(group):
            assert (received.packed[local, row] == rows[local][row]).all()
            source, token = divmod(slot, shape.tokens_max)
            assert (received.tokens(source).numpy()[token] == rows[local][row]).all()
    received.scatter(compute(shape, me, received.packed, counts))
    return received.combine(timeout=PATIENCE)


def sweep(world: World, rank: int, ranks: int, seed: int, extra: str) -> None:
    """Every K, all dtypes, pull and push, one buffer and two, and the size of a real model."""
    dtypes = ["bfloat16", "float16", "float32", "float8"]
    shapes = [
        Shape(ranks, top_k=k, send=dtypes[k % 4], more={"returns": ["pull", "push"][k // 4 % 2], "buffers": 1 + k % 2})
        for k in range(1, 9)
    ]
    shapes.append(Shape(ranks, hidden=300, send="float8"))
    shapes.append(Shape(ranks, hidden=7168, top_k=8, tokens_max=2))
    digest = hashlib.sha256()
    for number, shape in enumerate(shapes):
        with Channel(world, **shape.settings, timeout=PATIENCE) as channel:
            random = np.random.default_rng([seed, number])
            packed = np.empty((shape.experts_per_rank, ranks * shape.tokens_max, row_len(shape)), plain(shape.send))
            for step in range(2 if shape.hidden > 1000 else 6):
                # Nobody has tokens, all have as many as there can be, some have none, and anything between.
                counts = random.integers(0, shape.tokens_max + 1, ranks)
                if step < 2:
                    counts[:] = step * shape.tokens_max
                elif step == 2:
                    counts[0] = 0
                routes = ROUTES[step % len(ROUTES)]
                batches = [draw(shape, int(counts[of]), routes, [seed, number, step, of]) for of in range(ranks)]
                mine = batches[rank]
                if step % 2:
                    results, took_part = by_parts(channel, shape, batches)
                else:
                    out = np.full((len(mine.tokens), shape.hidden), 77, plain(shape.back))
                    results, took_part = channel.moe_forward(
                        mine.tokens,
                        mine.experts,
                        mine.weights,
                        lambda packed, rows, shape=shape: compute(shape, rank, packed, rows),
                        out=out,
                        packed=packed,
                        timeout=PATIENCE,
                    )
                    assert results is out
                assert took_part == tuple(range(ranks))
                wanted = expected(shape, mine, took_part)
                assert results.dtype == wanted.dtype and results.tobytes() == wanted.tobytes(), (number, step)
                digest.update(results.tobytes())
    print("digest", digest.hexdigest())


def plain(dtype: str) -> str:
    return {"bfloat16": "uint16", "float8": "uint8"}.get(dtype, dtype)


def row_len(shape: Shape) -> int:
    return int(reference.to_rows(np.zeros(shape.hidden), shape.send).shape[-1])


STEPS = 12


def mortal(world: World, rank: int, ranks: int, seed: int, extra: str) -> None:
    """``extra`` says where ranks kill themselves: ``rank@step:place,…``. The others go on without them."""
    shape = Shape(ranks)
    deaths = {}
    for death in extra.split(","):
        who, place = death.split(":")
        victim, step = (int(word) for word in who.split("@"))
        deaths[step, place] = victim
    members = tuple(range(ranks))
    with Channel(world, **shape.settings, timeout=PATIENCE) as channel:

        def die_at(place: str) -> None:
            if deaths.get((step, place)) == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        def without_the_dead(wait: Any) -> Any:
            while True:
                began = time.monotonic()
                try:
                    return wait()
                except RanksMissing as missing:
                    # Once for each wait at most: who is gone is not waited for again.
                    print("late", *missing.ranks, f"{time.monotonic() - began:.3f}", flush=True)
                    channel.leave_behind(missing.ranks)

        for step in range(STEPS):
            batch = draw(shape, shape.tokens_max, "any", [seed, step, rank])
            die_at("idle")
            sent = channel.send(batch.tokens, batch.experts, batch.weights)
            die_at("sent")
            received = without_the_dead(lambda sent=sent: sent.wait_packed(timeout=DEADLINE))
            die_at("received")
            received.scatter(compute(shape, rank, received.packed, received.rows_per_expert))
            die_at("worked")
            results, took_part = without_the_dead(lambda received=received: received.combine(timeout=DEADLINE))
            assert results.tobytes() == expected(shape, batch, took_part).tobytes(), step
            assert set(took_part) <= set(members)
            if took_part != members:
                print("lost", step, *sorted(set(members) - set(took_part)), flush=True)
            members = took_part
    print("done", *members)


def main() -> None:
    scene, path, *numbers, extra = sys.argv[1:]
    rank, ranks, seed = (int(number) for number in numbers)
    with World(path, rank, ranks, 64 << 20, timeout=PATIENCE) as world:
        {"sweep": sweep, "mortal": mortal}[scene](world, rank, ranks, seed, extra)


if __name__ == "__main__":
    main()
