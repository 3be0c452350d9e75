"""Types of values and buffers: all objects that export their memory, in one of three ways."""

from __future__ import annotations

import array
import ctypes
import mmap
import random

import ml_dtypes
import numpy as np
import pytest

import moontide

NUMPY_TYPES = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
OTHER_TYPES = [">f4", "S3", "U2", "V5", np.dtype([("a", "u1"), ("b", "<f4")])]
ML_TYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def sources() -> dict[str, tuple[object, bytes]]:
    """Returns values of every type, and the bytes that a put must store."""
    text = b"0123456789abcdef"
    numbers = np.arange(24, dtype="<i4").reshape(2, 3, 4)
    mapped = mmap.mmap(-1, 4096)
    mapped[:16] = text
    block = (ctypes.c_uint8 * 16)(*text)
    found = {
        "bytes": (text, text),
        "bytearray": (bytearray(text), text),
        "memoryview": (memoryview(text), text),
        "memoryview sliced": (memoryview(text)[3:9], text[3:9]),
        "memoryview with steps": (memoryview(text)[::2], text[::2]),
        "memoryview backwards": (memoryview(text)[::-1], text[::-1]),
        "memoryview cast": (memoryview(text).cast("I"), text),
        "memoryview of two dimensions": (memoryview(text).cast("B", (4, 4)), text),
        "memoryview of none": (memoryview(text)[:0], b""),
        "array.array": (array.array("d", [1.5, -2.5]), np.array([1.5, -2.5]).tobytes()),
        "ctypes": (block, text),
        "ctypes structure": (ctypes.c_uint64(7), (7).to_bytes(8, "little")),
        "mmap": (mapped, text.ljust(4096, b"\0")),
        "RawMemory": (moontide.RawMemory(ctypes.addressof(block), 16), text),
        "C order": (numbers, numbers.tobytes()),
        "Fortran order": (np.asfortranarray(numbers), numbers.tobytes()),
        "transposed": (numbers.T, numbers.T.tobytes()),
        "negative strides": (numbers[::-1, :, ::-1], numbers[::-1, :, ::-1].tobytes()),
        "not contiguous": (numbers[:, 1:, ::2], numbers[:, 1:, ::2].tobytes()),
        "strides of zero": (np.broadcast_to(numbers[0, 0], (5, 4)), numbers[0, 0].tobytes() * 5),
        "no dimensions": (np.array(7, dtype="<i8"), (7).to_bytes(8, "little")),
        "scalar": (np.float32(1.5), np.float32(1.5).tobytes()),
        "empty": (np.empty((3, 0, 2)), b""),
        "read-only": (np.frombuffer(text, "u1"), text),
        "numpy.memmap-like": (np.frombuffer(mapped, "u1", 16), text),
    }
    # The exporting object must outlive the table.
    found["RawMemory"] += (block,)
    return found


SOURCES = sources()


@pytest.mark.parametrize("name", SOURCES)
def test_put_accepts_every_buffer_type(caller, key, name):
    value, expected, *_ = SOURCES[name]
    assert caller.put(key("a"), value)
    assert caller.get(key("a")) == expected
    assert caller.put_from(key("b"), [b"<", value, b">"])
    assert caller.get(key("b")) == b"<" + expected + b">"
    assert caller.batch_put([key("c"), key("d")], [value, value]) == [True, True]
    assert caller.batch_get([key("c"), key("d")]) == [expected, expected]


@pytest.mark.parametrize("kind", [*NUMPY_TYPES, *OTHER_TYPES, *ML_TYPES], ids=str)
def test_arrays_of_every_dtype_round_trip(either, key, kind):
    numbers = np.arange(24).reshape(2, 3, 4)
    whole = np.zeros(numbers.shape, kind) if isinstance(kind, np.dtype) else numbers.astype(kind)
    for name, value in {"whole": whole, "part": whole[:, ::2], "point": whole[1, 1, 1:2].reshape(())}.items():
        assert either.put(key(name), value)
        assert either.get(key(name)) == value.tobytes()
    space = np.zeros_like(whole)
    assert either.get_into(key("whole"), space) == whole.nbytes
    assert space.tobytes() == whole.tobytes()


def spaces() -> dict[str, object]:
    """Returns buffers of every type with at least twelve bytes."""
    return {
        "bytearray": bytearray(12),
        "memoryview": memoryview(bytearray(12)),
        "memoryview sliced": memoryview(bytearray(20))[4:16],
        "memoryview cast": memoryview(bytearray(12)).cast("I"),
        "array.array": array.array("I", [0, 0, 0]),
        "ctypes": (ctypes.c_uint8 * 12)(),
        "mmap": mmap.mmap(-1, 4096),
        "numpy": np.zeros((3, 2), "<u2"),
        "numpy row": np.zeros((4, 12), "u1")[2],
        "numpy with dimensions of one": np.zeros((9, 1, 12), "u1")[::3, :, :][1:2],
        "bfloat16": np.zeros(6, ml_dtypes.bfloat16),
        "complex": np.zeros(1, "<c16"),
    }


@pytest.mark.parametrize("name", spaces())
def test_get_into_accepts_every_writable_buffer_type(caller, key, name):
    text = b"moon + tides"
    assert caller.put(key("a"), text)
    space = spaces()[name]
    assert caller.get_into(key("a"), space) == 12
    as_bytes = space.view("u1") if isinstance(space, np.ndarray) else space
    assert np.asarray(as_bytes).tobytes()[:12] == text
    again = spaces()[name]
    assert caller.batch_get_into([key("a")], [again]) == [12]
    as_bytes = again.view("u1") if isinstance(again, np.ndarray) else again
    assert np.asarray(as_bytes).tobytes()[:12] == text


READ_ONLY = {
    "bytes": b"0123456789ab",
    "memoryview": memoryview(b"0123456789ab"),
    "numpy": np.frombuffer(b"0123456789ab", "u1"),
    "broadcast": np.broadcast_to(np.zeros(12, "u1"), (2, 12)),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_get_into_rejects_read_only_buffers(caller, key, name):
    caller.put(key("a"), b"1")
    before = bytes(READ_ONLY[name])
    for space in (READ_ONLY[name], [READ_ONLY[name]]):
        with pytest.raises(ValueError, match="read-only"):
            caller.get_into(key("a"), space)
        with pytest.raises(ValueError, match="read-only"):
            caller.batch_get_into([key("a")], [space])
    assert bytes(READ_ONLY[name]) == before


SCATTERED = {
    "steps": np.zeros(24, "u1")[::2],
    "Fortran order": np.zeros((4, 4), "u1", order="F"),
    "backwards": np.zeros(12, "u1")[::-1],
    "column": np.zeros((12, 2), "u1")[:, 0],
}


@pytest.mark.parametrize("name", SCATTERED)
def test_get_into_rejects_non_contiguous_buffers(caller, key, name):
    caller.put(key("a"), b"1")
    with pytest.raises(ValueError, match="contiguous"):
        caller.get_into(key("a"), SCATTERED[name])
    assert not SCATTERED[name].any()


def test_view_is_accepted_by_put_and_rejected_by_get_into(either, key):
    either.put(key("a"), b"123")
    view = either.get_view(key("a"))
    assert either.put(key("b"), view)
    assert either.get(key("b")) == b"123"
    with pytest.raises(ValueError, match="read-only"):
        either.get_into(key("a"), view)


def test_object_arrays_are_rejected(store, key):
    with pytest.raises(TypeError):
        store.put(key("a"), np.array([object()], dtype=object))
    assert not store.exists(key("a"))


TOO_MANY = """
import sys, moontide, numpy
store = moontide.Store(sys.argv[1])
try:
    store.put("a", numpy.broadcast_to(numpy.uint8(1), (1 << 45,)))
except (MemoryError, moontide.TooLarge) as error:
    print("rejected")
"""


def test_broadcast_array_larger_than_memory_is_rejected(python):
    ended = python(TOO_MANY)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "rejected\n", "")


class Interface:
    """An object that has only ``__array_interface__``."""

    def __init__(self, array: np.ndarray, **changed: object) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | changed


def test_array_interface_is_accepted_by_put_and_get_into(either, key):
    numbers = np.arange(12, dtype="<f4").reshape(3, 4)
    assert either.put(key("a"), Interface(numbers))
    assert either.get(key("a")) == numbers.tobytes()
    assert either.put(key("b"), Interface(numbers.T))
    assert either.get(key("b")) == numbers.T.tobytes()
    space = np.zeros((3, 4), "<f4")
    assert either.get_into(key("a"), Interface(space)) == 48
    assert (space == numbers).all()


def test_array_interface_determines_tensor_dtype(store, key):
    for kind, name in [("<f4", "float32"), ("|u1", "uint8"), ("<c8", "complex64"), ("|b1", "bool")]:
        numbers = np.arange(4).astype(kind)
        assert store.put_tensor(key(name), Interface(numbers))
        tensor = store.get_tensor(key(name))
        assert (tensor.dtype, tensor.shape) == (name, (4,))
        assert (tensor.numpy() == numbers).all()


@pytest.mark.parametrize("kind", [">f4", "<U2", "|S4", "|V4", "|O"])
def test_array_interface_of_unsupported_dtype_is_not_a_tensor(store, key, kind):
    array = np.zeros(4, kind)
    named = Interface(array)
    named.dtype = array.dtype
    for value in (Interface(array), named):
        with pytest.raises((TypeError, ValueError)):
            store.put_tensor(key("a"), value)
    if kind == "|O":
        with pytest.raises((TypeError, ValueError)):
            store.put(key("a"), Interface(array))
    else:
        assert store.put(key("a"), Interface(array))
        assert store.get(key("a")) == array.tobytes()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"data": None}, "without data"),
        ({"shape": None}, "without shape"),
        ({"typestr": None}, "without typestr"),
        ({"typestr": "<f"}, "type"),
        ({"typestr": "é"}, "type"),
        ({"typestr": "<f0"}, "type"),
        ({"strides": (4,)}, "strides"),
    ],
    ids=str,
)
def test_invalid_array_interface_is_rejected(store, key, changed, text):
    with pytest.raises(ValueError, match=text):
        store.put(key("a"), Interface(np.zeros((2, 2), "<f4"), **changed))
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(key("a"), Interface(np.zeros(4, "u1"), data=(np.zeros(4, "u1").ctypes.data, True)))


class DlpackOnly:
    """An object that supports only DLPack, through numpy."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0), versions: bool = True) -> None:
        self.array, self.device, self.versions = array, device, versions

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **named: object) -> object:
        if named and not self.versions:
            raise TypeError("an older library without arguments")
        return self.array.__dlpack__(**named)


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("kind", NUMPY_TYPES)
def test_dlpack_is_accepted_by_put_and_get_into(either, key, kind, versions):
    numbers = np.arange(24).reshape(2, 3, 4).astype(kind)
    for name, value in {"whole": numbers, "part": numbers[:, ::2], "turned": numbers.T}.items():
        assert either.put(key(name), DlpackOnly(value, versions=versions))
        assert either.get(key(name)) == value.tobytes()
    space = np.zeros_like(numbers)
    assert either.get_into(key("whole"), DlpackOnly(space, versions=versions)) == numbers.nbytes
    assert (space == numbers).all()
    with pytest.raises(ValueError, match="contiguous"):
        either.get_into(key("whole"), DlpackOnly(space.T, versions=versions))


def test_get_into_rejects_read_only_dlpack(store, key):
    store.put(key("a"), b"1")
    space = np.zeros(4, "u1")
    space.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(key("a"), DlpackOnly(space))


def test_dlpack_on_another_device_is_rejected(store, key):
    with pytest.raises(TypeError, match="cpu"):
        store.put(key("a"), DlpackOnly(np.zeros(4), device=(2, 0)))
    assert store.put(key("a"), DlpackOnly(np.zeros(4), device=(3, 0))), "pinned memory is host memory"


class BadCapsule:
    """An object whose ``__dlpack__`` returns no tensor."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **named: object) -> object:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


def test_invalid_dlpack_capsule_is_rejected(store, key):
    with pytest.raises(TypeError):
        store.put(key("a"), BadCapsule(None))
    with pytest.raises(RuntimeError, match="not today"):
        store.put(key("a"), BadCapsule(RuntimeError("not today")))
    taken = np.zeros(4).__dlpack__()
    assert store.put(key("a"), BadCapsule(taken))
    with pytest.raises(BufferError, match="no tensor"):
        store.put(key("b"), BadCapsule(taken))


def test_dlpack_buffers_are_released_after_calls(store, key):
    # A bytearray cannot grow while a buffer of it is exported.
    content = bytearray(64)
    assert store.put(key("a"), DlpackOnly(np.frombuffer(content, "u1")))
    assert store.get_into(key("a"), DlpackOnly(np.frombuffer(content, "u1"))) == 64
    content.append(1)
    assert len(content) == 65


def test_calls_release_their_buffers(caller, key):
    content, space = bytearray(64), bytearray(64)
    caller.put(key("a"), content)
    caller.put_from(key("b"), [content, content])
    caller.batch_put([key("c")], [content])
    caller.get_into(key("a"), space)
    caller.batch_get_into([key("a"), key("c")], [space, [space]])
    with pytest.raises(ValueError):
        caller.get_into(key("b"), space)
    content.append(1)
    space.append(1)


def test_raw_memory_is_accepted_by_put_and_get_into(either, key):
    block = (ctypes.c_uint8 * 4096)()
    memory = moontide.RawMemory(ctypes.addressof(block), 4096)
    assert (memory.address, len(memory)) == (ctypes.addressof(block), 4096)
    memoryview(memory)[:4] = b"tide"
    assert either.put(key("a"), memory)
    ctypes.memset(block, 0, 4096)
    assert either.get_into(key("a"), memory) == 4096
    assert bytes(block)[:4] == b"tide"
    assert np.asarray(memory)[0] == ord("t")
    assert eval(repr(memory), {"RawMemory": moontide.RawMemory}).address == memory.address


def test_get_into_rejects_read_only_raw_memory(store, key):
    block = (ctypes.c_uint8 * 16)()
    memory = moontide.RawMemory(ctypes.addressof(block), 16, readonly=True)
    assert store.put(key("a"), memory)
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(key("a"), memory)
    assert memoryview(memory).readonly


@pytest.mark.parametrize(("address", "size"), [(0, 1), (1 << 63, 1), (1, 1 << 63), (-1, 1), (1, -1)])
def test_invalid_raw_memory_range_is_rejected(address, size):
    with pytest.raises((ValueError, OverflowError)):
        moontide.RawMemory(address, size)


def test_random_array_slices_round_trip(store, remote, key, seed):
    draw = random.Random(seed)
    for number in range(300):
        dims = draw.randrange(4)
        shape = [draw.randrange(1, 6) for _ in range(dims)]
        kind = draw.choice([*NUMPY_TYPES, *ML_TYPES])
        whole = np.frombuffer(draw.randbytes(int(np.prod(shape)) * np.dtype(kind).itemsize), kind).reshape(shape)
        part = whole[
            tuple(slice(draw.randrange(length), None, draw.choice([1, 1, 2, -1])) for length in shape)
        ].transpose(draw.sample(range(dims), dims))
        name = key(str(number))
        assert store.put(name, part)
        assert draw.choice([store, remote]).get(name) == part.tobytes(), (kind, part.shape, part.strides)
