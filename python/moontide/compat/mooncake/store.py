"""``MooncakeDistributedStore``: the calls, with Mooncake's signatures, error numbers and behaviour.

This module has setup and close, calls by value, and calls for metadata. Calls by address are in ``addresses``.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from moontide._native import View
from moontide.errors import BatchError, Closed, Error
from moontide.store import Store

from .addresses import Addresses, filtered, is_key, only
from .buffers import Buffers, Pool
from .codes import (
    BAD_ARGUMENT,
    INTERNAL,
    LOG,
    LOOKUP,
    NOT_FOUND,
    READ,
    REMOVE,
    UNREACHABLE,
    WRITE,
    NotSetUp,
    code_of,
    not_set_up,
)
from .config import ReplicateConfig, options
from .places import Places
from .replicas import (
    Descriptor,
    LocalDiskDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
    ReplicaStatus,
)
from .setup import Segment, Settings, master_of_node, open_store
from .tensors import Tensors

# A key that is never stored: a lookup of it reaches the master.
_HEALTH_KEY = "moontide.compat.mooncake/health"


class MooncakeDistributedStore(Addresses, Tensors):
    """The store class of Mooncake's Python module. Thread-safe."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._segment: Segment | None = None
        self._pool: Pool | None = None
        self._exists: Callable[..., list[int]] = not_set_up
        self._detach()

    # -------------------------------------------------------------------------------------------------- setup and close

    def setup(
        self,
        local_hostname: str | dict[str, Any] | None = None,
        metadata_server: str | None = None,
        global_segment_size: int | None = None,
        local_buffer_size: int | None = None,
        protocol: str | None = None,
        rdma_devices: str | None = None,
        master_server_addr: str | None = None,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        *,
        config: dict[str, Any] | None = None,
    ) -> int:
        """Connects to a master, and contributes ``global_segment_size`` bytes of this process to its cluster.

        Also ``setup({"local_hostname": …, …})``, where sizes can be text such as "80GB". Returns 0, or a negative
        number.
        """
        if isinstance(local_hostname, dict):
            config = local_hostname
        if config is not None:
            given = dict(config)
        else:
            texts = (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr)
            sizes = (global_segment_size, local_buffer_size)
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("setup() takes seven arguments, or a dict: text or sizes are missing or misplaced")
            if not all(isinstance(size, int) and size >= 0 for size in sizes):
                raise TypeError("setup(): global_segment_size and local_buffer_size must be numbers of at least 0")
            given = {
                "local_hostname": local_hostname,
                "metadata_server": metadata_server,
                "global_segment_size": global_segment_size,
                "protocol": protocol,
                "rdma_devices": rdma_devices,
                "master_server_addr": master_server_addr,
                "engine": engine,
                "enable_ssd_offload": enable_ssd_offload,
                "ssd_offload_path": ssd_offload_path,
                "tenant_id": tenant_id,
                "enable_client_http_server": enable_client_http_server,
            }
        try:
            settings = Settings.of(given)
        except (ValueError, TypeError) as error:
            LOG.error("setup failed: invalid argument: %s", error)
            return BAD_ARGUMENT
        return self._open(settings, Buffers())

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connects to the cluster of the node that ``mooncake_client`` runs on this host, without contributing memory.

        ``alloc_from_mem_pool`` allocates from a pool of ``mem_pool_size`` bytes. Addresses must be registered.
        """
        if not isinstance(server_address, str) or not isinstance(mem_pool_size, int) or mem_pool_size < 0:
            raise TypeError("setup_dummy(mem_pool_size: int, local_buffer_size: int, server_address: str)")
        master = master_of_node(server_address)
        if master is None:
            return UNREACHABLE
        try:
            pool = Pool(mem_pool_size)
        except RuntimeError as error:
            LOG.error("setup_dummy failed: invalid argument: %s", error)
            return BAD_ARGUMENT
        buffers = Buffers(pool=(pool.address, pool.address + pool.size))
        code = self._open(Settings(hostname="", master=master, segment_bytes=0), buffers)
        if code:
            pool.close()
            return code
        self._pool = pool
        self._unknown = INTERNAL
        return 0

    def _open(self, settings: Settings, buffers: Buffers) -> int:
        self.close()
        try:
            store, segment = open_store(settings)
        except Error as error:
            code = code_of(error)
            hint = "; start one with mooncake_master, or correct the address" if code == UNREACHABLE else ""
            LOG.error("setup failed (%d): master %s: %s%s", code, settings.master, error, hint)
            return code
        except (ValueError, OSError) as error:
            LOG.error("setup failed: invalid argument: %s", error)
            return BAD_ARGUMENT
        self._store, self._segment, self._buffers = store, segment, buffers
        self._hostname = segment.name if segment is not None else settings.hostname
        self._get = store._get_addresses
        self._put = store._put_addresses
        self._places = Places(store.nodes)
        self._exists = store._exists_codes
        return 0

    def _detach(self) -> None:
        """Resets to the state before ``setup``, in which every call fails with NotSetUp."""
        self._buffers = Buffers()
        self._places = Places(list)
        self._pool = None
        self._unknown = BAD_ARGUMENT
        self._hostname = ""
        self._get = self._put = self._exists = not_set_up

    def close(self) -> int:
        """Closes the connection, and the node in this process with its objects. Returns 0, also if called again."""
        store, segment, pool = self._store, self._segment, self._pool
        self._store = self._segment = None
        self._detach()
        if store is not None:
            store.close()
        if segment is not None:
            segment.close()
        if pool is not None:
            pool.close()
        return 0

    def health_check(self) -> int:
        """Returns 0 if healthy, 1 if not set up or closed, 2 if the master is unreachable."""
        try:
            return 0 if self._exists([_HEALTH_KEY])[0] >= 0 else 2
        except (NotSetUp, Closed):
            return 1
        except Error:
            return 2

    def get_hostname(self) -> str:
        """Returns the name of this process's segment."""
        return self._hostname

    # ----------------------------------------------------------------------------------------------- registered memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Registers memory that calls use by its address."""
        if self._store is None:
            return BAD_ARGUMENT
        if buffer_ptr < 0 or size < 0:
            raise TypeError("addresses and sizes must not be negative")
        return self._buffers.register(int(buffer_ptr), int(size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregisters memory."""
        return self._buffers.unregister(int(buffer_ptr), self._unknown)

    def alloc_from_mem_pool(self, size: int) -> int:
        """Allocates memory from the pool of ``setup_dummy``. Returns 0 if there is no pool, or no space in it."""
        if self._pool is None:
            return 0
        return self._pool.alloc(size)

    # --------------------------------------------------------------------------------------------------- calls by value

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Stores bytes or a buffer. Does not replace an existing object. Empty values are rejected."""
        return self._put_value(key, value, config, False)

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """As `put`, but replaces an existing object."""
        return self._put_value(key, value, config, True)

    def _put_value(self, key: str, value: Any, config: ReplicateConfig | None, overwrite: bool) -> int:
        if not memoryview(value).nbytes:
            return BAD_ARGUMENT
        try:
            self._stored().put(key, value, options(config, 1, self._places, overwrite))
        except Exception as error:
            return code_of(error, WRITE)
        return 0

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Stores several buffers, in order, as one object. Does not store an empty object."""
        return self._put_parts(key, parts, config, False)

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """As `put_parts`, but replaces an existing object."""
        return self._put_parts(key, parts, config, True)

    def _put_parts(self, key: str, parts: Sequence[Any], config: ReplicateConfig | None, overwrite: bool) -> int:
        nonempty = [part for part in parts if memoryview(part).nbytes]
        try:
            store = self._stored()
            if nonempty:
                store.put_from(key, nonempty, options(config, 1, self._places, overwrite))
        except Exception as error:
            return code_of(error, WRITE)
        return 0

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """Stores many objects. Returns one number for all."""
        return self._put_values(keys, values, config, False)

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """As `put_batch`, but replaces existing objects."""
        return self._put_values(keys, values, config, True)

    def _put_values(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None, overwrite: bool
    ) -> int:
        if len(keys) != len(values) or not all(memoryview(value).nbytes for value in values):
            return BAD_ARGUMENT
        good = list(map(is_key, keys))
        if not all(good):
            keys, values = filtered(good, keys), filtered(good, values)
        try:
            store = self._stored()
            if keys:
                store.batch_put(keys, values, options(config, len(keys), self._places, overwrite))
        except BatchError as error:
            failed = (code_of(o, WRITE) for o in error.outcomes if isinstance(o, Error))
            return next((code for code in failed if code), 0 if all(good) else BAD_ARGUMENT)
        except Exception as error:
            return code_of(error, WRITE)
        return 0 if all(good) else BAD_ARGUMENT

    def get(self, key: str) -> bytes:
        """Returns the bytes of an object; empty bytes if it does not exist or cannot be read."""
        try:
            return self._stored().get(key) or b""
        except Exception as error:
            self._log_failure("get", code_of(error))
            return b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """As `get`, for many keys."""
        return [value or b"" for value in self._many("get_batch", Store.batch_get, keys)]

    def get_buffer(self, key: str) -> View | None:
        """Returns an object as a read-only buffer with ``ptr()`` and ``size()``, zero-copy if a local node has it."""
        try:
            return self._stored().get_view(key) or None
        except Exception as error:
            self._log_failure("get_buffer", code_of(error))
            return None

    def batch_get_buffer(self, keys: Sequence[str]) -> list[View | None]:
        """As `get_buffer`, for many keys."""
        return self._many("batch_get_buffer", Store.batch_get_view, keys)

    def _many(self, what: str, call: Callable[..., list[Any]], keys: Sequence[str]) -> list[Any]:
        """Returns the results of a call for many keys; None for each key that failed."""
        good = list(map(is_key, keys))
        try:
            found = call(self._stored(), keys if all(good) else filtered(good, keys))
        except BatchError as error:
            found = [None if isinstance(outcome, Error) else outcome for outcome in error.outcomes]
            self._log_failure(what, next(code_of(o) for o in error.outcomes if isinstance(o, Error)))
        except Exception as error:
            self._log_failure(what, code_of(error))
            return [None] * len(keys)
        if all(good):
            return found
        rest = iter(found)
        return [next(rest) if fine else None for fine in good]

    def _log_failure(self, what: str, code: int) -> None:
        """Logs a failure that the result of the call does not show."""
        if self._store is not None and code not in (NOT_FOUND, BAD_ARGUMENT):
            LOG.warning("%s failed: %d", what, code)

    def _stored(self) -> Store:
        store = self._store
        if store is None:
            raise NotSetUp
        return store

    # ----------------------------------------------------------------------------------------------------- other calls

    def is_exist(self, key: str) -> int:
        """Returns 1, 0, or a negative number."""
        try:
            code = self._exists((key,))[0]
        except Exception as error:
            return code_of(error, LOOKUP)
        return code if code >= 0 else LOOKUP.get(code, INTERNAL)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """As `is_exist`, for many keys."""
        if not keys:
            return []
        try:
            codes = self._exists(keys)
        except Exception as error:
            return [code_of(error)] * len(keys)
        if min(codes) >= 0:
            return codes
        good = list(map(is_key, keys))
        if not all(good):
            return only(good, self.batch_is_exist, keys, bad=0)
        return [n if n >= 0 else READ.get(n, INTERNAL) for n in codes]

    def get_size(self, key: str) -> int:
        """Returns the size of an object, or a negative number."""
        try:
            found = self._stored().stat(key)
        except Exception as error:
            return self._lookup_failed(key, error)
        return int(found["size"]) if found is not None and not found["writing"] else NOT_FOUND

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object."""
        try:
            return 0 if self._stored().remove(key, force) else NOT_FOUND
        except Exception as error:
            code = code_of(error, REMOVE)
            return NOT_FOUND if code == BAD_ARGUMENT and self._store is not None and not is_key(key) else code

    def batch_remove(self, keys: Sequence[str | bytes], force: bool = False) -> list[int]:
        """Removes many objects. Returns a number for each."""
        good = list(map(is_key, keys))
        if not all(good):
            return only(good, self.batch_remove, keys, bad=NOT_FOUND, force=force)
        if not keys:
            return []
        try:
            outcomes = self._stored().batch_remove(keys, force)
        except BatchError as error:
            outcomes = error.outcomes
        except Exception as error:
            return [code_of(error, REMOVE)] * len(keys)
        return [code_of(o, REMOVE) if isinstance(o, Error) else 0 if o else NOT_FOUND for o in outcomes]

    def remove_all(self, force: bool = False) -> int:
        """Removes all objects of this tenant. Returns their number, or a negative number."""
        try:
            return int(self._stored().remove_all(force))
        except Exception as error:
            return code_of(error)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes the objects whose keys match the pattern. Returns their number, or a negative number.

        This process lists and compares the keys; a pattern that starts with ``^`` and plain text lists fewer keys.
        """
        try:
            pattern = re.compile(regex_pattern)
        except re.error as error:
            LOG.warning("remove_by_regex failed: invalid pattern: %s", error)
            return BAD_ARGUMENT
        try:
            listed = self._stored().keys(_plain_prefix(regex_pattern))
        except Exception as error:
            return code_of(error)
        found = [key for key in listed if pattern.search(key.decode(errors="surrogateescape"))]
        return self.batch_remove(found, force).count(0)

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Returns the replicas of an object; an empty list if it does not exist."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """As `get_replica_desc`, for many keys; only existing objects."""
        found: dict[str, list[ReplicaDescriptor]] = {}
        try:
            store = self._stored()
            good = [key for key in keys if is_key(key)]
            stats = dict(zip(good, store.batch_stat(good), strict=True))
            nodes = {node["node"]: node for node in store.nodes()} if stats else {}
        except Exception as error:
            self._log_failure("batch_get_replica_desc", code_of(error))
            return found
        for key, stat in stats.items():
            if stat is not None:
                found[key] = _replicas(stat, nodes)
        return found


def _plain_prefix(pattern: str) -> str:
    """Returns a prefix of all keys that match a pattern, as far as the start of the pattern is plain text."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    prefix = pattern[1:]
    if special := re.search(r"[^\w/:@ -]", prefix):
        prefix = prefix[: special.start()]
    # A following quantifier can make the last character optional.
    return prefix[:-1] if pattern[1 + len(prefix) :][:1] in ("*", "?", "{") else prefix


def _replicas(stat: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> list[ReplicaDescriptor]:
    """Returns one descriptor per replica and medium. The stripes of a replica, possibly on several nodes, count as
    one."""
    status = ReplicaStatus.PROCESSING if stat["writing"] else ReplicaStatus.COMPLETE
    first = {(location["replica"], location["medium"]): location["node"] for location in reversed(stat["locations"])}
    described = []
    for (_, medium), node in sorted(first.items(), key=lambda item: (item[0][1] == "disk", item[0][0])):
        addresses = nodes.get(node, {}).get("addresses") or [("", node)]
        size, address = stat["size"], addresses[0][1]
        on_disk = medium == "disk"
        descriptor = LocalDiskDescriptor(size, address) if on_disk else MemoryDescriptor(Descriptor(size, address))
        described.append(ReplicaDescriptor(descriptor, status))
    return described
