"""``moontide.nano`` on device memory, with the fake driver (docs/devices.md): location of the bytes, release of driver
resources, and invalid arguments. ``test_nano.py`` has the behaviour that is the same as in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nano_rank import Rank

pytestmark = pytest.mark.skipif(
    "MOONTIDE_FAKE_DRIVER_LIB" not in os.environ, reason="MOONTIDE_FAKE_DRIVER_LIB is not set"
)

Start = Callable[..., Rank]


@pytest.fixture(params=["cuda", "hip"])
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a rank on a device, with a driver that logs its calls."""
    started: list[Rank] = []
    monkeypatch.setenv("MOONTIDE_FAKE_DRIVER_LOG", str(tmp_path / "log"))

    def start(rank: int = 0, ranks: int = 1, **settings: Any) -> Rank:
        started.append(Rank(tmp_path / "w", rank, ranks, device=vendor, **settings))
        return started[-1]

    yield start
    for rank in started:
        rank.end()


def calls(folder: Path, name: str) -> list[int]:
    """Returns the lengths (the last argument but one) of all calls of this name."""
    lines = (folder / "log").read_text().splitlines()
    return [int(line.split(", ")[-2], 16) for line in lines if f"{name}(" in line or f"{name}_v2(" in line]


def test_records_are_in_device_memory_and_driver_resources_are_freed(start: Start, vendor: str, tmp_path: Path) -> None:
    prefix = {"cuda": "cuMemcpy", "hip": "hipMemcpy"}[vendor]
    rank = start()
    assert rank.receive() == "ready"
    rank.run('cache.put("k", noise(3, 600_000))')
    # Without the words of the flag, only pages remain.
    assert [size for size in calls(tmp_path, prefix + "HtoDAsync") if size > 64] == [256 << 10, 256 << 10, 75_712]
    code = """
        buffer = bytearray(600_000)
        cache.get_into("k", buffer)
        out = [bytes(buffer) == noise(3, 600_000).tobytes(), cache.store.get("k") == noise(3, 600_000).tobytes()]
    """
    assert rank.run(code) == [True, True]
    # Copied by the rank, and by its node for a client of the store.
    assert sum(calls(tmp_path, prefix + "DtoHAsync")) >= 2 * 600_000
    rank.run("cache.close()")
    assert rank.process.stdin is not None
    rank.process.stdin.close()
    assert rank.process.wait(60) == 0
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("exit: nothing left")


DEVICE_ARRAY = """
    class DeviceArray:
        def __init__(self, address, size, **changed):
            self.nbytes = size
            interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
            self.__cuda_array_interface__ = interface | changed
"""


def test_device_arrays_are_copied_device_to_device(start: Start, vendor: str, tmp_path: Path) -> None:
    rank = start()
    assert rank.receive() == "ready"
    code = (
        DEVICE_ARRAY
        + """
    source = cache.open_for_write("source", 300_001)
    source.write(noise(3, 300_001))
    cache.put("copy", DeviceArray(source.payload_ptr, 300_001))
    # An unwritten plan serves as device memory.
    target = cache.open_for_write("target", 300_001)
    cache.get_into("copy", DeviceArray(target.payload_ptr, 300_001))
    cache.put("again", DeviceArray(target.payload_ptr, 300_001))
    out = [bytes(cache.get(key)) == noise(3, 300_001).tobytes() for key in ("copy", "again")]
    target.abort()
"""
    )
    assert rank.run(code) == [True, True]
    prefix = {"cuda": "cuMemcpy", "hip": "hipMemcpy"}[vendor]
    pages = [256 << 10, 300_001 - (256 << 10)]
    assert calls(tmp_path, prefix + "DtoDAsync") == [*pages, 300_001, *pages]
    invalid = (
        DEVICE_ARRAY
        + """
    plan = cache.open_for_write("invalid", 100)
    wrong = {
        "strides": DeviceArray(plan.payload_ptr, 100, strides=(2,)),
        "mask": DeviceArray(plan.payload_ptr, 100, mask=DeviceArray(plan.payload_ptr, 100)),
        "length": DeviceArray(plan.payload_ptr, 99),
    }
    out = []
    for name, array in wrong.items():
        try:
            plan.write(array)
        except moontide.InvalidArgument:
            out.append(name)
    plan.write(DeviceArray(plan.payload_ptr - 512, 100, strides=(1,)))
    cache.commit("invalid")
    with cache.get_location("invalid") as meta:
        try:
            meta.copy_into(DeviceArray(plan.ticket.epoch, 100, data=(4096, True)))
        except moontide.InvalidArgument:
            out.append("read-only")
"""
    )
    assert rank.run(invalid) == ["strides", "mask", "length", "read-only"]


#: Calls of the driver in the code of a rank: allocation of device memory, and a "kernel" that writes when it is waited
#: for.
DRIVER = """
    import ctypes, os

    lib = ctypes.CDLL(os.environ["MOONTIDE_CUDA_LIB"])
    is_cuda = vendor == "cuda"

    def call(cuda, hip, *arguments):
        assert getattr(lib, cuda if is_cuda else hip)(*arguments) == 0

    def use(device):
        if is_cuda:
            context = ctypes.c_void_p()
            assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            assert lib.cuCtxSetCurrent(context) == 0
        else:
            assert lib.hipSetDevice(device) == 0

    def alloc(size):
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", "hipMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def start_kernel(address, value, size):
        stream = ctypes.c_uint64()
        call("cuStreamCreate", "hipStreamCreateWithFlags", ctypes.byref(stream), 1)
        fill = (ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size), stream)
        call("cuMemsetD8Async", "hipMemsetD8Async", *fill)
"""


@pytest.mark.parametrize("end", ["dropped", "too late", "aborted"])
def test_extent_is_not_reused_while_a_kernel_writes_it(start: Start, vendor: str, end: str) -> None:
    rank = start(write_timeout=0.4 if end == "too late" else 30.0)
    assert rank.receive() == "ready"
    rank.run(DRIVER, vendor=vendor)
    begin = """
        use(0)
        plan = cache.open_for_write("late", 5000)
        offset = plan.ticket.payload_offset
        start_kernel(plan.payload_ptr, 0xee, 5000)
    """
    rank.run(begin)
    ends = {
        "dropped": "cache._forget(plan); del plan",
        "aborted": "cache._forget(plan); plan.abort(); del plan",
        # The thread of the cache drops it.
        "too late": "del plan",
    }
    rank.run(ends[end])
    again = """
        import time
        deadline = time.monotonic() + 20
        out = "extent was not reused"
        number = 0
        while time.monotonic() < deadline:
            number += 1
            try:
                plan = cache.open_for_write(f"next-{number}", 5000)
                plan.write(bytes(5000))
                cache.commit(f"next-{number}")
            except moontide.Error:
                continue  # the short write_timeout expired
            if plan.ticket.payload_offset == offset:
                # Runs all pending work of the device.
                call("cuCtxSynchronize", "hipDeviceSynchronize")
                out = bytes(cache.get(f"next-{number}")) == bytes(5000)
                break
            time.sleep(0.01)
    """
    assert rank.run(again) is True


def test_arrays_on_other_devices_are_rejected(
    start: Start, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONTIDE_FAKE_DRIVER", "devices=2,blind=1")
    rank = start()
    assert rank.receive() == "ready"
    rank.run(DRIVER, vendor=vendor)
    code = (
        DEVICE_ARRAY
        + """
    use(1)
    other = DeviceArray(alloc(100), 100)
    out = []
    for attempt in (lambda: cache.put("k", other), lambda: cache.get_into("existing", other)):
        try:
            attempt()
        except moontide.DeviceError as error:
            out.append(str(error))
"""
    )
    rank.run('cache.put("existing", bytes(100))')
    errors = rank.run(code)
    assert len(errors) == 2 and all("is on device 1" in each for each in errors), errors


def test_memory_shared_by_handle_is_gone_after_owner_exit(
    start: Start, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory shared by handles: its content is undefined after the owner has exited.
    monkeypatch.setenv("MOONTIDE_FAKE_DRIVER", "fd=0,vmm=0,blind=1")
    master, owner, reader = (start(rank, 3) for rank in range(3))
    assert [rank.receive() for rank in (master, owner, reader)] == ["ready"] * 3
    master.run('cache.put("k", noise(1, 100_000), preferred_segment=1)')
    found = """
        meta = cache.get_location("k")
        buffer = numpy.zeros(100_000, numpy.uint8)
        meta.copy_into(buffer)
        out = bool((buffer == noise(1, 100_000)).all())
    """
    assert reader.run(found) is True
    owner.end()
    gone = """
        try:
            meta.copy_into(buffer)
            out = "copied"
        except moontide.Gone:
            out = "gone"
    """
    assert reader.run(gone) == "gone"


def test_driver_failure_raises_device_error_and_frees_plan(
    start: Start, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = {"cuda": "cuMemcpyHtoDAsync_v2", "hip": "hipMemcpyHtoDAsync"}[vendor]
    # The first three copies of a put write its flag, the fourth its first page.
    monkeypatch.setenv("MOONTIDE_FAKE_DRIVER_FAIL", f"{copy}:4:2")
    rank = start()
    assert rank.receive() == "ready"
    error = rank.run('cache.put("k", noise(1, 1000))')
    assert error.startswith(f"DeviceError: {copy} failed with 2") and "full" in error
    assert rank.run('out = [repr(cache.get_location("k")), cache.stats()["plans_open"]]') == ["NOT_READY", 0]
    # The next put succeeds, possibly in the same extent.
    assert rank.run('cache.put("l", noise(1, 1000)); out = bytes(cache.get("l")) == noise(1, 1000).tobytes()') is True


def test_unknown_device_or_oversized_heap_fails_at_start(start: Start, vendor: str) -> None:
    rank = start(heap_bytes=64 << 30)
    assert rank.process.wait(60) != 0, "the heap exceeds the device memory"
    other = Rank(Path("/nowhere/w"), 0, 1, device="npu:0")
    assert other.process.wait(60) != 0
    other.end()


def test_mixing_device_and_host_ranks_fails(start: Start, tmp_path: Path) -> None:
    first = start(0, 2, timeout=3)
    second = Rank(tmp_path / "w", 1, 2, timeout=3)
    try:
        assert first.process.wait(60) != 0
        assert second.process.wait(60) != 0
    finally:
        second.end()
