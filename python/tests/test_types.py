"""The stub contains all names of the extension, and typical programs pass mypy in strict mode."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import resources

import pytest

import moontide
from moontide import _native, blocks, ep

#: Private classes of ``moontide.nano``.
NANO = {"KernelCell", "PendingRecord", "PushWriter", "RankStore"}


def stub() -> dict[str, set[str]]:
    """Returns the classes of the stub, with their members."""
    text = resources.files(moontide).joinpath("_native.pyi").read_text()
    return {
        each.name: {inner.name for inner in each.body if isinstance(inner, ast.FunctionDef)}
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef)
    }


def test_stub_covers_native_module():
    classes = stub()
    public = {name for name in vars(_native) if not name.startswith("_")}
    assert public <= set(classes)
    for name in public:
        of_object = set(dir(object))
        own = {member for member in vars(getattr(_native, name)) if member not in of_object}
        own -= {"__module__", "__doc__", "__weakref__", "__hash__", "__buffer__", "__release_buffer__"}
        assert own <= classes[name], name


def test_package_has_py_typed_marker():
    assert resources.files(moontide).joinpath("py.typed").is_file()


def test_public_names_are_exported():
    exported = set(moontide.__all__)
    native = {name for name in vars(_native) if not name.startswith("_")}
    assert native <= exported | set(blocks.__all__) | set(ep.__all__) | NANO
    for name in exported:
        assert hasattr(moontide, name)
    assert not any(inspect.ismodule(getattr(moontide, name)) for name in exported)


TYPICAL = """
import asyncio
import ctypes
from array import array
from typing import assert_type

import numpy

import moontide
from moontide.blocks import BlockCache, Rows, SuspendedSequence, namespace_of
from moontide.ep import Channel, Dispatched, RanksMissing, World, reference


def threads(master: str) -> None:
    with moontide.dev(64 << 20, nodes=2) as dev, dev.store(shm=False, timeout=1.0) as store:
        assert_type(store, moontide.Store)
        store["a"] = b"1"
        del store["a"]
        assert_type("a" in store, bool)
    with moontide.Store(master, tenant="t", timeout=2, hedge=False) as store:
        options = moontide.PutOptions(replicas=2, ttl=1, pin="soft", cohort=b"c")
        assert_type(store.put("k", b"v", options), bool)
        store.put(b"k", bytearray(1), overwrite=True, ttl=None)
        store.put("k", memoryview(b"").cast("I"))
        store.put("k", array("d", [1.0]))
        store.put("k", numpy.zeros((2, 3)))
        store.put_from("k", [b"1", numpy.zeros(3)])
        block = (ctypes.c_uint8 * 16)()
        store.put("k", moontide.RawMemory(ctypes.addressof(block), 16))
        assert_type(store.get("k"), bytes | None)
        assert_type(store.get_into("k", bytearray(3)), int | None)
        store.get_into("k", [bytearray(3), numpy.zeros(1)])
        assert_type(store.batch_get(["k", b"l"]), list[bytes | None])
        assert_type(store.batch_get_into(["k"], [bytearray(1)]), list[int | None])
        assert_type(store.batch_put(["k"], [b""], replicas=2), list[bool])
        view = store.get_view("k")
        if view is not None:
            with view as same:
                assert_type(same, moontide.View)
            assert_type(bytes(view), bytes)
            assert_type(memoryview(view), memoryview)
            numpy.frombuffer(memoryview(view), "u1")
            store.put("again", view)
        tensor = store.get_tensor("k")
        if tensor is not None:
            assert_type(tensor.shape, tuple[int, ...])
            store.put_tensor("again", tensor)
        assert_type(store.keys("p"), list[bytes])
        try:
            store.remove("k", force=True)
        except moontide.BatchError as error:
            print(error.outcomes, error.code, error.retryable)
        except (moontide.Unreachable, moontide.NoSpace) as other:
            print(other.code)


def engine(store: moontide.Store) -> None:
    cache = BlockCache(layers=2, kv_heads=2, dim=8, dtype="float32", blocks=16, blocks_max=32)
    namespace = namespace_of(cache, "tiny", revision="1")
    sequence, cached_tokens = cache.allocate([1, 2, 3], salt="tenant")
    assert_type(cached_tokens, int)
    with cache.writer(sequence) as writer:
        assert_type(writer.tokens, range)
        writer.write("k", 0, numpy.zeros((3, 2, 8), "float32"))
        assert_type(writer.rows("v", 1), list[Rows])
        writer.mark_written(3)
    with cache.view(sequence) as view:
        assert_type(view.tokens, int)
        assert_type(view.contiguous("k", 0), Rows | None)
    assert_type(cache.restore(sequence, store, namespace), int)
    suspended = cache.suspend(sequence, store, namespace.prefix, part="1", options=moontide.PutOptions(ttl=1))
    assert_type(cache.resume(SuspendedSequence(bytes(suspended)), store, namespace), int)
    try:
        cache.append(sequence, 3)
    except (moontide.OutOfBlocks, moontide.UnknownSequence) as error:
        print(error.code)


def experts(path: str) -> None:
    size = Channel.bytes(ranks=1, tokens_max=2, hidden=8, top_k=1, experts_per_rank=2)
    with World(path, 0, 1, size, timeout=5) as world:
        assert_type(world.barrier(), tuple[int, ...])
        channel = Channel(world, tokens_max=2, hidden=8, top_k=1, experts_per_rank=2, combine_mode="push")
        tokens = reference.to_rows(numpy.zeros((2, 8)), "bfloat16")
        routes, weights = numpy.zeros((2, 1), "int32"), numpy.ones((2, 1), "float32")
        out, ranks = channel.moe_forward(tokens, routes, weights, lambda rows, _: rows, out=tokens)
        assert_type(ranks, tuple[int, ...])
        try:
            dispatched = channel.start_dispatch(tokens, routes, weights).wait_packed(timeout=1)
            assert_type(dispatched, Dispatched)
            numpy.frombuffer(memoryview(dispatched.tokens(0)), "u2")
            dispatched.scatter(dispatched.packed)
            dispatched.combine(out)
        except RanksMissing as missing:
            channel.exclude(missing.ranks)


async def tasks(master: str) -> None:
    async with await moontide.AsyncStore.connect(master, shm=False) as store:
        assert_type(store, moontide.AsyncStore)
        assert_type(await store.put("k", b"v", ttl=1.5), bool)
        assert_type(await store.get("k"), bytes | None)
        both = await asyncio.gather(store.exists("k"), store.get_view("k"))
        assert_type(both, tuple[bool, moontide.View | None])
"""

WRONG = """
import moontide
store = moontide.Store("m")
store.put("k", "text")
store.put(3, b"")
store.put("k", b"", color=1)
store.put("k", b"", pin="iron")
store.get_into("k", 3)
moontide.Store("m", timeot=1)
"""


def mypy(path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(path.parent),
        "--no-error-summary",
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=path.parent)


@pytest.mark.slow
def test_typical_programs_pass_mypy_strict(request, tmp_path):
    if sys.version_info < (3, 12):
        request.applymarker(pytest.mark.not_in_ci("types-before-3.12"))
    pytest.importorskip("mypy")
    good = tmp_path / "good.py"
    good.write_text(TYPICAL)
    assert mypy(good).stdout == ""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    found = [int(line.split(":")[1]) for line in mypy(wrong).stdout.splitlines() if ": error:" in line]
    assert sorted(set(found)) == list(range(4, 10))
