"""``moontide.blocks``: the paged KV cache. The tests compare its content with dense arrays."""

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
from moontide.blocks import BlockCache, SuspendedSequence, namespace_of
from moontide.kv import block_hashes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "decode.py"
LAYERS, HEADS, DIM, TOKENS = 2, 3, 4, 4

#: numpy type of the rows of each type.
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
    """Returns rows that depend on token, position, plane and layer, so that all rows differ."""
    per_token = int(np.prod(shape))
    base = [token * 7 + (start + at) * 131 + layer * 17 + (plane == "v") * 5 for at, token in enumerate(tokens)]
    rows = np.array(base)[:, None] + np.arange(per_token)
    return (rows % 251).astype(dtype).reshape(len(tokens), *shape)


def compute(cache: BlockCache, sequence: int, planes="kv", **kind) -> None:
    """Writes all missing rows."""
    with cache.writer(sequence) as writer:
        new = writer.tokens
        tokens = cache.tokens(sequence)[new.start : new.stop]
        for plane in planes:
            for layer in range(LAYERS):
                writer.write(plane, layer, numbers(tokens, plane, layer, new.start, **kind))
        writer.mark_written(len(new))


def shown(view, plane: str, layer: int) -> np.ndarray:
    return np.concatenate([rows.numpy() for rows in view.rows(plane, layer)])


def check(cache: BlockCache, sequence: int, planes="kv", **kind) -> None:
    """Compares the content of a sequence with dense arrays."""
    tokens = cache.tokens(sequence)[: cache.computed_tokens(sequence)]
    with cache.view(sequence) as view:
        assert view.tokens == len(view) == len(tokens)
        for plane in planes:
            for layer in range(LAYERS):
                expected = numbers(tokens, plane, layer, **kind)
                np.testing.assert_array_equal(shown(view, plane, layer), expected)
                arena = cache.arena(plane, layer).numpy()
                gathered = arena[view.block_table()].reshape(-1, *expected.shape[1:])[: len(tokens)]
                np.testing.assert_array_equal(gathered, expected)


# ------------------------------------------------------------------------------------------------------------ sequences


@pytest.mark.smoke
@pytest.mark.parametrize("layout_order", ["token", "head"])
@pytest.mark.parametrize("contiguous", [None, 0, 2])
def test_sequence_append_truncate_and_free(layout_order, contiguous):
    cache = make(layout_order=layout_order, contiguous=contiguous)
    sequence, cached_tokens = cache.allocate(range(10))
    assert (cached_tokens, cache.computed_tokens(sequence)) == (0, 0)
    compute(cache, sequence)
    for token in range(100, 120):
        cache.append(sequence, token)
        compute(cache, sequence)
        check(cache, sequence)
    assert cache.tokens(sequence) == [*range(10), *range(100, 120)]
    assert cache.positions(sequence) == list(range(30))
    cache.truncate(sequence, 13)
    check(cache, sequence)
    cache.append(sequence, 5)
    compute(cache, sequence)
    check(cache, sequence)
    assert cache.sequences() == [sequence]
    cache.free(sequence)
    cache.clear()
    stats = cache.stats()
    assert (stats["free"], stats["sequences"], cache.sequences()) == (32, 0, [])


def test_block_table_is_int32():
    cache = make()
    sequence, _ = cache.allocate(np.arange(9))
    table = cache.block_table(sequence)
    assert (table.dtype, table.shape) == (np.dtype("int32"), (3,))
    compute(cache, sequence)
    view = cache.view(sequence)
    assert view.blocks == table.tolist() == view.block_table().tolist()
    assert cache.block_table(cache.allocate([])[0]).shape == (0,)


def test_prefix_is_shared_unless_salt_or_adapter_differs():
    cache = make()
    first, _ = cache.allocate(range(10))
    compute(cache, first)
    second, cached_tokens = cache.allocate(range(10))
    assert cached_tokens == 8
    assert cache.block_table(second)[:2].tolist() == cache.block_table(first)[:2].tolist()
    assert cache.allocate(range(10), salt="another tenant")[1] == 0
    assert cache.allocate(range(10), "", "an adapter")[1] == 0
    compute(cache, second)
    check(cache, second)
    cache.free(first)
    cache.free(second)
    assert cache.allocate(range(8))[1] == 4, "the last token must be computed"


def test_hashes_equal_kv_block_hashes():
    cache = make()
    sequence, _ = cache.allocate(range(11), salt="tänant", adapter="lora")
    assert cache.hashes(sequence) == block_hashes(range(11), TOKENS, salt="tänant", adapter="lora")


def test_forks_copy_on_write():
    cache = make()
    parent, _ = cache.allocate(range(6))
    compute(cache, parent)
    child = cache.fork(parent)
    assert cache.block_table(child).tolist() == cache.block_table(parent).tolist()
    for sequence, token in ((parent, 50), (child, 60)):
        cache.append(sequence, token)
        compute(cache, sequence)
    assert cache.block_table(child)[0] == cache.block_table(parent)[0]
    assert cache.block_table(child)[1] != cache.block_table(parent)[1]
    assert cache.stats()["copied_blocks"] == 1
    check(cache, parent)
    check(cache, child)


def test_freed_sequence_id_is_rejected():
    cache = make()
    sequence, _ = cache.allocate([1])
    cache.free(sequence)
    again, _ = cache.allocate([1])
    assert again != sequence
    for use in (
        lambda: cache.append(sequence, 1),
        lambda: cache.writer(sequence),
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


def test_out_of_blocks_error_reports_required_and_free_blocks():
    cache = make(blocks=4)
    first, _ = cache.allocate(range(9))
    with pytest.raises(moontide.OutOfBlocks, match="2 needed, 1 free") as raised:
        cache.allocate(range(100, 105))
    error = raised.value
    assert (error.needed, error.free, error.longest, error.cached, error.held_by_readers) == (2, 1, 1, 0, 0)
    assert isinstance(error, moontide.NoSpace) and isinstance(error, MemoryError) and error.retryable
    assert pickle.loads(pickle.dumps(error)).needed == 2
    cache.free(first)
    cache.allocate(range(100, 105))


def test_resize_grows_and_shrinks_cache():
    cache = make(blocks=4, blocks_max=16)
    first, _ = cache.allocate(range(16))
    compute(cache, first)
    with pytest.raises(moontide.OutOfBlocks):
        cache.append(first, 1)
    cache.resize(16)
    second, _ = cache.allocate(range(100, 140))
    compute(cache, second)
    cache.free(first)
    with pytest.raises(moontide.OutOfBlocks):
        cache.resize(5)
    view = cache.view(second)
    expected = numbers(range(100, 140))
    cache.resize(10)
    check(cache, second)
    assert cache.stats()["shrinking"], "the view pins blocks above the new limit"
    np.testing.assert_array_equal(shown(view, "k", 0), expected)
    view.release()
    assert not cache.stats()["shrinking"]
    check(cache, second)
    with pytest.raises(moontide.InvalidArgument, match="blocks_max"):
        cache.resize(17)


def test_prune_keeps_tokens_with_highest_scores():
    cache = make()
    sequence, _ = cache.allocate(range(12))
    with pytest.raises(moontide.NotReady):
        cache.prune(sequence, sink_tokens=1, recent_tokens=1, tokens_max=4)
    compute(cache, sequence)
    before = numbers(range(12), "v", 1)
    cache.add_scores(sequence, np.array([0, 0, 9, 0, 0, 8, 0, 0, 0, 0, 0, 0], dtype="float32"))
    assert cache.prune(sequence, sink_tokens=1, recent_tokens=1, tokens_max=4) == [0, 2, 5, 11]
    assert cache.positions(sequence) == [0, 2, 5, 11]
    np.testing.assert_array_equal(shown(cache.view(sequence), "v", 1), before[[0, 2, 5, 11]])
    cache.append(sequence, 99)
    assert cache.positions(sequence)[-1] == 12


def test_dump_block_map_repr_and_stats():
    cache = make()
    sequence, _ = cache.allocate(range(5))
    assert "Layers: 2, Heads: 3, HeadDim: 4" in cache.dump()
    assert cache.block_map().count("X") == 3, "two blocks, and the legend"
    assert "BlockCache" in repr(cache) and "SequenceView of 0 tokens" in repr(cache.view(sequence))
    stats = cache.stats()
    parts = ("in_use", "cached", "held_by_readers", "reserved", "free")
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
        {"layout_order": "layer"},
        {"sequences_max": 0},
        {"layers": 4_000_000_000, "blocks": 1 << 24},
    ],
)
def test_invalid_cache_settings_are_rejected(settings):
    with pytest.raises(moontide.InvalidArgument):
        make(**settings)


def test_cache_larger_than_address_space_raises_no_space():
    with pytest.raises(moontide.NoSpace):
        make(layers=4_000_000_000, blocks=1 << 20)


def test_allocate_beyond_sequences_max_raises_busy():
    cache = make(sequences_max=2)
    cache.allocate([1])
    cache.allocate([1])
    with pytest.raises(moontide.Busy, match="sequences_max"):
        cache.allocate([1])


# ---------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("layout_order", ["token", "head"])
@pytest.mark.parametrize("dtype", PLAIN)
def test_every_dtype_round_trips(dtype, layout_order):
    cache, plain = make(dtype=dtype, layout_order=layout_order), PLAIN[dtype]
    sequence, _ = cache.allocate(range(10))
    compute(cache, sequence, dtype=plain)
    check(cache, sequence, dtype=plain)
    rows = cache.view(sequence).rows("k", 0)
    assert [each.shape for each in rows] == [(4, HEADS, DIM), (4, HEADS, DIM), (2, HEADS, DIM)]
    assert rows[0].dtype == {"float8": "float8_e4m3fn"}.get(dtype, dtype) == cache.dtype
    assert rows[0].nbytes == rows[0].numpy().nbytes and rows[0].strides == rows[0].numpy().strides
    assert np.asarray(rows[0]).dtype == plain
    assert rows[0].__array_interface__["strides"] == rows[0].strides
    assert rows[0].ptr() == rows[0].numpy().ctypes.data


def test_ml_dtypes_array_is_written_unconverted():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = make(dtype="bfloat16")
    sequence, _ = cache.allocate([1, 2])
    value = np.full((2, HEADS, DIM), 1.5, ml_dtypes.bfloat16)
    with cache.writer(sequence) as writer:
        for plane in "kv":
            for layer in range(LAYERS):
                writer.write(plane, layer, value)
        writer.mark_written()
    np.testing.assert_array_equal(shown(cache.view(sequence), "k", 0).view(ml_dtypes.bfloat16), value)


def test_latent_cache_has_one_plane():
    cache = make(kv_heads=None, dim=None, latent=(5, 2))
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence, planes=["latent"], shape=(1, 7))
    check(cache, sequence, planes=["latent", "k"], shape=(1, 7))
    with pytest.raises(moontide.InvalidArgument, match="latent"):
        cache.arena("v", 0)


def test_rows_export_through_dlpack():
    cache = make(layout_order="head")
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    rows = cache.view(sequence).rows("k", 1)[0]
    exported = np.from_dlpack(rows)
    assert not exported.flags.writeable and exported.ctypes.data == rows.ptr()
    np.testing.assert_array_equal(exported, numbers(range(4), "k", 1))
    copy = np.from_dlpack(rows, copy=True)
    assert copy.flags.writeable and copy.ctypes.data != rows.ptr()
    np.testing.assert_array_equal(copy, exported)
    assert np.from_dlpack(cache.arena("k", 1)).flags.writeable
    with pytest.raises(BufferError, match="gaps"):
        hashlib.sha256(rows)  # requests contiguous bytes


@pytest.mark.torch
@pytest.mark.parametrize("dtype", PLAIN)
def test_torch_rows_keep_dtype_and_outlive_their_sequence(dtype):
    torch = pytest.importorskip("torch")
    cache = make(dtype=dtype, layout_order="head")
    sequence, _ = cache.allocate(range(6))
    kind = getattr(torch, cache.dtype)
    value = torch.arange(6 * HEADS * DIM, dtype=torch.float32).reshape(6, HEADS, DIM).to(kind)
    with cache.writer(sequence) as writer:
        for plane in "kv":
            for layer in range(LAYERS):
                writer.write(plane, layer, value)
        writer.mark_written()
    view = cache.view(sequence)
    cache.free(sequence)
    tensors = [rows.torch() for rows in view.rows("v", 1)]
    del view
    gc.collect()
    cache.clear()
    other, _ = cache.allocate(range(100, 200))
    with cache.writer(other) as writer:
        writer.write("v", 1, torch.zeros(100, HEADS, DIM).to(kind))
        writer.mark_written()
    assert all(tensor.dtype == kind for tensor in tensors)
    assert torch.equal(torch.cat([tensor.float() for tensor in tensors]), value.float())


# ---------------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("contiguous", [None, 1])
def test_view_arrays_outlive_their_sequence(contiguous):
    cache = make(blocks=8, contiguous=contiguous)
    sequence, _ = cache.allocate(range(10))
    compute(cache, sequence)
    expected = {plane: numbers(range(10), plane, 1) for plane in "kv"}
    view = cache.view(sequence)
    arrays = {plane: [rows.numpy() for rows in view.rows(plane, 1)] for plane in "kv"}
    whole = view.contiguous("k", 1)
    whole_array = None if whole is None else whole.numpy()
    assert contiguous is None or whole_array is not None
    cache.append(sequence, 10)
    compute(cache, sequence)
    check(cache, sequence)
    cache.free(sequence)
    del view, whole
    gc.collect()
    # All other blocks are reused many times.
    for round in range(20):
        other, _ = cache.allocate(range(1000 * round + 500, 1000 * round + 516))
        compute(cache, other)
        cache.free(other)
        cache.clear()
        for plane in "kv":
            np.testing.assert_array_equal(np.concatenate(arrays[plane]), expected[plane])
        if whole_array is not None:
            np.testing.assert_array_equal(whole_array, expected["k"])
    assert cache.stats()["in_use"] == 3
    del arrays, whole_array
    gc.collect()
    assert (cache.stats()["in_use"], cache.stats()["held_by_readers"]) == (0, 0)
    cache.clear()
    assert cache.stats()["free"] == 8


def test_view_outlives_its_cache():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    view, arena = cache.view(sequence), cache.arena("k", 0).numpy()
    blocks = view.blocks
    del cache
    gc.collect()
    np.testing.assert_array_equal(shown(view, "k", 0), numbers(range(6)))
    np.testing.assert_array_equal(arena[blocks[0]], numbers(range(4)))


def test_view_is_a_snapshot():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    view = cache.view(sequence)
    cache.truncate(sequence, 2)
    for token in (70, 71, 72, 73):
        cache.append(sequence, token)
    compute(cache, sequence)
    np.testing.assert_array_equal(shown(view, "k", 0), numbers(range(6)))
    check(cache, sequence)
    assert view.tokens == 6


def test_view_rows_are_read_only():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    rows = cache.view(sequence).rows("k", 0)[0]
    assert rows.readonly and memoryview(rows).readonly
    with pytest.raises(ValueError, match="read-only"):
        rows.numpy()[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE|writeable"):
        rows.numpy().flags.writeable = True


def test_released_view_is_closed_and_its_arrays_remain_valid():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    with cache.view(sequence) as view:
        rows = view.rows("k", 0)
    view.release()
    with pytest.raises(moontide.Closed):
        view.rows("k", 0)
    assert "released" in repr(view)
    cache.free(sequence)
    np.testing.assert_array_equal(np.concatenate(rows), numbers(range(6)))


@pytest.mark.parametrize(("plane", "layer"), [("q", 0), ("k", 2), ("v", 99)])
def test_unknown_plane_or_layer_is_rejected(plane, layer):
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    with cache.writer(sequence) as writer:
        for use in (cache.arena, cache.view(sequence).rows, cache.view(sequence).contiguous, writer.rows):
            with pytest.raises(moontide.InvalidArgument):
                use(plane, layer)


# -------------------------------------------------------------------------------------------------------------- writers


def test_writer_rows_are_written_in_place():
    cache = make()
    sequence, _ = cache.allocate(range(10))
    with cache.writer(sequence) as writer:
        for plane in "kv":
            for layer in range(LAYERS):
                start = 0
                for rows in writer.rows(plane, layer):
                    assert not rows.readonly
                    rows.numpy()[:] = numbers(range(start, start + len(rows)), plane, layer, start)
                    start += len(rows)
        del rows
        writer.mark_written()
    check(cache, sequence)


def test_commit_fails_while_writable_arrays_exist():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    writer = cache.writer(sequence)
    array = writer.rows("k", 0)[1].numpy()
    part = array[:1, :, 1:]
    writer.mark_written()
    for _ in range(2):
        with pytest.raises(BufferError, match="lent to 1 arrays"):
            writer.commit()
    del array
    with pytest.raises(BufferError):
        writer.commit()
    assert cache.computed_tokens(sequence) == 0
    del part
    writer.commit()
    assert cache.computed_tokens(sequence) == 6
    with pytest.raises(moontide.Closed, match="committed"):
        writer.commit()
    with pytest.raises(moontide.Closed):
        writer.rows("k", 0)


def test_exception_in_writer_block_commits_no_tokens():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    with pytest.raises(ZeroDivisionError):
        with cache.writer(sequence) as writer:
            writer.mark_written(4)
            1 / 0
    assert cache.computed_tokens(sequence) == 0
    compute(cache, sequence)
    check(cache, sequence)


def test_aborted_writer_blocks_sequence_until_its_arrays_are_dropped():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    writer = cache.writer(sequence)
    array = writer.rows("k", 0)[0].numpy()
    writer.abort()
    writer.abort()
    for use in (cache.writer, cache.free, cache.fork):
        with pytest.raises(moontide.Busy, match="has an open writer"):
            use(sequence)
    array[:] = 3
    del array
    compute(cache, sequence)
    check(cache, sequence)


def test_dropped_writer_does_not_block_free():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    cache.writer(sequence)
    cache.free(sequence)
    assert cache.stats()["free"] == 32
    with pytest.raises(moontide.Error):
        cache.tokens(sequence)


def test_rows_can_be_written_in_several_parts():
    cache = make()
    sequence, _ = cache.allocate(range(10))
    with cache.writer(sequence) as writer:
        for start, stop in ((0, 3), (3, 4), (4, 9)):
            assert writer.tokens == range(start, 10)
            for plane in "kv":
                for layer in range(LAYERS):
                    writer.write(plane, layer, numbers(range(start, stop), plane, layer, start))
            writer.mark_written(stop - start)
    assert cache.computed_tokens(sequence) == 9
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
def test_writer_rejects_arrays_of_wrong_shape_or_dtype(array):
    cache = make()
    sequence, _ = cache.allocate(range(6))
    with cache.writer(sequence) as writer:
        with pytest.raises(moontide.InvalidArgument):
            writer.write("k", 0, array)
        with pytest.raises(moontide.InvalidArgument, match="only 6"):
            writer.mark_written(7)


def test_writer_accepts_reshaped_strided_and_overlapping_arrays():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    expected = numbers(range(6))
    with cache.writer(sequence) as writer:
        writer.write("k", 0, expected.reshape(6, HEADS * DIM))
        writer.write("k", 1, np.asfortranarray(expected))
        writer.write("v", 0, memoryview(expected))
        for rows in writer.rows("v", 0)[:1]:
            # To itself, and from other rows in the same memory.
            writer.write("v", 0, rows)
            writer.write("v", 1, rows.numpy()[::-1])
        del rows
        writer.mark_written()
    view = cache.view(sequence)
    for plane, layer in (("k", 0), ("k", 1), ("v", 0)):
        np.testing.assert_array_equal(shown(view, plane, layer), expected)
    np.testing.assert_array_equal(shown(view, "v", 1)[:4], expected[3::-1])


def test_concurrent_threads_read_back_their_own_rows():
    """Sequences of several threads in one cache, with copies large enough to release the GIL."""
    cache = BlockCache(layers=1, kv_heads=8, dim=128, block_tokens=16, dtype="float32", blocks=512)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                tokens = range(10_000 * number + turn, 10_000 * number + turn + 50)
                sequence, _ = cache.allocate(tokens)
                value = np.full((50, 8, 128), number * 100 + turn, "float32")
                with cache.writer(sequence) as writer:
                    writer.write("k", 0, value)
                    writer.write("v", 0, value)
                    writer.mark_written()
                view = cache.view(sequence)
                cache.free(sequence)
                np.testing.assert_array_equal(shown(view, "v", 0), value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.stats()["in_use"] == 0


def test_forked_child_cannot_use_cache():
    cache = make()
    sequence, _ = cache.allocate(range(6))
    compute(cache, sequence)
    view, pinned, writer = cache.view(sequence), cache.pin_blocks(sequence), cache.writer(sequence)
    rows = view.rows("k", 0)

    def child() -> None:
        nonlocal cache, view, pinned, writer, rows
        for use in (
            lambda: cache.append(sequence, 1),
            lambda: view.rows("k", 0),
            lambda: rows[0].numpy(),
            lambda: memoryview(rows[0]),
            lambda: writer.commit(),
            lambda: len(pinned),
        ):
            with pytest.raises((moontide.Closed, ValueError)):
                use()
        del cache, view, pinned, writer, rows
        gc.collect()

    assert in_child(child) == 0
    writer.commit()
    check(cache, sequence)


# ---------------------------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("layout_order", ["token", "head"])
def test_spilled_blocks_are_restored(either, key, layout_order):
    cache = make(layout_order=layout_order)
    space = key(layout_order)
    sequence, _ = cache.allocate(range(30, 44))
    compute(cache, sequence)
    assert cache.spill(sequence, either, space) is True
    assert len(either.keys(space)) == 3, "the partial last block is not saved"

    other = make(layout_order=layout_order)
    again, cached_tokens = other.allocate(range(30, 44))
    assert cached_tokens == 0
    assert other.restore(again, either, space) == 12
    assert (other.computed_tokens(again), other.stats()["restored_tokens"]) == (12, 12)
    compute(other, again)
    check(other, again)
    # If a prompt ends with a full block, that block is not restored: its last token must be computed.
    third = make(layout_order=layout_order)
    sequence, _ = third.allocate(range(30, 42))
    with third.writer(sequence) as writer:
        assert writer.restore(either, space) == 8
    assert third.computed_tokens(sequence) == 8
    assert third.restore(sequence, either, space) == 0


def test_spilled_blocks_use_keys_and_bytes_of_moontide_kv(store, key):
    """Engines that use `moontide.kv` can load the saved blocks: same keys, same bytes of a block."""
    cache = make()
    space = key("kv/")
    sequence, _ = cache.allocate(range(4))
    compute(cache, sequence)
    cache.spill(sequence, store, space)
    (name,) = store.keys(space)
    assert name.decode() == f"{space}{block_hashes(range(4), TOKENS)[0].hex()}/0"
    expected = np.concatenate([numbers(range(4), plane, layer) for plane in "kv" for layer in range(LAYERS)])
    assert store.get(name) == expected.tobytes()


def test_pinned_blocks_are_saved_from_another_thread_after_free(store, key):
    cache = make()
    sequence, _ = cache.allocate(range(10))
    compute(cache, sequence)
    with cache.pin_blocks(sequence) as pinned:
        assert (len(pinned), pinned.blocks) == (2, cache.block_table(sequence)[:2].tolist())
        cache.free(sequence)
        cache.clear()
        outcomes: list[bool] = []
        thread = threading.Thread(target=lambda: outcomes.append(pinned.save(store, key("held"))))
        thread.start()
        thread.join()
    assert outcomes == [True]
    with pytest.raises(moontide.Closed):
        len(pinned)
    assert cache.stats()["in_use"] == 0
    again, _ = cache.allocate(range(10))
    assert cache.restore(again, store, key("held")) == 8 - cache.stats()["cached_tokens"]


def test_suspended_sequence_resumes(either, key):
    cache = make()
    namespace = key("suspended/")
    sequence, _ = cache.allocate(range(10), salt="t")
    compute(cache, sequence)
    cache.append(sequence, 77)
    suspended = cache.suspend(sequence, either, namespace, options=moontide.PutOptions(pin="soft"))
    assert (suspended.tokens, suspended.computed_tokens) == ([*range(10), 77], 10)
    with pytest.raises(moontide.UnknownSequence):
        cache.tokens(sequence)
    cache.clear()
    assert cache.stats()["free"] == 32

    for each in (suspended, pickle.loads(pickle.dumps(suspended)), SuspendedSequence(bytes(suspended))):
        other = make()
        again = other.resume(each, either, namespace)
        assert (other.computed_tokens(again), other.tokens(again)) == (10, suspended.tokens)
        compute(other, again)
        check(other, again)
    with pytest.raises(moontide.InvalidArgument, match="4 tokens per block"):
        make(block_tokens=8).resume(suspended, either, namespace)
    with pytest.raises(moontide.InvalidArgument):
        SuspendedSequence(bytes(suspended)[:-1])
    # Blocks that are not found must be computed again.
    other = make()
    assert other.computed_tokens(other.resume(suspended, either, key("elsewhere"))) == 0


def test_closed_store_leaves_cache_unchanged(cluster):
    cache = make()
    sequence, _ = cache.allocate(range(10))
    compute(cache, sequence)
    store = moontide.Store(cluster.master)
    store.close()
    for use in (cache.spill, cache.suspend, cache.restore):
        with pytest.raises(moontide.Closed):
            use(sequence, store, "p/")
    with pytest.raises(AttributeError):
        cache.spill(sequence, store, 3)
    check(cache, sequence)


def test_namespace_depends_on_shape_dtype_layout_and_revision():
    prefixes = {
        namespace_of(cache, "m").prefix
        for cache in (make(), make(layout_order="head"), make(dtype="float16"), make(layers=3), make(block_tokens=8))
    }
    assert len(prefixes) == 5
    assert namespace_of(make(), "m", revision="2").prefix not in prefixes
    assert namespace_of(make(dtype="float8_e5m2"), "m") != namespace_of(make(dtype="float8"), "m")


def test_suspended_sequence_resumes_in_another_process(store, key, python):
    cache = make()
    namespace = namespace_of(cache, key("model"))
    sequence, _ = cache.allocate(range(10))
    compute(cache, sequence)
    expected = shown(cache.view(sequence), "v", 1)
    suspended = cache.suspend(sequence, store, namespace)
    program = """if True:
        import sys, numpy, moontide
        from moontide.blocks import BlockCache, SuspendedSequence, namespace_of
        master, model, suspended = sys.argv[1:]
        cache = BlockCache(layers=2, kv_heads=3, dim=4, block_tokens=4, dtype="float32", blocks=32)
        with moontide.Store(master) as store:
            sequence = cache.resume(SuspendedSequence(bytes.fromhex(suspended)), store, namespace_of(cache, model))
        view = cache.view(sequence)
        rows = numpy.concatenate(view.rows("v", 1))
        print(view.tokens, rows.tobytes().hex())
        """
    done = python(program, key("model"), bytes(suspended).hex())
    store.batch_remove(store.keys(namespace.prefix))
    assert done.returncode == 0, done.stderr
    tokens, rows = done.stdout.split()
    assert (int(tokens), bytes.fromhex(rows)) == (10, expected.tobytes())


@pytest.mark.parametrize("given", [True, False])
def test_decode_example_runs(cluster, given):
    if not EXAMPLE.is_file():
        pytest.skip("the example is not available")
    words = ["--master", cluster.master] if given else []
    command = [sys.executable, str(EXAMPLE), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "decoded 24 tokens; all logits match the computation without a cache"
    assert lines[-1] == "resumed in another process: the same 12 tokens"
