"""Compiles every kernel for sm_90 and gfx942, without a GPU, and writes the assembly to a folder.

    python compile_kernels.py FOLDER        # FOLDER/sm_90/push.s, …

Must run without ``TRITON_INTERPRET``: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton  # type: ignore[import-untyped]
from moontide.kernels._jit import WARPS
from moontide.kernels.litmus import message_passing, store_buffering
from moontide.kernels.push import push_pages
from moontide.kernels.read import acquire_cell, copy_pages, read_record, release_cell, wait_until_ready
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

TARGETS = {"sm_90": ("cuda", GPUTarget("cuda", 90, 32)), "gfx942": ("hip", GPUTarget("hip", "gfx942", 64))}
TENSORS = {"bases": "*i64", "status": "*i32", "digest": "*i64", "result": "*i64", "missed": "*i32"}
WIDE: dict[str, Any] = {"WIDE": True, "DIGEST": False, "BLOCK": 1024}
NARROW = WIDE | {"WIDE": False}
DIGEST = WIDE | {"DIGEST": True}

KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "push": (push_pages, WIDE),
    "push-narrow": (push_pages, NARROW | {"DIGEST": True}),
    "push-digest": (push_pages, DIGEST),
    "wait": (wait_until_ready, {}),
    "acquire": (acquire_cell, {}),
    "copy": (copy_pages, WIDE),
    "copy-narrow": (copy_pages, NARROW),
    "copy-digest": (copy_pages, DIGEST),
    "release": (release_cell, {}),
    "read": (read_record, WIDE),
    "read-narrow": (read_record, NARROW),
    "read-digest": (read_record, DIGEST),
    "mp": (message_passing, {}),
    "sb": (store_buffering, {"FENCED": True}),
    "sb-unfenced": (store_buffering, {"FENCED": False}),
}


def compiled(kernel: Any, target: str, constants: dict[str, Any]) -> str:
    backend, gpu = TARGETS[target]
    constants = constants | {"BACKEND": backend}
    signature = {}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif parameter.name in TENSORS:
            signature[parameter.name] = TENSORS[parameter.name]
        else:
            # Same types as at a launch: 64 bits for every number.
            assert parameter.annotation_type == "i64" and parameter.do_not_specialize, parameter.name
            signature[parameter.name] = "i64"
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assembly = triton.compile(source, target=gpu, options={"num_warps": WARPS}).asm
    return str(assembly["ptx" if backend == "cuda" else "amdgcn"])


def main() -> None:
    for target in TARGETS:
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True)
        for name, (kernel, constants) in KERNELS.items():
            (folder / f"{name}.s").write_text(compiled(kernel, target, constants))


if __name__ == "__main__":
    main()
