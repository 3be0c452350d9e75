"""What Triton's language has no word for: a full fence, a load that acquires, and a program's stores being done.

Every function is chosen by the constexpr ``BACKEND``.

**cuda** (sm_70 and later). ``fence.sc.sys`` and ``ld.acquire.sys``. ``bar.sync`` makes what other threads of the
program did happen before what follows, and a release is cumulative over it.

**hip** (gfx942). The sequences that LLVM's memory model gives for system scope: release is ``buffer_wbl2 sc0 sc1`` and
``s_waitcnt vmcnt(0)``, acquire is ``buffer_inv sc0 sc1``, and a sequentially consistent fence is one after the other.
A release by Triton's atomics is not enough for a program of several waves, for two reasons. ``s_barrier`` does not wait
for stores, and ``vmcnt`` counts those of one wave. And LLVM does not count the write-back: where it knows of no store
that is under way, it leaves out the wait between ``buffer_wbl2`` and the atomic. Hence ``settle``.

**interpreter**. Nothing is emitted. Its atomics are ``std::atomic`` on the address itself, so they hold between
processes; on x86 each is a ``lock``ed instruction, which is a full fence as well. Its loads and stores are ``memcpy``,
whole for an aligned word. It runs programs one after the other. So it shows whether the logic is right, also between
processes, and nothing about the order in which a GPU does things.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from ._jit import WARPS, jit

_LANES = tl.constexpr(64 * WARPS)


@jit
def pointer(address: tl.tensor) -> tl.tensor:
    """To a word at an address."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@jit
def translate(address: tl.tensor, bases: tl.tensor, me: tl.tensor, peer: tl.tensor) -> tl.tensor:
    """What lies at ``address`` in my region has its counterpart in the peer's: where."""
    return address.to(tl.int64) - tl.load(bases + me) + tl.load(bases + peer)


@jit
def fence(BACKEND: tl.constexpr) -> None:
    """Sequentially consistent, at system scope: what is before it and what is behind it are never seen exchanged."""
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
def settle(BACKEND: tl.constexpr) -> None:
    """All that this program has stored and loaded so far comes before the next atomic that releases."""
    if BACKEND == "hip":
        # Each wave for itself, in front of the barrier.
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
def look(address: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """Loads a word, acquire at system scope. It may be mapped read-only, so an atomic that writes will not do.

    The whole program gets one value. A scalar load is made by every thread, each may find another word, and threads
    that then part ways at a barrier hang. So every thread loads, and what lane 0 found is handed to all by a reduction;
    that works because there are at least as many lanes as threads, and no lane is held twice.
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
        # What lane 0's thread acquired, the others have from it by this barrier.
        tl.debug_barrier()
    return found


@jit
def pause(BACKEND: tl.constexpr) -> None:
    """Between two looks: about 100 ns in which others have the memory for themselves."""
    if BACKEND == "cuda":
        tl.inline_asm_elementwise("nanosleep.u32 100;\nmov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if BACKEND == "hip":
        tl.inline_asm_elementwise("s_sleep 3\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
