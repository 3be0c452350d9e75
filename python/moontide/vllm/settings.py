"""Settings in ``kv_connector_extra_config``, and the namespace for a configuration of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from moontide._native import PutOptions
from moontide.kv import Namespace, StoreConnection, digest_of
from moontide.store import Store

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Settings:
    """Settings of the connector. Each has a default. Unknown settings are rejected."""

    #: "host:port" of the master [default: MOONTIDE_MASTER, or the default port of this host].
    master: str | None = None
    tenant: str = "default"
    #: Part of all keys: engines with different values do not share blocks.
    namespace: str = ""
    #: Save generated tokens too, not only prompts.
    save_decode: bool = True
    #: "async": requests wait outside of the batch until their blocks are loaded. "layerwise": requests are in the
    #: batch, and each layer waits for its own blocks.
    load: str = "async"
    #: Layers per object [default: all layers, or 1 for layerwise loads].
    layers_per_object: int = 0
    replicas: int = 1
    #: Time to live of a block in seconds [default: unlimited].
    ttl: float | None = None
    #: Longest time that a new request waits for a lookup, in milliseconds; then it is computed.
    lookup_timeout_ms: float = 250.0
    #: Timeout of one transfer in seconds.
    transfer_timeout_s: float = 5.0
    #: Pause in seconds after a call that the store did not answer.
    retry_after_s: float = 1.0
    #: Copy blocks to host memory first. "auto": if the engine's memory is not CPU memory.
    staging: str = "auto"
    #: Host memory for staged saves in MiB; blocks that do not fit are not saved.
    staging_mib: int = 1024
    load_threads: int = 2
    save_threads: int = 2
    #: Read local nodes through shared memory.
    shm: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Parses the settings of a user. Raises ValueError for unknown settings and invalid values."""
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown settings: {', '.join(unknown)}; "
                f"known settings: {', '.join(known)}"
            )
        values = {name: _convert(name, known[name].default, value) for name, value in given.items()}
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        _demand(self.load in ("async", "layerwise"), "load", self.load, '"async" or "layerwise"')
        _demand(self.staging in ("auto", "true", "false"), "staging", self.staging, '"auto", true or false')
        _demand(self.layers_per_object >= 0, "layers_per_object", self.layers_per_object, "a number of layers, or 0")
        for name in ("replicas", "load_threads", "save_threads", "staging_mib"):
            _demand(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("lookup_timeout_ms", "transfer_timeout_s", "retry_after_s"):
            _demand(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        _demand(self.ttl is None or self.ttl > 0, "ttl", self.ttl, "a number of seconds above 0, or null")

    def connection(self) -> StoreConnection:
        """Returns a connection to the store. It connects on first use."""
        master = self.master or os.environ.get("MOONTIDE_MASTER") or None

        def connect() -> Store:
            return Store(master, tenant=self.tenant, timeout=self.transfer_timeout_s, shm=self.shm)

        return StoreConnection(connect, retry_after=self.retry_after_s)

    def options(self) -> PutOptions:
        return PutOptions(replicas=self.replicas, ttl=self.ttl)


def _convert(name: str, default: Any, value: Any) -> Any:
    """Converts a value to the type of its default. Numbers and booleans can be text, as in command-line flags."""
    if default is MISSING or value is None:
        return value
    if name == "staging":
        return str(value).lower()
    if isinstance(default, bool):
        parsed = value if isinstance(value, bool) else _BOOLS.get(str(value).lower())
        _demand(parsed is not None, name, value, "true or false")
        return parsed
    kind = float if name == "ttl" else str if name == "master" else type(default)
    try:
        return kind(value)
    except (TypeError, ValueError):
        _demand(False, name, value, f"a value of type {kind.__name__}")


def _demand(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"kv_connector_extra_config: {name} must be {expected}, not {value!r}")


def namespace(vllm_config: Any, settings: Settings, block_size: int) -> Namespace:
    """Returns the namespace of an engine. It does not include the memory layout, which only workers know
    (`shape_digest`)."""
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
        # If PYTHONHASHSEED is set, the hash of the first block of every prompt depends on it.
        hashing=f"{cache.prefix_caching_hash_algo} {os.environ.get('PYTHONHASHSEED', '')}",
        more=more,
    )


def revision(model: Any) -> str:
    """Returns the revision of the weights: a digest of a local folder, otherwise the commit."""
    folder = Path(model.model)
    if folder.is_dir():
        return digest_of(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit or model.revision or "")
