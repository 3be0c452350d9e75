"""How the kernels of this package are compiled, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether ``TRITON_INTERPRET=1`` was set when Triton was imported: kernels then run in Python, on the CPU."""

WARPS = 4
"""Of every launch. ``order.look`` relies on it: see there."""


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with one binary for all numbers.

    Triton compiles anew when an integer becomes 1, a multiple of 16, or too large for 32 bits. Ranks, offsets and
    epochs do so all the time. That an address is aligned is said in the kernel, where it is known.
    """
    annotations = function.__annotations__.items()
    numbers = [name for name, kind in annotations if str(kind) in ("tl.int32", "tl.int64")]
    return triton.jit(function, do_not_specialize=numbers)


def backend_of(tensor: torch.Tensor) -> str:
    """Whose instructions the kernels that get this tensor are made of: ``interpreter``, ``cuda`` or ``hip``."""
    if INTERPRETED:
        return "interpreter"
    if tensor.device.type != "cuda":
        raise ValueError(f"kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU; {tensor.device} is neither")
    return "hip" if torch.version.hip else "cuda"
