"""Keys and addresses of the pages of SGLang's host pools."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName  # type: ignore[import-untyped]
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # type: ignore[import-untyped]

from moontide.kv import Batch, Namespace, digest_of
from moontide.kv.calls import Settings

#: Attributes that determine the layout of a pool's pages, where a pool has them; the class determines the rest.
_GEOMETRY = (
    "layout",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "target_layer_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "indexer_page_stride_size",
    "num_mamba_layers",
    "temporal_state_shape",
    "temporal_dtype",
    "conv_state_shapes",
    "conv_dtype",
    "storage_format_tag",
)


class Pool:
    """Objects of a host pool: one object per page, with all bytes of this rank.

    If all ranks have the same bytes (MLA), they share one object. If the heads of a rank are split further
    (``tp_lcm_size``), a page has one object for each rank of the larger number, and engines of both sizes find it.
    """

    def __init__(self, host: Any, name: str, config: HiCacheStorageConfig, settings: Settings, flat: bool) -> None:
        self.host = host
        replicated = config.is_mla_model and name != PoolName.MAMBA and not isinstance(host, MHATokenToKVPoolHost)
        tensor_parallel = config.tp_size
        if config.tp_lcm_size and host.layout == "page_head" and not replicated and name == PoolName.KV and not flat:
            tensor_parallel = config.tp_lcm_size
        #: Objects per page.
        self.split = tensor_parallel // config.tp_size
        others = {"pp": config.pp_size, "cp": config.attn_cp_size, "dcp": config.dcp_size}
        sizes = others if replicated else {"tp": tensor_parallel, **others}
        model, revision = _model(config.model_name or "", getattr(host, "storage_format_tag", None))
        namespace = Namespace(
            model=model,
            revision=settings.revision or revision,
            dtype=str(getattr(host, "dtype", "")),
            block_size=config.logical_page_size or host.page_size,
            layout=_layout(host, self.split),
            ranks=" ".join(f"{way}{count}" for way, count in sizes.items()),
            hashing="sglang",
            more={"pool": str(name), "form": "flat" if flat else "pages", "namespace": settings.namespace},
        )
        #: Prefix of all keys of this pool.
        self.prefix = namespace.prefix
        own = [f"pp{config.pp_rank}", f"cp{config.attn_cp_rank}", f"dcp{config.dcp_rank}"]
        ranks = range(config.tp_rank * self.split, (config.tp_rank + 1) * self.split)
        self._parts = [".".join(own)] if replicated else [".".join([f"tp{rank}", *own]) for rank in ranks]

    def keys(self, hashes: Iterable[str]) -> list[str]:
        """Returns the keys of pages, ``split`` per page."""
        return [f"{self.prefix}{page}/{part}" for page in hashes for part in self._parts]

    def batch(self, hashes: Sequence[str], indices: Any) -> Batch:
        """Returns keys and addresses of pages. ``indices`` are the slots of their tokens."""
        if self.split > 1:
            addresses, sizes = self.host.get_split_heads_page_buffer_meta(indices, self.split)
        else:
            addresses, sizes = self.host.get_page_buffer_meta(indices)
        keys = self.keys(hashes)
        each, rest = divmod(len(addresses), len(keys))
        if rest or not each:
            raise ValueError(f"{len(addresses)} addresses for {len(hashes)} pages: the slots are not whole pages")
        return Batch(
            keys,
            [addresses[at : at + each] for at in range(0, len(addresses), each)],
            [sizes[at : at + each] for at in range(0, len(sizes), each)],
        )

    def whole(self, objects: Sequence[bool]) -> list[bool]:
        """Returns for each page whether all its objects are true."""
        if self.split == 1:
            return list(objects)
        return [all(objects[at : at + self.split]) for at in range(0, len(objects), self.split)]


def _model(name: str, tag: str | None) -> tuple[str, str]:
    """Returns name and revision of a model. A local folder is identified by its last component and its content."""
    folder = Path(name.removesuffix(f"-{tag}") if tag else name)
    return (folder.resolve().name, _digest(folder)) if name and folder.is_dir() else (name, "")


@functools.cache
def _digest(folder: Path) -> str:
    # Cached: every pool needs it, and the files do not change while an engine runs.
    return digest_of(folder)


def _layout(host: Any, split: int) -> str:
    facts = {name: getattr(host, name, None) for name in _GEOMETRY}
    if facts["head_num"] is not None:
        facts["head_num"] //= split
    return " ".join([type(host).__name__, *(f"{name}={fact}" for name, fact in facts.items() if fact is not None)])
