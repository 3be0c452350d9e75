"""Compilation of the kernels of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether ``TRITON_INTERPRET=1`` was set when Triton was imported: kernels then run in Python, on the CPU."""

WARPS = 4
"""Warps of every launch. ``memory_order.load_acquire`` relies on it: see there."""


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with one binary for all values of integers.

    Triton compiles a kernel again when an integer is 1, a multiple of 16, or too large for 32 bits. Ranks, offsets and
    epochs change in this way all the time. The kernels declare the alignment of addresses themselves.
    """
    annotations = function.__annotations__.items()
    numbers = [name for name, kind in annotations if str(kind) in ("tl.int32", "tl.int64")]
    return triton.jit(function, do_not_specialize=numbers)


def backend_of(tensor: torch.Tensor) -> str:
    """Returns the backend of kernels that take this tensor: ``interpreter``, ``cuda`` or ``hip``."""
    if INTERPRETED:
        return "interpreter"
    if tensor.device.type != "cuda":
        raise ValueError(f"kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU, not on {tensor.device}")
    return "hip" if torch.version.hip else "cuda"
