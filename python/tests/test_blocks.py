"""``moontide.blocks``: the engine's own cache. What it holds is compared with dense arrays that a test keeps itself."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_fork import in_child

import moontide
from moontide.blocks import BlockCache, Parked, namespace_of
from moontide.kv import block_hashes

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "decode.py"
LAYERS, HEADS, DIM, TOKENS = 2, 3, 4, 4

#: What rows of each type are in numpy.
PLAIN = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}


def make(**settings) -> BlockCache:
    usual = {"layers": LAYERS, "kv_heads": HEADS, "dim": DIM, "block_tokens": TOKENS, "dtype": "float32", "blocks": 32}
    return BlockCache(**(usual | settings))


def numbers(tokens, plane="k", layer=0, start=0, dtype="float32", shape=(HEADS, DIM)) -> np.ndarray:
    """Rows that depend on token, position, plane and layer, so that none can be mistaken for another."""
    per_token = int(np.prod(shape))
    base = [token * 7 + (start + at) * 131 + layer * 17 + (plane == "v") * 5 for at, token in enumerate(tokens)]
    rows = np.array(base)[:, None] + np.arange(per_token)
    return (rows % 251).astype(dtype).reshape(len(tokens), *shape)


def fill(cache: BlockCache, sequence: int, planes="kv", **kind) -> None:
    """Computes all rows that are missing."""
    with cache.fill(sequence) as filling:
        new = filling.tokens
        tokens = cache.tokens(sequence)[new.start : new.stop]
        for plane in planes:
            for layer in range(LAYERS):
                filling.write(plane, layer, numbers(tokens, plane, layer, new.start, **kind))
        filling.complete(len(new))


def shown(view, plane: str, layer: int) -> np.ndarray:
    return np.concatenate([rows.numpy() for rows in view.rows(plane, layer)])


def check(cache: BlockCache, sequence: int, planes="kv", **kind) -> None:
    """The cache shows what a dense array would."""
    tokens = cache.tokens(sequence)[: cache.filled(sequence)]
    with cache.view(sequence) as view:
        assert view.tokens == len(view) == len(tokens)
        for plane in planes:
            for layer in range(LAYERS):
                expected = numbers(tokens, plane, layer, **kind)
                np.testing.assert_array_equal(shown(view, plane, layer), expected)
                arena = cache.arena(plane, layer).numpy()
                gathered = arena[view.block_table()].reshape(-1, *expected.shape[1:])[: len(tokens)]
                np.testing.assert_array_equal(gathered, expected)


# --------------------------------------------------------------------------------------------------- life of a sequence


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("contiguous", [None, 0, 2])
def test_a_sequence_grows_and_goes(order, contiguous):
    cache = make(order=order, contiguous=contiguous)
    sequence, shared = cache.allocate(range(10))
    assert (shared, cache.filled(sequence)) == (0, 0)
    fill(cache, sequence)
    for token in range(100, 120):
        cache.append(sequence, token)
        fill(cache, sequence)
        check(cache, sequence)
    assert cache.tokens(sequence) == [*range(10), *range(100, 120)]
    assert cache.positions(sequence) == list(range(30))
    cache.truncate(sequence, 13)
    check(cache, sequence)
    cache.append(sequence, 5)
    fill(cache, sequence)
    check(cache, sequence)
    assert cache.sequences() == [sequence]
    cache.free(sequence)
    cache.clear()
    stats = cache.stats()
    assert (stats["free"], stats["sequences"], cache.sequences()) == (32, 0, [])


def test_the_block_table_is_of_int32():
    cache = make()
    sequence, _ = cache.allocate(np.arange(9))
    table = cache.block_table(sequence)
    assert (table.dtype, table.shape) == (np.dtype("int32"), (3,))
    fill(cache, sequence)
    view = cache.view(sequence)
    assert view.blocks == table.tolist() == view.block_table().tolist()
    assert cache.block_table(cache.allocate([])[0]).shape == (0,)


def test_a_prefix_is_shared_and_a_salt_keeps_apart():
    cache = make()
    first, _ = cache.allocate(range(10))
    fill(cache, first)
    second, shared = cache.allocate(range(10))
    assert shared == 8
    assert cache.block_table(second)[:2].tolist() == cache.block_table(first)[:2].tolist()
    assert cache.allocate(range(10), salt="another tenant")[1] == 0
    assert cache.allocate(range(10), "", "an adapter")[1] == 0
    fill(cache, second)
    check(cache, second)
    cache.free(first)
    cache.free(second)
    assert cache.allocate(range(8))[1] == 4, "the last token is to be computed"


def test_hashes_are_those_of_kv():
    cache = make()
    sequence, _ = cache.allocate(range(11), salt="tänant", adapter="lora")
    assert cache.hashes(sequence) == block_hashes(range(11), TOKENS, salt="tänant", adapter="lora")


def test_forks_part_when_one_writes():
    cache = make()
    parent, _ = cache.allocate(range(6))
    fill(cache, parent)
    child = cache.fork(parent)
    assert cache.block_table(child).tolist() == cache.block_table(parent).tolist()
    for sequence, token in ((parent, 50), (child, 60)):
        cache.append(sequence, token)
        fill(cache, sequence)
    assert cache.block_table(child)[0] == cache.block_table(parent)[0]
    assert cache.block_table(child)[1] != cache.block_table(parent)[1]
    assert cache.stats()["copied_blocks"] == 1
    check(cache, parent)
    check(cache, child)


def test_an_old_number_is_nobodys():
    cache = make()
    sequence, _ = cache.allocate([1])
    cache.free(sequence)
    again, _ = cache.allocate([1])
    assert again != sequence
    for use in (
        lambda: cache.append(sequence, 1),
        lambda: cache.fill(sequence),
        lambda: cache.view(sequence),
        lambda: cache.free(sequence),
        lambda: cache.fork(sequence),
        lambda: cache.block_table(sequence),
        lambda: cache.tokens(0),
        lambda: cache.hashes(2**64 - 1),
    ):
        with pytest.raises(moontide.UnknownSequence, match="was freed, or is another cache's") as raised:
            use()
    assert raised.value.sequence == 2**64 - 1
    assert isinstance(raised.value, LookupError) and raised.value.code == moontide.Gone.code
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.sequence) == (str(raised.value), raised.value.sequence)


def test_a_full_cache_says_by_how_much():
    cache = make(blocks=4)
    first, _ = cache.allocate(range(9))
    with pytest.raises(moontide.NoBlocks, match="2 blocks are wanted; 1 are free") as raised:
        cache.allocate(range(100, 105))
    error = raised.value
    assert (error.wanted, error.free, error.longest, error.cached, error.waiting) == (2, 1, 1, 0, 0)
    assert isinstance(error, moontide.NoSpace) and isinstance(error, MemoryError) and error.retryable
    assert pickle.loads(pickle.dumps(error)).wanted == 2
    cache.free(first)
    cache.allocate(range(100, 105))


def test_it_grows_and_shrinks():
    cache = make(blocks=4, blocks_max=16)
    first, _ = cache.allocate(range(16))
    fill(cache, first)
    with pytest.raises(moontide.NoBlocks):
        cache.append(first, 1)
    cache.resize(16)
    second, _ = cache.allocate(range(100, 140))
    fill(cache, second)
    cache.free(first)
    with pytest.raises(moontide.NoBlocks):
        cache.resize(5)
    view = cache.view(second)
    expected = numbers(range(100, 140))
    cache.resize(10)
    check(cache, second)
    assert cache.stats()["shrinking"], "the view has blocks behind the end"
    np.testing.assert_array_equal(shown(view, "k", 0), expected)
    view.release()
    assert not cache.stats()["shrinking"]
    check(cache, second)
    with pytest.raises(moontide.InvalidArgument, match="blocks_max"):
        cache.resize(17)


def test_thinning_keeps_what_is_worth_most():
    cache = make()
    sequence, _ = cache.allocate(range(12))
    with pytest.raises(moontide.NotReady):
        cache.thin(sequence, first=1, last=1, budget=4)
    fill(cache, sequence)
    before = numbers(range(12), "v", 1)
    cache.add_worth(sequence, np.array([0, 0, 9, 0, 0, 8, 0, 0, 0, 0, 0, 0], dtype="float32"))
    assert cache.thin(sequence, first=1, last=1, budget=4) == [0, 2, 5, 11]
    assert cache.positions(sequence) == [0, 2, 5, 11]
    np.testing.assert_array_equal(shown(cache.view(sequence), "v", 1), before[[0, 2, 5, 11]])
    cache.append(sequence, 99)
    assert cache.positions(sequence)[-1] == 12


def test_pages_for_people():
    cache = make()
    sequence, _ = cache.allocate(range(5))
    assert "Layers: 2, Heads: 3, HeadDim: 4" in cache.dump()
    assert cache.block_map().count("X") == 3, "two blocks, and the letter's meaning"
    assert "BlockCache" in repr(cache) and "SequenceView of 0 tokens" in repr(cache.view(sequence))
    stats = cache.stats()
    parts = ("held", "cached", "waiting", "reserved", "free")
    assert sum(stats[part] for part in parts) == stats["blocks"]


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": 0},
        {"blocks": 0},
        {"blocks": 9, "blocks_max": 8},
        {"blocks": 1 << 31},
        {"kv_heads": None},
        {"latent": (4, 2)},
        {"dtype": "float64"},
        {"order": "layer"},
        {"sequences_max": 0},
        {"layers": 4_000_000_000, "blocks": 1 << 24},
    ],
)
def test_caches_that_make_no_sense(settings):
    with pytest.raises(moontide.InvalidArgument):
        make(**settings)


def test_a_cache_that_the_system_has_no_addresses_for():
    with pytest.raises(moontide.NoSpace):
        make(layers=4_000_000_000, blocks=1 << 20)


def test_there_is_a_limit_of_sequences():
    cache = make(sequences_max=2)
    cache.allocate([1])
    cache.allocate([1])
    with pytest.raises(moontide.Busy, match="sequences_max"):
        cache.allocate([1])


# ---------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("dtype", PLAIN)
def test_every_type_comes_back(dtype, order):
    cache, plain = make(dtype=dtype, order=order), PLAIN[dtype]
    sequence, _ = cache.allocate(range(10))
    fill(cache, sequence, dtype=plain)
    check(cache, sequence, dtype=plain)
    rows = cache.view(sequence).rows("k", 0)
    assert [each.shape for each in rows] == [(4, HEADS, DIM), (4, HEADS, DIM), (2, HEADS, DIM)]
    assert rows[0].dtype == {"float8": "float8_e4m3fn"}.get(dtype, dtype) == cache.dtype
    assert rows[0].nbytes == rows[0].numpy().nbytes and rows[0].strides == rows[0].numpy().strides
    assert np.asarray(rows[0]).dtype == plain
    assert rows[0].__array_interface__["strides"] == rows[0].strides
    assert rows[0].ptr() == rows[0].numpy().ctypes.data


def test_types_of_ml_dtypes_are_written_as_they_are():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = make(dtype="bfloat16")
    sequence, _ = cache.allocate([1, 2])
    value = np.full((2, HEADS, DIM), 1.5, ml_dtypes.bfloat16)
    with cache.fill(sequence) as filling:
        for plane in "kv":
            for layer in range(LAYERS):
                filling.write(plane, layer, value)
        filling.complete()
    np.testing.assert_array_equal(shown(cache.view(sequence), "k", 0).view(ml_dtypes.bfloat16), value)


def test_a_compressed_vector_has_one_plane():
    cache = make(kv_heads=None, dim=None, latent=(5, 2))
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence, planes=["latent"], shape=(1, 7))
    check(cache, sequence, planes=["latent", "k"], shape=(1, 7))
    with pytest.raises(moontide.InvalidArgument, match="latent"):
        cache.arena("v", 0)


def test_rows_by_dlpack():
    cache = make(order="head")
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    rows = cache.view(sequence).rows("k", 1)[0]
    lent = np.from_dlpack(rows)
    assert not lent.flags.writeable and lent.ctypes.data == rows.ptr()
    np.testing.assert_array_equal(lent, numbers(range(4), "k", 1))
    copy = np.from_dlpack(rows, copy=True)
    assert copy.flags.writeable and copy.ctypes.data != rows.ptr()
    np.testing.assert_array_equal(copy, lent)
    assert np.from_dlpack(cache.arena("k", 1)).flags.writeable
    with pytest.raises(BufferError, match="gaps"):
        hashlib.sha256(rows)  # which asks for plain bytes


@pytest.mark.torch
@pytest.mark.parametrize("dtype", PLAIN)
def test_torch_sees_the_type_itself(dtype):
    torch = pytest.importorskip("torch")
    cache = make(dtype=dtype, order="head")
    sequence, _ = cache.allocate(range(6))
    kind = getattr(torch, cache.dtype)
    value = torch.arange(6 * HEADS * DIM, dtype=torch.float32).reshape(6, HEADS, DIM).to(kind)
    with cache.fill(sequence) as filling:
        for plane in "kv":
            for layer in range(LAYERS):
                filling.write(plane, layer, value)
        filling.complete()
    view = cache.view(sequence)
    cache.free(sequence)
    tensors = [rows.torch() for rows in view.rows("v", 1)]
    del view
    gc.collect()
    cache.clear()
    other, _ = cache.allocate(range(100, 200))
    with cache.fill(other) as filling:
        filling.write("v", 1, torch.zeros(100, HEADS, DIM).to(kind))
        filling.complete()
    assert all(tensor.dtype == kind for tensor in tensors)
    assert torch.equal(torch.cat([tensor.float() for tensor in tensors]), value.float())


# ---------------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("contiguous", [None, 1])
def test_what_a_view_shows_outlives_its_sequence(contiguous):
    cache = make(blocks=8, contiguous=contiguous)
    sequence, _ = cache.allocate(range(10))
    fill(cache, sequence)
    expected = {plane: numbers(range(10), plane, 1) for plane in "kv"}
    view = cache.view(sequence)
    arrays = {plane: [rows.numpy() for rows in view.rows(plane, 1)] for plane in "kv"}
    whole = view.contiguous("k", 1)
    whole_array = None if whole is None else whole.numpy()
    assert contiguous is None or whole_array is not None
    cache.append(sequence, 10)
    fill(cache, sequence)
    check(cache, sequence)
    cache.free(sequence)
    del view, whole
    gc.collect()
    # Everything that can be used again is, many times over.
    for round in range(20):
        other, _ = cache.allocate(range(1000 * round + 500, 1000 * round + 516))
        fill(cache, other)
        cache.free(other)
        cache.clear()
        for plane in "kv":
            np.testing.assert_array_equal(np.concatenate(arrays[plane]), expected[plane])
        if whole_array is not None:
            np.testing.assert_array_equal(whole_array, expected["k"])
    assert cache.stats()["held"] == 3
    del arrays, whole_array
    gc.collect()
    assert (cache.stats()["held"], cache.stats()["waiting"]) == (0, 0)
    cache.clear()
    assert cache.stats()["free"] == 8


def test_a_view_outlives_its_cache():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    view, arena = cache.view(sequence), cache.arena("k", 0).numpy()
    blocks = view.blocks
    del cache
    gc.collect()
    np.testing.assert_array_equal(shown(view, "k", 0), numbers(range(6)))
    np.testing.assert_array_equal(arena[blocks[0]], numbers(range(4)))


def test_a_view_shows_one_moment():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    view = cache.view(sequence)
    cache.truncate(sequence, 2)
    for token in (70, 71, 72, 73):
        cache.append(sequence, token)
    fill(cache, sequence)
    np.testing.assert_array_equal(shown(view, "k", 0), numbers(range(6)))
    check(cache, sequence)
    assert view.tokens == 6


def test_views_cannot_be_written():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    rows = cache.view(sequence).rows("k", 0)[0]
    assert rows.readonly and memoryview(rows).readonly
    with pytest.raises(ValueError, match="read-only"):
        rows.numpy()[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE|writeable"):
        rows.numpy().flags.writeable = True


def test_a_released_view_shows_nothing_and_its_arrays_stay():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    with cache.view(sequence) as view:
        rows = view.rows("k", 0)
    view.release()
    with pytest.raises(moontide.Closed):
        view.rows("k", 0)
    assert "released" in repr(view)
    cache.free(sequence)
    np.testing.assert_array_equal(np.concatenate(rows), numbers(range(6)))


@pytest.mark.parametrize(("plane", "layer"), [("q", 0), ("k", 2), ("v", 99)])
def test_places_that_are_not_there(plane, layer):
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    with cache.fill(sequence) as filling:
        for use in (cache.arena, cache.view(sequence).rows, cache.view(sequence).contiguous, filling.rows):
            with pytest.raises(moontide.InvalidArgument):
                use(plane, layer)


# ---------------------------------------------------------------------------------------------------------------- fills


def test_rows_are_written_in_place():
    cache = make()
    sequence, _ = cache.allocate(range(10))
    with cache.fill(sequence) as filling:
        for plane in "kv":
            for layer in range(LAYERS):
                start = 0
                for rows in filling.rows(plane, layer):
                    assert not rows.readonly
                    rows.numpy()[:] = numbers(range(start, start + len(rows)), plane, layer, start)
                    start += len(rows)
        del rows
        filling.complete()
    check(cache, sequence)


def test_what_could_still_be_written_is_not_committed():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    filling = cache.fill(sequence)
    array = filling.rows("k", 0)[1].numpy()
    part_of_it = array[:1, :, 1:]
    filling.complete()
    for _ in range(2):
        with pytest.raises(BufferError, match="lent to 1 arrays"):
            filling.commit()
    del array
    with pytest.raises(BufferError):
        filling.commit()
    assert cache.filled(sequence) == 0
    del part_of_it
    filling.commit()
    assert cache.filled(sequence) == 6
    with pytest.raises(moontide.Closed, match="committed"):
        filling.commit()
    with pytest.raises(moontide.Closed):
        filling.rows("k", 0)


def test_what_raises_leaves_nothing():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    with pytest.raises(ZeroDivisionError):
        with cache.fill(sequence) as filling:
            filling.complete(4)
            1 / 0
    assert cache.filled(sequence) == 0
    fill(cache, sequence)
    check(cache, sequence)


def test_an_abandoned_fill_ends_with_its_arrays():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    filling = cache.fill(sequence)
    array = filling.rows("k", 0)[0].numpy()
    filling.abandon()
    filling.abandon()
    for use in (cache.fill, cache.free, cache.fork):
        with pytest.raises(moontide.Busy, match="being written"):
            use(sequence)
    array[:] = 3
    del array
    fill(cache, sequence)
    check(cache, sequence)


def test_a_dropped_fill_is_over():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    cache.fill(sequence)
    cache.free(sequence)


def test_rows_in_parts():
    cache = make()
    sequence, _ = cache.allocate(range(10))
    with cache.fill(sequence) as filling:
        for start, stop in ((0, 3), (3, 4), (4, 9)):
            assert filling.tokens == range(start, 10)
            for plane in "kv":
                for layer in range(LAYERS):
                    filling.write(plane, layer, numbers(range(start, stop), plane, layer, start))
            filling.complete(stop - start)
    assert cache.filled(sequence) == 9
    check(cache, sequence)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((7, HEADS, DIM), "float32"),
        np.zeros((6, HEADS, DIM), "float64"),
        np.zeros((6, HEADS, DIM), "float16"),
        np.zeros((6, HEADS, DIM + 1), "float32"),
        np.zeros(6 * HEADS * DIM, "float32"),
        np.float32(1),
        b"123",
    ],
)
def test_arrays_that_do_not_fit(array):
    cache = make()
    sequence, _ = cache.allocate(range(6))
    with cache.fill(sequence) as filling:
        with pytest.raises(moontide.InvalidArgument):
            filling.write("k", 0, array)
        with pytest.raises(moontide.InvalidArgument, match="only 6"):
            filling.complete(7)


def test_arrays_of_any_form_are_written():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    expected = numbers(range(6))
    with cache.fill(sequence) as filling:
        filling.write("k", 0, expected.reshape(6, HEADS * DIM))
        filling.write("k", 1, np.asfortranarray(expected))
        filling.write("v", 0, memoryview(expected))
        for rows in filling.rows("v", 0)[:1]:
            # Onto itself, and from elsewhere in the same memory.
            filling.write("v", 0, rows)
            filling.write("v", 1, rows.numpy()[::-1])
        del rows
        filling.complete()
    view = cache.view(sequence)
    for plane, layer in (("k", 0), ("k", 1), ("v", 0)):
        np.testing.assert_array_equal(shown(view, plane, layer), expected)
    np.testing.assert_array_equal(shown(view, "v", 1)[:4], expected[3::-1])


def test_threads_take_turns():
    """Sequences of several threads in one cache, with copies large enough to be made without Python's lock."""
    cache = BlockCache(layers=1, kv_heads=8, dim=128, block_tokens=16, dtype="float32", blocks=512)
    failures: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for turn in range(15):
                tokens = range(10_000 * me + turn, 10_000 * me + turn + 50)
                sequence, _ = cache.allocate(tokens)
                value = np.full((50, 8, 128), me * 100 + turn, "float32")
                with cache.fill(sequence) as filling:
                    filling.write("k", 0, value)
                    filling.write("v", 0, value)
                    filling.complete()
                view = cache.view(sequence)
                cache.free(sequence)
                np.testing.assert_array_equal(shown(view, "v", 0), value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.stats()["held"] == 0


def test_a_forked_child_uses_nothing_of_it():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    fill(cache, sequence)
    view, held, filling = cache.view(sequence), cache.hold(sequence), cache.fill(sequence)
    rows = view.rows("k", 0)

    def child() -> None:
        nonlocal cache, view, held, filling, rows
        for use in (
            lambda: cache.append(sequence, 1),
            lambda: view.rows("k", 0),
            lambda: rows[0].numpy(),
            lambda: memoryview(rows[0]),
            lambda: filling.commit(),
            lambda: len(held),
        ):
            with pytest.raises((moontide.Closed, ValueError)):
                use()
        del cache, view, held, filling, rows
        gc.collect()

    assert in_child(child) == 0
    filling.commit()
    check(cache, sequence)


# ---------------------------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("order", ["token", "head"])
def test_what_was_spilled_is_restored(either, key, order):
    cache = make(order=order)
    space = key(order)
    sequence, _ = cache.allocate(range(30, 44))
    fill(cache, sequence)
    assert cache.spill(sequence, either, space) is True
    assert len(either.keys(space)) == 3, "the tail is not among them"

    other = make(order=order)
    again, shared = other.allocate(range(30, 44))
    assert shared == 0
    assert other.restore(again, either, space) == 12
    assert (other.filled(again), other.stats()["restored_tokens"]) == (12, 12)
    fill(other, again)
    check(other, again)
    # Of a prompt that ends with a block, the last block is left to be computed.
    third = make(order=order)
    sequence, _ = third.allocate(range(30, 42))
    with third.fill(sequence) as filling:
        assert filling.restore(either, space) == 8
    assert third.filled(sequence) == 8
    assert third.restore(sequence, either, space) == 0


def test_blocks_are_found_by_moontide_kv(store, key):
    """What this cache saves, engines that use `moontide.kv` can load: the same keys, the bytes of a block in order."""
    cache = make()
    space = key("kv/")
    sequence, _ = cache.allocate(range(4))
    fill(cache, sequence)
    cache.spill(sequence, store, space)
    (name,) = store.keys(space)
    assert name.decode() == f"{space}{block_hashes(range(4), TOKENS)[0].hex()}/0"
    expected = np.concatenate([numbers(range(4), plane, layer) for plane in "kv" for layer in range(LAYERS)])
    assert store.get(name) == expected.tobytes()


def test_held_blocks_are_saved_beside_the_engine(store, key):
    cache = make()
    sequence, _ = cache.allocate(range(10))
    fill(cache, sequence)
    with cache.hold(sequence) as held:
        assert (len(held), held.blocks) == (2, cache.block_table(sequence)[:2].tolist())
        cache.free(sequence)
        cache.clear()
        outcomes: list[bool] = []
        thread = threading.Thread(target=lambda: outcomes.append(held.save(store, key("held"))))
        thread.start()
        thread.join()
    assert outcomes == [True]
    with pytest.raises(moontide.Closed):
        len(held)
    assert cache.stats()["held"] == 0
    again, _ = cache.allocate(range(10))
    assert cache.restore(again, store, key("held")) == 8 - cache.stats()["shared_tokens"]


def test_a_parked_sequence_comes_back(either, key):
    cache = make()
    namespace = key("parked/")
    sequence, _ = cache.allocate(range(10), salt="t")
    fill(cache, sequence)
    cache.append(sequence, 77)
    parked = cache.park(sequence, either, namespace, options=moontide.PutOptions(pin="soft"))
    assert (parked.tokens, parked.filled) == ([*range(10), 77], 10)
    with pytest.raises(moontide.UnknownSequence):
        cache.tokens(sequence)
    cache.clear()
    assert cache.stats()["free"] == 32

    for each in (parked, pickle.loads(pickle.dumps(parked)), Parked(bytes(parked))):
        other = make()
        again = other.resume(each, either, namespace)
        assert (other.filled(again), other.tokens(again)) == (10, parked.tokens)
        fill(other, again)
        check(other, again)
    with pytest.raises(moontide.InvalidArgument, match="blocks of 4 tokens"):
        make(block_tokens=8).resume(parked, either, namespace)
    with pytest.raises(moontide.InvalidArgument):
        Parked(bytes(parked)[:-1])
    # Nowhere to be found: all of it is to be computed again.
    other = make()
    assert other.filled(other.resume(parked, either, key("elsewhere"))) == 0


def test_a_store_that_is_gone_changes_nothing(cluster):
    cache = make()
    sequence, _ = cache.allocate(range(10))
    fill(cache, sequence)
    store = moontide.Store(cluster.master)
    store.close()
    for use in (cache.spill, cache.park, cache.restore):
        with pytest.raises(moontide.Closed):
            use(sequence, store, "p/")
    with pytest.raises(AttributeError):
        cache.spill(sequence, store, 3)
    check(cache, sequence)


def test_another_shape_is_another_namespace():
    prefixes = {
        namespace_of(cache, "m").prefix
        for cache in (make(), make(order="head"), make(dtype="float16"), make(layers=3), make(block_tokens=8))
    }
    assert len(prefixes) == 5
    assert namespace_of(make(), "m", revision="2").prefix not in prefixes
    assert namespace_of(make(dtype="float8_e5m2"), "m") != namespace_of(make(dtype="float8"), "m")


def test_another_process_goes_on(store, key, python):
    cache = make()
    namespace = namespace_of(cache, key("model"))
    sequence, _ = cache.allocate(range(10))
    fill(cache, sequence)
    expected = shown(cache.view(sequence), "v", 1)
    parked = cache.park(sequence, store, namespace)
    program = """if True:
        import sys, numpy, moontide
        from moontide.blocks import BlockCache, Parked, namespace_of
        master, model, parked = sys.argv[1:]
        cache = BlockCache(layers=2, kv_heads=3, dim=4, block_tokens=4, dtype="float32", blocks=32)
        with moontide.Store(master) as store:
            sequence = cache.resume(Parked(bytes.fromhex(parked)), store, namespace_of(cache, model))
        view = cache.view(sequence)
        rows = numpy.concatenate(view.rows("v", 1))
        print(view.tokens, rows.tobytes().hex())
        """
    done = python(program, key("model"), bytes(parked).hex())
    store.batch_remove(store.keys(namespace.prefix))
    assert done.returncode == 0, done.stderr
    tokens, rows = done.stdout.split()
    assert (int(tokens), bytes.fromhex(rows)) == (10, expected.tobytes())


@pytest.mark.parametrize("given", [True, False])
def test_the_worked_example(cluster, given):
    if not EXAMPLE.is_file():
        pytest.skip("the example is not here")
    words = ["--master", cluster.master] if given else []
    command = [sys.executable, str(EXAMPLE), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "decoded 24 tokens, the logits of each as without a cache"
    assert lines[-1] == "resumed in another process: the same 12 tokens"
