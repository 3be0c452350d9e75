"""Memory-ordering operations that Triton lacks: a full fence, an acquire load, and the completion of a program's
stores.

The constexpr ``BACKEND`` selects the implementation of each function.

**cuda** (sm_70 and later). ``fence.sc.sys`` and ``ld.acquire.sys``. ``bar.sync`` orders the accesses of the program's
other threads before what follows, and a release is cumulative over it.

**hip** (gfx942). The sequences of LLVM's memory model for system scope: release is ``buffer_wbl2 sc0 sc1`` and
``s_waitcnt vmcnt(0)``, acquire is ``buffer_inv sc0 sc1``, and a sequentially consistent fence is both in this order. A
release by Triton's atomics is not enough for a program of several waves, for two reasons. First, ``s_barrier`` does not
wait for stores, and ``vmcnt`` counts those of one wave. Second, LLVM does not count the write-back: where it knows of
no pending store, it omits the wait between ``buffer_wbl2`` and the atomic. Hence ``release_fence``.

**interpreter**. Nothing is emitted. Its atomics are ``std::atomic`` on the address itself, so they are atomic between
processes; on x86 each is a ``lock``ed instruction, which is also a full fence. Its loads and stores are ``memcpy``,
which does not tear an aligned word. It runs programs one after the other. It therefore tests the logic, also between
processes, but not the memory ordering of a GPU.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from ._jit import WARPS, jit

_LANES = tl.constexpr(64 * WARPS)


@jit
def pointer(address: tl.tensor) -> tl.tensor:
    """Converts an address to a pointer to a word."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@jit
def translate(address: tl.tensor, bases: tl.tensor, me: tl.tensor, peer: tl.tensor) -> tl.tensor:
    """Translates an address in my region to the address at the same offset in the peer's region."""
    return address.to(tl.int64) - tl.load(bases + me) + tl.load(bases + peer)


@jit
def fence(BACKEND: tl.constexpr) -> None:
    """Sequentially consistent fence at system scope: accesses before it are never observed after accesses behind it."""
    if BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "fence.sc.sys;\nmov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    if BACKEND == "hip":
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0) lgkmcnt(0)\nbuffer_inv sc0 sc1\nv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def release_fence(BACKEND: tl.constexpr) -> None:
    """Orders all stores and loads of this program before its next release atomic."""
    if BACKEND == "hip":
        # Executed by each wave, before the barrier.
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@jit
def load_acquire(address: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """Loads a word with acquire at system scope. The word may be mapped read-only, so a writing atomic cannot be used.

    The whole program gets one value. Every thread executes a scalar load and may see another value, and threads that
    then diverge at a barrier hang. Therefore every thread loads, and a reduction broadcasts the value of lane 0. This
    works because there are at least as many lanes as threads, and each lane belongs to one thread.
    """
    if BACKEND == "interpreter":
        found = tl.load(pointer(address), volatile=True)
    else:
        lanes = tl.arange(0, _LANES)
        addresses = tl.full([_LANES], 0, tl.int64) + address
        if BACKEND == "cuda":
            words = tl.inline_asm_elementwise(
                "ld.acquire.sys.global.b64 $0, [$1];",
                "=l,l,~{memory}",
                [addresses],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        else:
            words = tl.inline_asm_elementwise(
                "global_load_dwordx2 $0, $1, off sc0 sc1\ns_waitcnt vmcnt(0)\nbuffer_inv sc0 sc1",
                "=&v,v,~{memory}",
                [addresses],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        found = tl.sum(tl.where(lanes == 0, words, 0), axis=0)
        # The barrier extends the acquire of lane 0's thread to the other threads.
        tl.debug_barrier()
    return found


@jit
def backoff(BACKEND: tl.constexpr) -> None:
    """Waits about 100 ns between two polls, to leave the memory to other accesses."""
    if BACKEND == "cuda":
        tl.inline_asm_elementwise("nanosleep.u32 100;\nmov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if BACKEND == "hip":
        tl.inline_asm_elementwise("s_sleep 3\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
