"""Random calls, compared with a dict as the model."""

from __future__ import annotations

import random
import time

import pytest

import moontide

CALLS = 100_000
KEYS = 512
SIZES = [0, 1, 7, 128, 1000, 4096, 4097, 20_000, 65_536]


class Pair:
    """A store and its model, a dict. Counts calls: a batch of n keys counts as n calls."""

    def __init__(self, stores: list[moontide.Store], prefix: str, draw: random.Random) -> None:
        self.stores, self.prefix, self.draw = stores, prefix, draw
        self.known: dict[str, bytes] = {}
        self.noise = draw.randbytes(1 << 18)
        self.space = bytearray(SIZES[-1])
        self.spaces = [bytearray(SIZES[-1]) for _ in range(64)]
        self.held: list[tuple[moontide.View, bytes]] = []
        self.calls = 0

    @property
    def store(self) -> moontide.Store:
        return self.draw.choice(self.stores)

    def key(self) -> str:
        return f"{self.prefix}{self.draw.randrange(KEYS)}"

    def keys(self) -> list[str]:
        numbers = self.draw.sample(range(KEYS), self.draw.randrange(1, 64))
        return [f"{self.prefix}{number}" for number in numbers]

    def content(self) -> bytes:
        size = self.draw.choice(SIZES) if self.draw.random() < 0.5 else self.draw.randrange(2000)
        start = self.draw.randrange(len(self.noise) - size + 1)
        return self.noise[start : start + size]

    def put(self) -> None:
        key, content = self.key(), self.content()
        assert self.store.put(key, content) == (key not in self.known)
        self.known.setdefault(key, content)

    def overwrite(self) -> None:
        key, content = self.key(), self.content()
        assert self.store.put(key, content, overwrite=True)
        self.known[key] = content

    def put_from(self) -> None:
        key, content = self.key(), self.content()
        cut = self.draw.randrange(len(content) + 1)
        assert self.store.put_from(key, [content[:cut], content[cut:]], overwrite=True)
        self.known[key] = content

    def get(self) -> None:
        key = self.key()
        assert self.store.get(key) == self.known.get(key)

    def get_into(self) -> None:
        key = self.key()
        expected = self.known.get(key)
        length = self.store.get_into(key, self.space)
        assert length == (None if expected is None else len(expected))
        assert length is None or self.space[:length] == expected

    def get_view(self) -> None:
        key = self.key()
        view = self.store.get_view(key)
        assert (None if view is None else bytes(view)) == self.known.get(key)
        if view is not None:
            self.held.append((view, self.known[key]))
        while len(self.held) > 64:
            old, content = self.held.pop(self.draw.randrange(len(self.held)))
            assert bytes(old) == content, "a view does not change"

    def exists(self) -> None:
        key = self.key()
        assert self.store.exists(key) == (key in self.known)

    def remove(self) -> None:
        key = self.key()
        assert self.store.remove(key) == (self.known.pop(key, None) is not None)

    def batch_put(self) -> None:
        keys = self.keys()
        contents = [self.content() for _ in keys]
        overwrite = self.draw.random() < 0.5
        stored = self.store.batch_put(keys, contents, overwrite=overwrite)
        assert stored == [overwrite or key not in self.known for key in keys]
        for key, content in zip(keys, contents, strict=True):
            if overwrite:
                self.known[key] = content
            else:
                self.known.setdefault(key, content)
        self.calls += len(keys) - 1

    def batch_get(self) -> None:
        keys = self.keys()
        assert self.store.batch_get(keys) == [self.known.get(key) for key in keys]
        self.calls += len(keys) - 1

    def batch_get_into(self) -> None:
        keys = self.keys()
        lengths = self.store.batch_get_into(keys, self.spaces[: len(keys)])
        for key, space, length in zip(keys, self.spaces, lengths, strict=False):
            assert (None if length is None else space[:length]) == self.known.get(key)
        self.calls += len(keys) - 1

    def batch_get_view(self) -> None:
        keys = self.keys()
        views = self.store.batch_get_view(keys)
        assert [view and bytes(view) for view in views] == [self.known.get(key) for key in keys]
        self.calls += len(keys) - 1

    def batch_exists(self) -> None:
        keys = self.keys()
        assert self.store.batch_exists(keys) == [key in self.known for key in keys]
        self.calls += len(keys) - 1

    def batch_remove(self) -> None:
        keys = self.keys()[:16]
        assert self.store.batch_remove(keys) == [self.known.pop(key, None) is not None for key in keys]
        self.calls += len(keys) - 1

    def step(self) -> None:
        call = self.draw.choices(STEPS, WEIGHTS)[0]
        getattr(self, call)()
        self.calls += 1


WEIGHTED = {
    "put": 4,
    "overwrite": 4,
    "put_from": 2,
    "get": 20,
    "get_into": 20,
    "get_view": 20,
    "exists": 6,
    "remove": 4,
    "batch_put": 1,
    "batch_get": 2,
    "batch_get_into": 2,
    "batch_get_view": 2,
    "batch_exists": 2,
    "batch_remove": 1,
}
STEPS, WEIGHTS = list(WEIGHTED), list(WEIGHTED.values())


@pytest.mark.slow
def test_store_matches_dict_model(store, remote, key, seed):
    pair = Pair([store, store, remote], key(), random.Random(seed))
    begun = time.monotonic()
    while pair.calls < CALLS:
        pair.step()
    print(f"{pair.calls} calls in {time.monotonic() - begun:.1f} s")
    assert sorted(name.encode() for name in pair.known) == sorted(store.keys(key()))
    assert store.batch_get(list(pair.known)) == list(pair.known.values())
    assert all(bytes(view) == content for view, content in pair.held)


@pytest.mark.smoke
def test_store_matches_dict_model_short_run(store, key, seed):
    pair = Pair([store], key(), random.Random(seed))
    while pair.calls < CALLS // 50:
        pair.step()
    assert sorted(name.encode() for name in pair.known) == sorted(store.keys(key()))
