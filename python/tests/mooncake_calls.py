"""Calls whose results are the same for every implementation of ``mooncake.store``.

``python mooncake_calls.py MODULE MASTER`` makes the calls and prints one line of JSON for each.
``test_mooncake_parity.py`` runs it with Moontide and with Mooncake. Calls that crash one of them are not included.
"""

import ctypes
import importlib
import json
import mmap
import os
import sys


def to_json(result: object) -> object:
    """Converts a result to a JSON value."""
    if isinstance(result, bytes):
        return result.hex()
    if isinstance(result, (list, tuple)):
        return [to_json(one) for one in result]
    if isinstance(result, dict):
        return {key: len(value) for key, value in result.items()}
    return result if result is None or isinstance(result, (int, str)) else type(result).__name__


def main(module: str, master: str) -> None:
    mooncake = importlib.import_module(module)
    memory = mmap.mmap(-1, 1 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:256] = bytes(range(256))
    store = mooncake.MooncakeDistributedStore()
    config = mooncake.ReplicateConfig()
    count = 0

    def call(name: str, *arguments: object, **named: object) -> None:
        nonlocal count
        try:
            result = to_json(getattr(store, name)(*arguments, **named))
        except TypeError:
            result = "TypeError"
        count += 1
        print(json.dumps([count, name, result]), flush=True)

    call("health_check")
    call("close")
    call("setup", {"metadata_server": "x"})
    call("setup", "127.0.0.1")
    call("setup", "127.0.0.1", "P2PHANDSHAKE", "0", 0, "tcp", "", master)
    call("setup", "127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master)
    call("health_check")

    for key, value in [("k", b"hello"), ("k", b"other"), ("e", b""), ("", b"x"), ("a\0b", b"nul"), ("a b/ü", b"w")]:
        call("put", key, value)
        call("get", key)
        call("is_exist", key)
        call("get_size", key)
    call("put", "bytearray", bytearray(b"xy"))
    call("put", "memoryview", memoryview(b"xyz"))
    call("put", "text", "text")
    call("put", 5, b"x")
    call("put", "none", None)
    call("put", "config", b"x", config)
    call("put", "config2", b"x", {"replica_num": 1})
    call("put", key="named", value=b"x", config=config)
    call("get_batch", ["k", "nope", "bytearray"])
    call("batch_is_exist", ["k", "nope", "", "memoryview"])
    call("batch_is_exist", ("k", "nope"))
    call("batch_is_exist", [])
    call("batch_is_exist", [3])
    call("get_buffer", "nope")
    call("get_size", "nope")

    call("put_parts", "p", b"ab", b"cd", memoryview(b"ef"))
    call("get", "p")
    call("put_parts", "p", b"zz")
    call("put_parts", "p0")
    call("put_parts", "p1", b"a", b"", config=config)
    call("put_parts", "p2", b"", b"")
    call("batch_is_exist", ["p", "p0", "p1", "p2"])
    call("put_batch", ["b1", "b2"], [b"1", b"22"])
    call("put_batch", ["b1", "b3"], [b"x", b"3"])
    call("put_batch", ["b4", "b5"], [b"x"])
    call("put_batch", [], [])
    call("put_batch", ["", "b6"], [b"x", b"y"])
    call("put_batch", ["b7", "b8"], [b"", b"y"])
    call("put_batch", ["b9", "b9"], [b"1", b"1"])
    call("get_batch", ["b1", "b2", "b3", "b6", "b7", "b8", "b9"])

    # Without registration.
    call("put_from", "u1", at, 16)
    call("get_into", "u1", at + 1000, 100)
    call("batch_put_from", ["u2"], [at], [16])
    call("batch_get_into", ["u2"], [at + 2000], [100])
    call("batch_put_from_multi_buffers", ["u3"], [[at, at + 8]], [[4, 4]])
    call("batch_get_into_multi_buffers", ["u3"], [[at + 3000, at + 3100]], [[4, 4]])

    for address, size in [(at, 1 << 20), (at, 1 << 20), (at + 4096, 4096), (at + 8192, 0), (0, 100)]:
        call("register_buffer", address, size)
    call("register_buffer", -1, 100)
    call("register_buffer", "x", 100)
    for address in (at + 4096, at + 12345, 0, at, at):
        call("unregister_buffer", address)
    call("register_buffer", at, 8192)
    call("register_buffer", at + 4096, 8192)
    call("register_buffer", at + 8192, (1 << 20) - 8192)

    call("put_from", "r1", at, 16)
    call("put_from", "r1", at + 8, 8)
    call("get", "r1")
    call("put_from", "r0", at, 0)
    call("is_exist", "r0")
    call("put_from", "rn", at, -1)
    call("put_from", "", at, 1)
    call("put_from", "rc", at, 4, config)
    for key, size in [("r1", 16), ("r1", 100), ("r1", 8), ("r1", 0), ("nope", 10), ("", 16)]:
        call("get_into", key, at + 4096, size)
    print(json.dumps(memory[4096:4112].hex()))

    call("batch_put_from", ["x1", "x2", "r1"], [at, at + 16, at], [16, 8, 16])
    call("batch_put_from", ["x3", "x4"], [at], [16, 8])
    call("batch_put_from", ["x3"], [at], [16, 8])
    call("batch_put_from", [], [], [])
    call("batch_put_from", ["x5", "x6"], [at, at], [0, 4])
    call("batch_put_from", ["", "x7"], [at, at], [4, 4])
    call("batch_put_from", ["x8", "x8"], [at, at], [4, 4])
    call("batch_is_exist", ["x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8"])
    call("batch_get_into", ["x1", "nope", "x2"], [at + 4096, at + 5000, at + 6000], [16, 16, 16])
    call("batch_get_into", ["x1", "x2"], [at + 4096, at + 6000], [4, 8])
    call("batch_get_into", ["x1", "x2"], [at + 4096], [4, 8])
    call("batch_get_into", [], [], [])
    call("batch_get_into", ["x1", "x1"], [at + 4096, at + 8192], [16, 16])
    call("batch_get_into", ["", "x1"], [at + 4096, at + 8192], [16, 16])

    call("batch_put_from_multi_buffers", ["m1", "m2"], [[at, at + 100], [at + 8]], [[4, 4], [8]], config)
    call("batch_put_from_multi_buffers", ["m1"], [[at]], [[4]])
    call("get", "m1")
    for sizes in ([4, 4], [4, 400], [6, 400], [4, 2], [4], [4, 4, 4], []):
        into = [at + 4096 + 1000 * number for number in range(len(sizes))]
        call("batch_get_into_multi_buffers", ["m1"], [into], [sizes])
    call("batch_get_into_multi_buffers", ["m1", "nope"], [[at + 4096, at + 5000], [at + 6000]], [[4, 4], [4]])
    call("batch_get_into_multi_buffers", ["m1"], [[at + 4096, at + 5000]], [[4, 4]], True)
    call("batch_get_into_multi_buffers", ["m1"], [[at]], [[1, 2]])
    call("batch_get_into_multi_buffers", [], [], [])
    for parts, sizes in [([at, at + 4], [4]), ([], []), ([at, at + 8], [0, 4]), ([at], [0])]:
        call("batch_put_from_multi_buffers", [f"n{len(parts)}{len(sizes)}{sum(sizes)}"], [parts], [sizes])
    call("batch_put_from_multi_buffers", ["m3", "m4"], [[at]], [[4]])
    call("batch_put_from_multi_buffers", [], [], [])
    call("get_into_ranges", [at], [["m1", "nope"]], [[[200, 300], [0]]], [[[0, 4], [0]]], [[[4, 4], [4]]])
    call("get_into_ranges", [at], [["m1"]], [[[0]]], [[[7]]], [[[4]]])
    call("put_from_with_metadata", "pm", at, at + 100, 16, 4)
    call("get", "pm")
    call("upsert", "pm", b"new")
    call("get", "pm")
    call("upsert_from", "pm", at, 4)
    call("upsert_parts", "pm", b"x", b"y")
    call("upsert_batch", ["pm", "pn"], [b"1", b"2"])
    call("batch_upsert_from", ["pm"], [at], [3])
    call("get_batch", ["pm", "pn"])

    call("batch_get_replica_desc", ["k", "nope", "x1"])
    call("batch_get_replica_desc", [])
    call("get_replica_desc", "nope")
    (replica,) = store.get_replica_desc("k")
    print(json.dumps([replica.is_memory_replica(), replica.is_disk_replica(), replica.is_local_disk_replica()]))
    print(json.dumps([int(replica.status), replica.get_memory_descriptor().buffer_descriptor.size]))
    buffer = store.get_buffer("k")
    print(json.dumps([buffer.size(), len(buffer), bytes(buffer).hex(), ctypes.string_at(buffer.ptr(), 5).hex()]))
    del buffer
    for number, fields in enumerate(
        [{"replica_num": 2}, {"replica_num": 0}, {"group_ids": ["a"]}, {"group_ids": ["a", "b"]}]
    ):
        special = mooncake.ReplicateConfig()
        for name, value in fields.items():
            setattr(special, name, value)
        call("put", f"special{number}", b"x", special)

    call("remove", "nope")
    call("remove", "")
    call("remove", "k", True)
    call("remove", "p", force=True)
    call("is_exist", "k")
    call("batch_remove", ["x1", "nope", ""], True)
    call("batch_remove", [])
    call("remove_by_regex", "^zzz")
    call("remove_by_regex", "([")
    call("remove_by_regex", "1$", True)
    call("remove_by_regex", "^b[0-9]", True)
    call("remove_all", True)
    call("remove_all", True)
    call("batch_is_exist", ["r1", "b2", "m1"])
    call("alloc_from_mem_pool", 100)
    call("unregister_buffer", at)
    call("close")
    call("close")
    call("health_check")
    call("get", "k")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
