"""A small inference engine on ``moontide.blocks``: decodes with paged attention, suspends a sequence, and resumes it in
another process.

    python decode.py                        # with a cluster in this process
    python decode.py --master host:7400     # with a running cluster

The model is random, with a fixed seed: two layers, four heads that share two heads of keys and values. Attention reads
the rows of earlier tokens block by block, without a copy. After every step the program compares the logits with those
of a computation over all tokens without a cache.

The first process decodes the whole sequence. Then it decodes half of the same prompt again and suspends the sequence to
the store. A second process with an empty cache resumes it, and must produce the same tokens without computing the first
half.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

import moontide
from moontide.blocks import BlockCache, SequenceView, SuspendedSequence, namespace_of

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 4, 2, 8, 32, 64
BLOCK_TOKENS = 8
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, VOCABULARY, 37)]
STEPS = 24
SUSPENDED_KEY = "examples/decode/suspended"

#: Array of float32. numpy's annotations lose the element type at the first operator.
Array: TypeAlias = Any


class Model:
    """Weights, and the computation between attentions."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def weights(rows: int, columns: int) -> Array:
            return (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

        self.embedding = weights(VOCABULARY, WIDTH) * np.float32(np.sqrt(VOCABULARY))
        self.queries = [weights(WIDTH, HEADS * DIM) for _ in range(LAYERS)]
        self.keys = [weights(WIDTH, KV_HEADS * DIM) for _ in range(LAYERS)]
        self.values = [weights(WIDTH, KV_HEADS * DIM) for _ in range(LAYERS)]
        self.out = [weights(HEADS * DIM, WIDTH) for _ in range(LAYERS)]
        self.up = [weights(WIDTH, 2 * WIDTH) for _ in range(LAYERS)]
        self.down = [weights(2 * WIDTH, WIDTH) for _ in range(LAYERS)]

    def embed(self, tokens: list[int], positions: list[int]) -> Array:
        angles = np.outer(positions, 1.0 / 100.0 ** (np.arange(WIDTH // 2) / (WIDTH // 2)))
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        return self.embedding[tokens] + waves

    def projections(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each ``[tokens, heads, dim]``."""
        x = _normal(x)
        return (
            (x @ self.queries[layer]).reshape(-1, HEADS, DIM),
            (x @ self.keys[layer]).reshape(-1, KV_HEADS, DIM),
            (x @ self.values[layer]).reshape(-1, KV_HEADS, DIM),
        )

    def after(self, layer: int, x: Array, attended: Array) -> Array:
        x = x + attended.reshape(-1, HEADS * DIM) @ self.out[layer]
        return x + np.maximum(_normal(x) @ self.up[layer], 0) @ self.down[layer]

    def logits(self, x: Array) -> Array:
        return _normal(x) @ self.embedding.T


def _normal(x: Array) -> Array:
    return (x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)).astype(np.float32)


class Attention:
    """Online softmax over keys that arrive in parts: keeps the greatest score, and sums relative to it."""

    def __init__(self, queries: Array) -> None:
        # One group of queries per head of keys.
        self.queries = queries.reshape(len(queries), KV_HEADS, HEADS // KV_HEADS, DIM) / np.float32(np.sqrt(DIM))
        shape = self.queries.shape[:3]
        self.greatest = np.full(shape, -np.inf, np.float32)
        self.weights = np.zeros(shape, np.float32)
        self.sum = np.zeros((*shape, DIM), np.float32)

    def add(self, keys: Array, values: Array, visible: Array = None) -> None:
        scores = np.einsum("qkgd,tkd->qkgt", self.queries, keys)
        if visible is not None:
            scores = np.where(visible[:, None, None, :], scores, np.float32(-np.inf))
        greatest = np.maximum(self.greatest, scores.max(axis=-1))
        shrink, weights = np.exp(self.greatest - greatest), np.exp(scores - greatest[..., None])
        self.weights = self.weights * shrink + weights.sum(axis=-1)
        self.sum = self.sum * shrink[..., None] + np.einsum("qkgt,tkd->qkgd", weights, values)
        self.greatest = greatest

    def result(self) -> Array:
        return (self.sum / self.weights[..., None]).reshape(len(self.sum), HEADS, DIM)


def dense(model: Model, tokens: list[int]) -> Array:
    """Returns the logits after all tokens, computed without a cache."""
    x = model.embed(tokens, list(range(len(tokens))))
    visible = np.tri(len(tokens), dtype=bool)
    for layer in range(LAYERS):
        queries, keys, values = model.projections(layer, x)
        keys, values = keys.repeat(HEADS // KV_HEADS, axis=1), values.repeat(HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,thd->hqt", queries, keys) / np.float32(np.sqrt(DIM))
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = model.after(layer, x, np.einsum("hqt,thd->qhd", weights, values).astype(np.float32))
    return model.logits(x[-1:])[0]


class Engine:
    """The model with a cache."""

    def __init__(self) -> None:
        self.model = Model()
        self.cache = BlockCache(
            layers=LAYERS, kv_heads=KV_HEADS, dim=DIM, block_tokens=BLOCK_TOKENS, dtype="float32", blocks=64
        )
        self.namespace = namespace_of(self.cache, "examples/decode", revision="seed 0")
        self.computed = 0

    def forward(self, sequence: int) -> Array:
        """Computes the rows of all tokens that have none, and returns the logits after the last token."""
        tokens = self.cache.tokens(sequence)
        # In this order: if the view existed first, the writer would copy the last block, because a reader has it.
        with self.cache.writer(sequence) as writer, self.cache.view(sequence) as past:
            new = writer.tokens
            assert past.tokens == new.start
            x = self.model.embed([tokens[at] for at in new], [self.cache.positions(sequence)[at] for at in new])
            for layer in range(LAYERS):
                queries, keys, values = self.model.projections(layer, x)
                attention = Attention(queries)
                for old_keys, old_values in zip(past.rows("k", layer), past.rows("v", layer)):
                    attention.add(old_keys.numpy(), old_values.numpy())
                attention.add(keys, values, np.tri(len(new), dtype=bool))
                x = self.model.after(layer, x, attention.result())
                writer.write("k", layer, keys)
                writer.write("v", layer, values)
            writer.mark_written(len(new))
        self.computed += len(new)
        return self.model.logits(x[-1:])[0]

    def decode(self, sequence: int, steps: int) -> list[int]:
        """Decodes ``steps`` tokens. The last one has no rows yet."""
        made: list[int] = []
        for _ in range(steps):
            logits = self.forward(sequence)
            expected = dense(self.model, self.cache.tokens(sequence))
            np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
            made.append(int(logits.argmax()))
            assert made[-1] == int(expected.argmax())
            self.cache.append(sequence, made[-1])
            self.check_table(sequence)
        return made

    def check_table(self, sequence: int) -> None:
        """Compares the arena with a block table, as a paged kernel takes them, with the view."""
        with self.cache.view(sequence) as view:
            arena, table = self.cache.arena("k", 1).numpy(), view.block_table()
            gathered = arena[table].reshape(-1, KV_HEADS, DIM)[: view.tokens]
            np.testing.assert_array_equal(gathered, rows_of(view, "k", 1))


def rows_of(view: SequenceView, plane: Any, layer: int) -> Array:
    return np.concatenate([rows.numpy() for rows in view.rows(plane, layer)])


def second_process(master: str) -> None:
    """Resumes the suspended sequence, continues decoding, and prints the tokens."""
    engine = Engine()
    with moontide.Store(master) as store:
        data = store.get(SUSPENDED_KEY)
        assert data is not None, "the first process has suspended the sequence"
        sequence = engine.cache.resume(SuspendedSequence(data), store, engine.namespace)
        computed_tokens = engine.cache.computed_tokens(sequence)
        assert computed_tokens == len(PROMPT) + STEPS // 2 - 1, computed_tokens
        made = engine.decode(sequence, STEPS - STEPS // 2)
    # Only the last appended token and the following ones were computed, nothing of the first half.
    assert engine.computed == len(made)
    print(*made)


def first_process(master: str) -> None:
    engine = Engine()
    sequence, _ = engine.cache.allocate(PROMPT)
    expected = engine.decode(sequence, STEPS)
    assert engine.cache.stats()["copied_blocks"] == 0
    print(f"decoded {STEPS} tokens; all logits match the computation without a cache")

    # The same prompt again: its full blocks are cached and are not computed again.
    before = engine.computed
    again, cached_tokens = engine.cache.allocate(PROMPT)
    first_half = engine.decode(again, STEPS // 2)
    assert first_half == expected[: STEPS // 2]
    assert engine.computed - before == len(PROMPT) - cached_tokens + STEPS // 2 - 1
    print(f"decoded the first half again: {cached_tokens} of {len(PROMPT)} tokens of the prompt were cached")

    with moontide.Store(master) as store:
        suspended = engine.cache.suspend(again, store, engine.namespace)
        store.put(SUSPENDED_KEY, bytes(suspended), overwrite=True)
        print(f"suspended {suspended.computed_tokens} tokens to the store")
        command = [sys.executable, __file__, "--master", master, "--resume"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        store.remove(SUSPENDED_KEY)
    second_half = [int(word) for word in done.stdout.split()]
    assert first_half + second_half == expected, (first_half, second_half, expected)
    print(f"resumed in another process: the same {len(second_half)} tokens")


@contextmanager
def master_or_dev(master: str | None) -> Iterator[str]:
    """Returns the given master, or that of a new development cluster."""
    if master is not None:
        yield master
        return
    with moontide.dev(64 << 20) as dev:
        yield dev.master


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decode with a paged cache, suspend a sequence, and resume it in another process."
    )
    parser.add_argument("--master", help="host:port of a running cluster [default: a cluster in this process]")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with master_or_dev(arguments.master) as master:
        (second_process if arguments.resume else first_process)(master)


if __name__ == "__main__":
    main()
