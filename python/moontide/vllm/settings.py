"""What ``kv_connector_extra_config`` may say, and what of vLLM's own configuration gives a block's bytes a meaning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from moontide._native import PutOptions
from moontide.kv import Door, Namespace, digest_of
from moontide.store import Store

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Settings:
    """The connector's settings. Each has a default; what is not known here is refused by name."""

    #: Where the master is; MOONTIDE_MASTER or this host's unless said.
    master: str | None = None
    tenant: str = "default"
    #: Mixed into all keys: engines with different ones do not share.
    namespace: str = ""
    #: Whether what is generated is kept too, and not prompts alone.
    save_decode: bool = True
    #: "async": requests wait outside of the batch until their blocks are there. "layerwise": they are in the batch, and
    #: each layer waits for its own.
    load: str = "async"
    #: How many layers are one object. All of them, or one if loads are layer by layer.
    layers_per_object: int = 0
    replicas: int = 1
    #: Seconds after which the store may forget a block; never unless said.
    ttl: float | None = None
    #: How long a new request waits for a lookup, at most, before it is computed.
    patience_ms: float = 250.0
    #: How long one transfer may take, at most.
    deadline_s: float = 5.0
    #: How long a store that did not answer is left alone.
    pause_s: float = 1.0
    #: Whether blocks pass through host memory of our own. "auto": where the engine's memory is not the CPU's.
    staging: str = "auto"
    #: How much of that memory saves may hold at once; what does not fit is not saved.
    staging_mib: int = 1024
    loaders: int = 2
    savers: int = 2
    #: Whether nodes on this host are read through shared memory.
    local: bool = True

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Settings:
        """From what the user wrote. Raises ValueError that names what is wrong, and what would be right."""
        known = {field.name: field for field in fields(cls)}
        strange = sorted(set(said) - set(known))
        if strange:
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(strange)}, which MoontideConnector does not know; "
                f"it knows {', '.join(known)}"
            )
        values = {name: _convert(name, known[name].default, value) for name, value in said.items()}
        made = cls(**values)
        made._check()
        return made

    def _check(self) -> None:
        _demand(self.load in ("async", "layerwise"), "load", self.load, '"async" or "layerwise"')
        _demand(self.staging in ("auto", "true", "false"), "staging", self.staging, '"auto", true or false')
        _demand(self.layers_per_object >= 0, "layers_per_object", self.layers_per_object, "a number of layers, or 0")
        for name in ("replicas", "loaders", "savers", "staging_mib"):
            _demand(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("patience_ms", "deadline_s", "pause_s"):
            _demand(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        _demand(self.ttl is None or self.ttl > 0, "ttl", self.ttl, "seconds, or nothing")

    def door(self) -> Door:
        """The way to the store. Connects when somebody goes through."""
        master = self.master or os.environ.get("MOONTIDE_MASTER") or None

        def connect() -> Store:
            return Store(master, tenant=self.tenant, deadline=self.deadline_s, local=self.local)

        return Door(connect, pause=self.pause_s)

    def options(self) -> PutOptions:
        return PutOptions(replicas=self.replicas, ttl=self.ttl)


def _convert(name: str, default: Any, value: Any) -> Any:
    """Numbers and truths may have been written as text, as they are in flags."""
    if default is MISSING or value is None:
        return value
    if name == "staging":
        return str(value).lower()
    if isinstance(default, bool):
        truth = value if isinstance(value, bool) else _BOOLS.get(str(value).lower())
        _demand(truth is not None, name, value, "true or false")
        return truth
    kind = float if name == "ttl" else str if name == "master" else type(default)
    try:
        return kind(value)
    except (TypeError, ValueError):
        _demand(False, name, value, f"a value of type {kind.__name__}")


def _demand(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ValueError(f"kv_connector_extra_config: {name} is {value!r}, and should be {wanted}")


def namespace(vllm_config: Any, settings: Settings, block_size: int) -> Namespace:
    """What engines must have in common. How bytes lie in memory is not here: only workers know (`shape_digest`)."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    more = {
        "engine": "vllm",
        "namespace": settings.namespace,
        "quantization": str(model.quantization),
        "overrides": str(model.hf_overrides or ""),
        "adapters": "lora" if vllm_config.lora_config else "",
    }
    return Namespace(
        model=Path(model.model).name if Path(model.model).is_dir() else str(model.model),
        revision=revision(model),
        dtype=f"{model.dtype} {cache.cache_dtype}",
        block_size=block_size,
        ranks=f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}",
        # If it is set, it is what the first block of every prompt is chained to.
        hashing=f"{cache.prefix_caching_hash_algo} {os.environ.get('PYTHONHASHSEED', '')}",
        more=more,
    )


def revision(model: Any) -> str:
    """Which weights these are: a commit where one is known, a digest of the folder where there is one."""
    folder = Path(model.model)
    if folder.is_dir():
        return digest_of(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit or model.revision or "")
