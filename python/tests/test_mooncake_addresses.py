"""``moontide.compat.mooncake``: calls by address, and the memory that they accept."""

import ctypes
import mmap
import threading

import pytest
from mooncake_support import MIB, Block, set_up

from moontide.compat.mooncake import MooncakeHostMemAllocator, ReplicateConfig


@pytest.fixture(scope="module")
def pool(start_cluster):
    cluster = start_cluster(memory="2GiB", groups=4)
    yield cluster.master
    cluster.end()


@pytest.fixture
def store(pool):
    store = set_up(pool)
    store.remove_all(True)
    yield store
    store.close()


@pytest.fixture
def block(store):
    block = Block()
    block.fill(0, bytes(range(256)))
    assert store.register_buffer(block.address, block.size) == 0
    return block


@pytest.mark.smoke
def test_put_from_and_get_into_round_trip(store, block):
    assert store.put_from("k", block.address, 16) == 0
    assert store.put_from("k", block.address + 8, 8) == 0, "an existing object is unchanged"
    assert store.get("k") == bytes(range(16))
    block.fill(4096, b"\7" * 100)
    assert store.get_into("k", block.address + 4096, 100) == 16
    assert block.read(4096, 20) == bytes(range(16)) + b"\7" * 4
    assert store.upsert_from("k", block.address + 100, 2) == 0
    assert store.get("k") == bytes([100, 101])


def test_get_into_returns_error_codes(store, block):
    assert store.put_from("k", block.address, 16) == 0
    assert store.get_into("k", block.address + 4096, 8) == -600
    assert store.get_into("k", block.address + 4096, 0) == -600
    assert store.get_into("nope", block.address, 16) == -704
    assert store.get_into("", block.address, 16) == -704
    assert store.get_into("k", 0, 16) == -600
    assert store.get_into("k", 8, 16) == -600


def test_put_from_rejects_invalid_arguments(store, block):
    assert store.put_from("k", block.address, 0) == 0, "an empty object is not stored"
    assert store.is_exist("k") == 0
    assert store.put_from("", block.address, 1) == -600
    assert store.put_from("k", 0, 16) == -600
    with pytest.raises(TypeError):
        store.put_from("k", block.address, -1)
    with pytest.raises(TypeError):
        store.put_from("k", -1, 1)
    with pytest.raises(TypeError):
        store.put_from("k", "address", 1)
    with pytest.raises(TypeError):
        store.get_into("k", block.address, None)


def test_batch_put_from_and_get_into_return_code_per_key(store, block):
    at = block.address
    assert store.batch_put_from(["x1", "x2", "x1"], [at, at + 16, at], [16, 8, 16]) == [0, 0, 0]
    into = [at + 4096, at + 5000, at + 6000]
    assert store.batch_get_into(["x1", "nope", "x2"], into, [16, 16, 16]) == [16, -704, 8]
    assert block.read(6000, 8) == bytes(range(16, 24))
    assert store.batch_get_into(["x1", "x2"], into[:2], [4, 8]) == [-600, 8]
    assert store.batch_get_into(["x1", "x1"], into[:2], [16, 16]) == [16, 16]
    assert store.batch_get_into(["", "x1"], into[:2], [16, 16]) == [-704, 16]
    assert store.batch_upsert_from(["x1"], [at + 1], [2]) == [0]
    assert store.get("x1") == b"\1\2"


def test_batch_lists_of_unequal_length_are_rejected(store, block):
    at = block.address
    assert store.batch_put_from(["a", "b"], [at], [16, 8]) == [-600, -600]
    assert store.batch_put_from(["a"], [at], [16, 8]) == [-600]
    assert store.batch_get_into(["a", "b"], [at], [16, 8]) == [-600, -600]
    assert store.batch_put_from([], [], []) == []
    assert store.batch_get_into([], [], []) == []
    assert store.batch_put_from_multi_buffers(["a", "b"], [[at]], [[4]]) == [-600, -600]
    assert store.batch_put_from_multi_buffers(["a"], [[at, at + 4]], [[4]]) == [-600]
    assert store.batch_put_from_multi_buffers([], [], []) == []
    assert store.batch_get_into_multi_buffers(["a"], [[at]], [[1, 2]]) == [-600]
    assert store.batch_get_into_multi_buffers([], [], []) == []


def test_valid_entries_of_a_batch_succeed(store, block):
    at = block.address
    assert store.batch_put_from(["g1", "", "g2", "g3", "g4"], [at, at, 0, at, at], [4, 4, 4, 0, 4]) == [
        0,
        -600,
        -600,
        -600,
        0,
    ]
    assert store.batch_is_exist(["g1", "g2", "g3", "g4"]) == [1, 0, 0, 1]
    assert store.batch_get_into(["g1", "g4", "nope"], [at + 4096, 0, at], [4, 4, 4]) == [4, -600, -704]
    parts = [[at, at + 8], [at, 0], [], [at, at]]
    sizes = [[4, 4], [4, 4], [], [0, 0]]
    assert store.batch_put_from_multi_buffers(["m1", "m2", "m3", "m4"], parts, sizes) == [0, -600, -600, -600]
    assert store.get("m1") == bytes([0, 1, 2, 3, 8, 9, 10, 11])


def test_multi_buffer_put_and_get_round_trip(store, block):
    at = block.address
    config = ReplicateConfig()
    keys, parts, sizes = ["m1", "m2"], [[at, at + 100], [at + 8]], [[4, 4], [8]]
    assert store.batch_put_from_multi_buffers(keys, parts, sizes, config) == [0, 0]
    into, sizes_into = [[at + 4096, at + 5000], [at + 5100], [at + 6000]], [[4, 4], [4], [8]]
    assert store.batch_get_into_multi_buffers(["m1", "nope", "m2"], into, sizes_into) == [8, -704, 8]
    assert (block.read(4096, 4), block.read(5000, 4)) == (bytes([0, 1, 2, 3]), bytes([100, 101, 102, 103]))
    assert store.batch_get_into_multi_buffers(["m1"], into[:1], sizes_into[:1], True) == [8]
    assert store.batch_put_from_multi_buffers(["m3"], [[at, at + 8]], [[0, 4]]) == [0]
    assert store.get("m3") == bytes([8, 9, 10, 11])
    assert store.put_from_with_metadata("m4", at + 8, at, 4, 2) == 0
    assert store.get("m4") == bytes([0, 1, 8, 9, 10, 11])


def test_multi_buffer_get_of_other_length_fails(store, block):
    # An engine uses all buffers after a hit: a shorter object must not count as a hit.
    at = block.address
    assert store.batch_put_from_multi_buffers(["m"], [[at, at + 100]], [[4, 4]]) == [0]
    for sizes, code in [([4, 400], -800), ([6, 400], -800), ([4, 2], -600), ([4], -600), ([4, 4, 4], -800)]:
        into = [at + 4096 + 1000 * number for number in range(len(sizes))]
        assert store.batch_get_into_multi_buffers(["m"], [into], [sizes]) == [code], sizes


def test_multi_buffer_batch_of_64_keys_round_trips(store):
    block = Block(8 * MIB)
    assert store.register_buffer(block.address, block.size) == 0
    keys = [f"page_{number}" for number in range(64)]
    content = [bytes([number]) * 1024 for number in range(64)]
    for number, value in enumerate(content):
        block.fill(number * 1024, value)
    parts = [[block.address + number * 1024 + 64 * part for part in range(16)] for number in range(64)]
    sizes = [[64] * 16] * 64
    config = ReplicateConfig()
    config.group_ids = [f"group_{number // 2}" for number in range(64)]
    assert store.batch_put_from_multi_buffers(keys, parts, sizes, config) == [0] * 64
    into = [[address + 4 * MIB for address in of_one] for of_one in parts]
    assert store.batch_get_into_multi_buffers(keys, into, sizes) == [1024] * 64
    assert block.read(4 * MIB, 64 * 1024) == b"".join(content)


def test_get_into_ranges_copies_ranges_and_reports_errors(store, block):
    at = block.address
    assert store.put_batch(["a", "b"], [bytes(range(36)), bytes(range(100, 136))]) == 0
    into = [at + 4096, at + 8192]
    targets, sources = [[[0, 20], [8]], [[4], [16]]], [[[1, 30], [2]], [[0], [10]]]
    sizes = [[[4, 3], [5]], [[6], [4]]]
    assert store.get_into_ranges(into, [["a", "b"], ["b", "a"]], targets, sources, sizes) == sizes
    assert block.read(4096, 4) == bytes([1, 2, 3, 4])
    assert block.read(4104, 5) == bytes(range(102, 107))
    assert block.read(4116, 3) == bytes([30, 31, 32])
    assert block.read(8208, 4) == bytes(range(10, 14))
    assert store.get_into_ranges([at], [["nope", "a"]], [[[0], [8]]], [[[0], [0]]], [[[4], [4]]]) == [[[-704], [4]]]
    assert store.get_into_ranges([at], [["a"]], [[[0]]], [[[35]]], [[[4]]]) == [[[-600]]]
    assert store.get_into_ranges([0], [["a"]], [[[0]]], [[[0]]], [[[4]]]) == [[[-600]]]
    assert store.get_into_ranges([at], [["a"]], [[[block.size - 1]]], [[[0]]], [[[4]]]) == [[[-600]]]
    assert store.get_into_ranges([at], [["a", "b"]], [[[0], []]], [[[0, 1], []]], [[[], []]]) == [[[-600, -600], []]]


def test_batches_accept_tuples(store, block):
    assert store.batch_put_from(("a", "b"), (block.address, block.address), (4, 4)) == [0, 0]
    assert store.batch_get_into(("a", "b"), (block.address, block.address + 8), (4, 4)) == [4, 4]
    assert store.batch_is_exist(("a", "b", "c")) == [1, 1, 0]


def test_register_buffer_rejects_overlapping_ranges(store):
    block = Block()
    at, size = block.address, block.size
    assert store.register_buffer(at, size) == 0
    assert store.register_buffer(at, size) == -600, "twice"
    assert store.register_buffer(at + 4096, 4096) == -600, "within"
    assert store.register_buffer(at + size - 1, 2) == -600, "over the end"
    assert store.register_buffer(0, 100) == -600
    assert store.register_buffer(at, 0) == -600
    assert store.unregister_buffer(at + 4096) == -600, "not the start of a range"
    assert store.unregister_buffer(0) == -600
    assert store.unregister_buffer(at) == 0
    assert store.unregister_buffer(at) == -600
    assert store.register_buffer(at, 8192) == 0
    assert store.register_buffer(at + 8192, 8192) == 0, "adjacent"
    assert store.register_buffer(at + 4096, 8192) == -600
    assert store.unregister_buffer(at) == 0
    assert store.register_buffer(at + 4096, 4096) == 0
    with pytest.raises(TypeError):
        store.register_buffer(-1, 100)
    with pytest.raises(TypeError):
        store.register_buffer("x", 100)


def test_unregistered_mapped_memory_is_accepted(store):
    block = Block()
    block.fill(0, b"0123456789abcdef")
    at = block.address
    assert store.put_from("k", at, 16) == 0
    assert store.get_into("k", at + 4096, 16) == 16
    assert store.batch_put_from(["l"], [at], [4]) == [0]
    assert store.batch_get_into(["k", "l"], [at + 5000, at + 6000], [16, 4]) == [16, 4]
    assert store.batch_put_from_multi_buffers(["m"], [[at, at + 8]], [[4, 4]]) == [0]
    assert store.batch_get_into_multi_buffers(["m"], [[at + 7000, at + 7100]], [[4, 4]]) == [8]
    assert block.read(7100, 4) == b"89ab"


def test_unmapped_memory_is_rejected(store):
    allocator = MooncakeHostMemAllocator()
    unmapped = allocator.alloc(1 << 20)
    assert allocator.free(unmapped) == 0
    assert store.put("k", b"0123") == 0
    assert store.get_into("k", unmapped, 16) == -600
    assert store.put_from("l", unmapped, 16) == -600
    assert store.batch_get_into(["k"], [unmapped], [16]) == [-600]
    assert store.batch_put_from(["l"], [unmapped], [16]) == [-600]
    assert store.batch_get_into_multi_buffers(["k"], [[unmapped]], [[4]]) == [-600]
    assert store.batch_put_from_multi_buffers(["l"], [[unmapped]], [[4]]) == [-600]
    assert store.get_into("k", (1 << 64) - 16, 16) == -600
    assert store.register_buffer(unmapped, 4096) == -600


def test_inaccessible_memory_is_rejected(store):
    # Address ranges of GPU memory look like this to a process.
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    inaccessible = libc.mmap(None, MIB, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert store.put("k", b"0123") == 0
    assert store.register_buffer(inaccessible, MIB) == -600
    assert store.get_into("k", inaccessible, 16) == -600
    assert store.put_from("l", inaccessible, 16) == -600


def test_transfer_may_span_adjacent_registered_buffers(store):
    block = Block()
    block.fill(0, bytes(range(256)) * 64)
    assert store.register_buffer(block.address, 8192) == 0
    assert store.register_buffer(block.address + 8192, 8192) == 0
    assert store.put_from("k", block.address + 8190, 4) == 0
    assert store.get("k") == bytes([254, 255, 0, 1])
    assert store.put_from("l", block.address + 16380, 8) == -600, "over the end of both"
    assert store.get_into("k", block.address + 16382, 4) == -600
    assert store.batch_get_into(["k", "k"], [block.address, block.address + 16382], [4, 4]) == [4, -600]
    addresses = [block.address, block.address + 8192]
    assert store.batch_put_from(["a", "b"], addresses, [4, 4]) == [0, 0]


def test_host_allocator_alloc_and_free():
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(8192)
    ctypes.memset(address, 1, 8192)
    assert allocator.free(address) == 0
    assert allocator.free(address) == -1
    for size in (0, 1 << 60):
        with pytest.raises(RuntimeError):
            allocator.alloc(size)


def test_host_allocator_memory_can_be_registered(store):
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 16)
    assert store.register_buffer(address, 1 << 16) == 0
    assert store.put_from("k", address, 100) == 0
    assert store.get_into("k", address + 4096, 100) == 100
    assert store.unregister_buffer(address) == 0
    assert allocator.free(address) == 0


@pytest.mark.slow
def test_256_mib_object_round_trips_by_address(store):
    block = Block(512 * MIB)
    half = 256 * MIB
    block.view[:half] = bytes(range(256)) * MIB
    assert store.register_buffer(block.address, block.size) == 0
    assert store.put_from("large", block.address, half) == 0
    assert store.get_into("large", block.address + half, half) == half
    assert block.view[:half] == block.view[half:]


def test_64_threads_transfer_by_address(store):
    block = Block(64 * 8192)
    assert store.register_buffer(block.address, block.size) == 0
    wrong = []

    def work(number: int) -> None:
        at = number * 8192
        for turn in range(20):
            value = bytes([number, turn]) * 1024
            source = block.fill(at, value)
            keys = [f"a{number}_{turn}_{part}" for part in range(4)]
            if store.batch_put_from(keys, [source] * 4, [2048] * 4) != [0] * 4:
                wrong.append(("put", number, turn))
            if store.get_into(keys[3], block.address + at + 4096, 4096) != 2048 or block.read(at + 4096, 2048) != value:
                wrong.append(("get", number, turn))
            if store.batch_remove(keys, True) != [0] * 4:
                wrong.append(("remove", number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
