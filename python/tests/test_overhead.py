"""Coarse upper bounds of the latency of a call: twice the expected value. ``moontide bench`` measures precisely."""

from __future__ import annotations

import statistics
import time

import pytest

LOCAL_US_MAX = 6.0


def median_us(call, rounds: int = 2000) -> float:
    """Returns the median latency, best of three runs, because the machine may run other work."""

    def once() -> float:
        taken = []
        for _ in range(rounds):
            begun = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - begun)
        return statistics.median(taken) / 1000

    return min(once() for _ in range(3))


@pytest.mark.parametrize("call", ["get_view", "get", "get_into", "get_tensor"])
def test_local_read_latency_is_bounded(store, key, call):
    import numpy as np

    store.put_tensor(key("a"), np.zeros(32, "u1"))
    space = bytearray(256)
    name = key("a")
    calls = {
        "get_view": lambda: store.get_view(name),
        "get": lambda: store.get(name),
        "get_into": lambda: store.get_into(name, space),
        "get_tensor": lambda: store.get_tensor(name),
    }
    took = median_us(calls[call])
    print(f"{call}: {took:.2f} us")
    assert took <= LOCAL_US_MAX


def test_zero_copy_read_latency_is_independent_of_length(store, key):
    store.put(key("small"), b"x")
    store.put(key("large"), bytes(64 << 20))
    small = median_us(lambda: store.get_view(key("small")))
    large = median_us(lambda: store.get_view(key("large")))
    print(f"{small:.2f} us for 1 byte, {large:.2f} us for 64 MiB")
    assert large < small * 3 + 3
