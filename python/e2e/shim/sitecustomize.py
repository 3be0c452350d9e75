"""Patches the engines to run on a CPU, in one environment. For tests only: put this folder first on ``PYTHONPATH``.

Python imports this file at the start of every process, also of those that an engine spawns. It patches the modules in
`CHANGES` after their import.

SGLang: HiCache copies pages between "device" and "host" with kernels of ``sgl_kernel``, and pins host memory with CUDA.
Neither exists without a GPU. This module has functions in plain torch that do the same. All code above (radix tree,
controller, storage backend, its threads) is SGLang's own, and is the subject of the tests. Only
``hicache_io_backend="direct"`` is covered, with ``hicache_mem_layout`` "page_first_direct" (tested) or "layer_first"
(not tested). Rotary embedding needs no patch: without its own kernel, SGLang uses ``vllm._custom_ops``, and vLLM for
the CPU is in the same environment.

vLLM together with LMCache: see `refuse_private_names`.
"""

import importlib.abc
import importlib.util
import sys


def pages_of(indices, page_size):
    """Returns the page numbers of slots: whole pages, slots in order."""
    return indices.view(-1, page_size)[:, 0] // page_size


def load_layer_from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Copies one layer from host ``[page, layer, slot in page, head, dim]`` to device ``[slot, head, dim]``, keys then
    values."""
    pages = pages_of(src_indices, page_size)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].reshape(-1, *device.shape[1:])


def save_layers_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copies all layers from device to host. `src_ptrs` has the keys of all layers, followed by the values."""
    pages = pages_of(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for nth, host in enumerate(dst_ptrs):
        for layer, device in enumerate(src_ptrs[nth * layers : (nth + 1) * layers]):
            host[pages, layer] = device[src_indices].view(len(pages), page_size, *device.shape[1:])


def copy_slots(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copies between tensors of the same shape, for the layout "layer_first"."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_in_torch(module):
    # On CUDA these names come from sgl_kernel; without it the module does not define them.
    module.transfer_kv_per_layer_direct_pf_lf = load_layer_from_pages
    module.transfer_kv_all_layer_direct_lf_pf = save_layers_to_pages
    module.transfer_kv_direct = copy_slots


def leave_unpinned(module):
    # The destructor of the pool reads the list of pinned ranges; with an empty list it unpins nothing.
    def register(buffer, registration_granularity_bytes=None):
        setattr(buffer, module._CUDA_HOST_REGISTERED_RANGES_ATTR, [])

    module._cuda_host_register = register


def refuse_private_names(module):
    # vLLM's worker reads `__dict__["kernel"]` of every object of every module. The library handle of llvmlite, which
    # LMCache imports through numba, takes `__dict__` for a function of LLVM and returns one.
    find = module._lib_wrapper.__getattr__

    def find_function(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    module._lib_wrapper.__getattr__ = find_function


CHANGES = {
    "llvmlite.binding.ffi": refuse_private_names,
    "sglang.srt.mem_cache.pool_host.mha": copy_in_torch,
    "sglang.srt.mem_cache.pool_host.common": leave_unpinned,
}


class Changer(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and patches a module after its execution."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        # Removed during the search of the other finders, to avoid recursion.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Changer())
