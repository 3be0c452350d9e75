"""Tensors: arrays that are stored with their type and shape."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import moontide

NUMPY_TYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
)
ML_TYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
HEADER_BYTES = 128


def numbers(kind: str, shape: tuple[int, ...] = (2, 3, 4)) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, kind)) if kind in ML_TYPES else np.dtype(kind)
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [*NUMPY_TYPES, *ML_TYPES])
def test_every_dtype_round_trips(either, key, kind):
    before = numbers(kind)
    assert either.put_tensor(key("a"), before) is True
    assert either.put_tensor(key("a"), before) is False
    tensor = either.get_tensor(key("a"))
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (kind, (2, 3, 4), before.nbytes)
    after = tensor.numpy()
    assert after.dtype == before.dtype
    assert (after == before).all()
    assert not after.flags.writeable
    assert after.flags.aligned
    assert after.ctypes.data % 64 == 0 or not tensor.zero_copy
    assert tensor.verify()


@pytest.mark.parametrize("kind", NUMPY_TYPES)
def test_numpy_reads_tensor_by_array_dlpack_and_interface(either, key, kind):
    before = numbers(kind)
    either.put_tensor(key("a"), before)
    tensor = either.get_tensor(key("a"))
    for after in (np.asarray(tensor), np.from_dlpack(tensor), np.array(tensor.__array_interface__ and tensor)):
        assert after.dtype == before.dtype
        assert (after == before).all()
    assert np.asarray(tensor).ctypes.data == np.from_dlpack(tensor).ctypes.data == tensor.numpy().ctypes.data
    assert memoryview(tensor).tobytes() == before.tobytes()
    assert memoryview(tensor).readonly


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (1, 1), (5, 1, 3), (2,) * 8], ids=str)
def test_every_shape_round_trips(either, key, shape):
    before = numbers("float32", shape)
    either[key("a")] = before
    tensor = either[key("a")]
    assert isinstance(tensor, moontide.Tensor)
    assert tensor.shape == shape
    assert tensor.numpy().shape == shape
    assert (tensor.numpy() == before).all()
    assert np.from_dlpack(tensor).shape == shape
    if shape:
        assert len(tensor) == shape[0]
    else:
        with pytest.raises(TypeError, match="no length"):
            len(tensor)


def test_non_contiguous_arrays_round_trip(either, key):
    before = numbers("float32", (4, 6))
    for name, part in {"f": np.asfortranarray(before), "t": before.T, "s": before[::-1, ::2]}.items():
        either.put_tensor(key(name), part)
        assert (either.get_tensor(key(name)).numpy() == part).all()


def test_put_tensor_accepts_buffers(either, key):
    either.put_tensor(key("a"), b"123")
    tensor = either.get_tensor(key("a"))
    assert (tensor.dtype, tensor.shape) == ("uint8", (3,))
    either.put_tensor(key("b"), memoryview(bytearray(16)).cast("d"))
    assert (either.get_tensor(key("b")).dtype, either.get_tensor(key("b")).shape) == ("float64", (2,))


def test_tensor_repr(store, key):
    store.put_tensor(key("a"), numbers("float16", (2, 3)))
    assert repr(store.get_tensor(key("a"))) == "<moontide.Tensor float16 [2, 3]>"


UNSUPPORTED = {
    "big-endian": np.zeros(2, ">f4"),
    "text": np.array(["ab"]),
    "records": np.zeros(2, [("a", "u1"), ("b", "<f4")]),
    "objects": np.array([None]),
    "float8_e4m3b11fnuz": np.zeros(2, ml_dtypes.float8_e4m3b11fnuz),
    "int4": np.zeros(2, ml_dtypes.int4),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_dtypes_are_rejected(store, key, name):
    with pytest.raises(TypeError):
        store.put_tensor(key("a"), UNSUPPORTED[name])
    assert not store.exists(key("a"))


def test_too_many_dimensions_are_refused(store, key):
    with pytest.raises(moontide.InvalidArgument, match="tensor has 9 dimensions, at most 8"):
        store.put_tensor(key("a"), np.zeros((1,) * 9))


@pytest.mark.parametrize("wrong", ["text", None, 3, [1, 2]], ids=str)
def test_put_tensor_rejects_non_arrays(store, key, wrong):
    with pytest.raises(TypeError):
        store.put_tensor(key("a"), wrong)


@pytest.mark.parametrize("content", [b"", b"short", b"MTtensor", bytes(HEADER_BYTES), b"x" * 1000])
def test_get_tensor_of_plain_bytes_is_rejected(caller, key, content):
    caller.put(key("a"), content)
    with pytest.raises(moontide.InvalidArgument):
        caller.get_tensor(key("a"))
    assert caller.get(key("a")) == content


def test_mapping_returns_plain_bytes_unchanged(either, key):
    either[key("a")] = b"x" * 200
    assert either[key("a")] == b"x" * 200


def test_corrupt_tensor_header_is_rejected(either, key):
    either.put_tensor(key("a"), numbers("float32"))
    good = either.get(key("a"))
    assert len(good) == HEADER_BYTES + 96
    for at in range(HEADER_BYTES):
        bad = bytearray(good)
        bad[at] ^= 0x10
        either.put(key("b"), bad, overwrite=True)
        with pytest.raises(moontide.InvalidArgument):
            either.get_tensor(key("b"))
        assert either[key("b")] == bad, "the mapping returns it as bytes"


@pytest.mark.parametrize("change", [-1, 1, -96, 96])
def test_tensor_of_wrong_payload_length_is_rejected(either, key, change):
    either.put_tensor(key("a"), numbers("float32"))
    good = either.get(key("a"))
    either.put(key("b"), good[:change] if change < 0 else good + bytes(change))
    with pytest.raises(moontide.InvalidArgument, match="header declares 96 bytes"):
        either.get_tensor(key("b"))


def test_fetched_tensor_can_be_put_again(either, key):
    before = numbers("bfloat16")
    either.put_tensor(key("a"), before)
    either.put_tensor(key("b"), either.get_tensor(key("a")))
    assert (either.get_tensor(key("b")).numpy() == before).all()
    assert either.get(key("b")) == either.get(key("a"))


def test_tensor_read_is_zero_copy_over_shm_and_copied_over_tcp(store, remote, key):
    before = numbers("float16", (64, 64))
    remote.put_tensor(key("a"), before)
    tensor = store.get_tensor(key("a"))
    assert tensor.zero_copy
    assert not remote.get_tensor(key("a")).zero_copy
    assert (tensor.numpy() == before).all()


def test_arrays_keep_tensor_memory_alive(store, key):
    before = numbers("float32", (64, 64))
    store.put_tensor(key("a"), before)
    arrays = [
        store.get_tensor(key("a")).numpy(),
        np.asarray(store.get_tensor(key("a"))),
        np.from_dlpack(store.get_tensor(key("a"))),
        store.get_tensor(key("a")).numpy()[3:, ::2],
    ]
    store.put_tensor(key("a"), before * 0 - 1, overwrite=True)
    store.batch_put([key(str(number)) for number in range(64)], [bytes(before.nbytes)] * 64)
    assert all((array == before).all() for array in arrays[:3])
    assert (arrays[3] == before[3:, ::2]).all()


def test_release_fails_while_exported_then_closes_tensor(store, key):
    store.put_tensor(key("a"), numbers("float32"))
    tensor = store.get_tensor(key("a"))
    array = tensor.numpy()
    with pytest.raises(BufferError, match="still uses the memory"):
        tensor.release()
    del array
    tensor.release()
    tensor.release()
    with pytest.raises(moontide.Closed):
        tensor.numpy()
    with pytest.raises(moontide.Closed):
        tensor.verify()
    assert (tensor.dtype, tensor.shape) == ("float32", (2, 3, 4))


def test_memoryview_of_ml_dtype_tensor_raises_buffer_error(store, key):
    store.put_tensor(key("a"), numbers("bfloat16"))
    with pytest.raises(BufferError, match="numpy"):
        memoryview(store.get_tensor(key("a")))


def test_tensors_round_trip_in_every_kind_of_store(caller, key):
    before = numbers("float16")
    assert caller.put_tensor(key("a"), before) is True
    assert caller.put_tensor(key("a"), before) is False
    assert caller.put_tensor(key("a"), before, overwrite=True) is True
    assert (caller.get_tensor(key("a")).numpy() == before).all()


# ---------------------------------------------------------------------------------------------------------- torch


TORCH_TYPES = [
    *"bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split(),
    *ML_TYPES,
]


@pytest.mark.torch
@pytest.mark.parametrize("kind", TORCH_TYPES)
def test_torch_dtypes_round_trip(either, key, kind):
    torch = pytest.importorskip("torch")
    before = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, kind))
    either.put_tensor(key("a"), before)
    tensor = either.get_tensor(key("a"))
    assert (tensor.dtype, tensor.shape) == (kind, (2, 3, 4))
    after = tensor.torch()
    assert after.dtype == before.dtype
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))
    assert after.data_ptr() == tensor.torch().data_ptr(), "no copy"
    part = before[:, ::2].transpose(0, 1)
    either.put_tensor(key("part"), part)
    assert torch.equal(either.get_tensor(key("part")).torch().view(torch.uint8), part.contiguous().view(torch.uint8))
    space = torch.zeros(24).to(getattr(torch, kind))
    either.put(key("bytes"), before)
    assert either.get_into(key("bytes"), space) == before.nbytes
    assert torch.equal(space.view(torch.uint8), before.flatten().view(torch.uint8))


@pytest.mark.torch
def test_torch_reads_are_zero_copy(store, key):
    torch = pytest.importorskip("torch")
    before = torch.arange(4096, dtype=torch.float32)
    store.put_tensor(key("a"), before)
    tensor = store.get_tensor(key("a"))
    assert tensor.zero_copy
    assert torch.from_dlpack(tensor).data_ptr() == tensor.numpy().ctypes.data
    view = store.get_view(key("a"))
    assert torch.from_dlpack(view).data_ptr() == view.ptr()
    after = tensor.torch()
    del tensor, view
    store.remove(key("a"))
    assert torch.equal(after, before)


@pytest.mark.torch
def test_torch_tensor_requiring_grad_is_rejected(store, key):
    torch = pytest.importorskip("torch")
    with pytest.raises((BufferError, RuntimeError, TypeError, ValueError), match="grad"):
        store.put_tensor(key("a"), torch.zeros(4, requires_grad=True))
    assert store.put_tensor(key("a"), torch.zeros(4, requires_grad=True).detach())
