"""Connection of a store to its cluster: arguments of ``setup``, the node in this process, and ``setup_dummy``."""

import fcntl
import json
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moontide._native import LocalNode
from moontide.store import Store

from .codes import LOG

MASTER_DEFAULT = "127.0.0.1:50051"
SEGMENT_BYTES_DEFAULT = 16 << 20
# A node has at least one segment of 1 MiB for each group of the cluster; this is enough for 16 groups.
SEGMENT_BYTES_MIN = 16 << 20
# Maximum number of nodes of one host that share a disk directory.
DISKS_MAX = 64
CONNECT_TIMEOUT_S = 3.0

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1 << 10 * _power, f"{_letter}b": 1 << 10 * _power, f"{_letter}ib": 1 << 10 * _power}


def parse_size(size: int | str) -> int:
    """Parses a size in bytes: a number, or text such as "80GB" or "3.5 gb". Units are powers of 1024, as for Mooncake.

    >>> parse_size("3 GB"), parse_size("512"), parse_size(7)
    (3221225472, 512, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        parsed = size
    elif isinstance(size, str):
        text = size.strip().lower()
        number = text.rstrip("kmgtib ")
        unit = text[len(number) :].strip()
        try:
            parsed = int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])
        except (KeyError, ValueError):
            raise ValueError(f"{size!r} is not a size") from None
    else:
        raise TypeError(f"a size must be a number or text, not {type(size).__name__}")
    if parsed < 0:
        raise ValueError(f"{size!r} is not a size")
    return parsed


@dataclass(frozen=True)
class Settings:
    """Arguments of ``setup`` that Moontide uses."""

    hostname: str
    master: str = MASTER_DEFAULT
    segment_bytes: int = SEGMENT_BYTES_DEFAULT
    disk_dir: str | None = None
    tenant: str = "default"
    ignored: tuple[str, ...] = field(default=())

    @staticmethod
    def of(given: dict[str, Any]) -> "Settings":
        """Parses the arguments. Raises ValueError for invalid values."""
        hostname = given.get("local_hostname")
        if not hostname or not isinstance(hostname, str):
            raise ValueError("local_hostname is missing")
        if not isinstance(given.get("metadata_server"), str):
            raise ValueError("metadata_server is missing")
        disk_dir = None
        if _is_true(given.get("enable_ssd_offload", False)):
            disk_dir = given.get("ssd_offload_path") or os.environ.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
            if not disk_dir:
                raise ValueError("enable_ssd_offload needs ssd_offload_path")
        return Settings(
            hostname=hostname,
            master=given.get("master_server_addr") or given.get("master_server_address") or MASTER_DEFAULT,
            segment_bytes=parse_size(given.get("global_segment_size", SEGMENT_BYTES_DEFAULT)),
            disk_dir=disk_dir,
            tenant=given.get("tenant_id") or "default",
            ignored=tuple(_ignored(given)),
        )


def _is_true(value: object) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on") if isinstance(value, str) else bool(value)


def _ignored(given: dict[str, Any]) -> Iterator[str]:
    """Returns the arguments without a counterpart, with the reason."""
    if (given.get("metadata_server") or "P2PHANDSHAKE") != "P2PHANDSHAKE":
        yield "metadata_server (the master has the addresses of all nodes)"
    if (given.get("protocol") or "tcp") != "tcp":
        yield f"protocol {given['protocol']!r} (shared memory on this host, TCP between hosts)"
    if given.get("rdma_devices"):
        yield "rdma_devices"
    if given.get("engine") is not None:
        yield "engine"
    if _is_true(given.get("enable_client_http_server", False)):
        yield "enable_client_http_server"


class Segment:
    """Memory that this process contributes: a node, and its lock on a disk directory."""

    def __init__(self, settings: Settings) -> None:
        memory = max(settings.segment_bytes, SEGMENT_BYTES_MIN)
        if memory != settings.segment_bytes:
            LOG.info("segment size raised from %d to the minimum of %d bytes", settings.segment_bytes, memory)
        self._lock: int | None = None
        disk_dir = None if settings.disk_dir is None else self._lock_disk(settings.disk_dir)
        limit = os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")
        try:
            self._node = LocalNode(
                settings.master,
                memory,
                listen=f"{address_of(settings.hostname)}:0",
                disk_dir=disk_dir,
                disk_limit_bytes=parse_size(limit) if limit and disk_dir else None,
            )
        except BaseException:
            self._unlock()
            raise
        _, port = split_port(self._node.addresses[0])
        self.name = f"{split_port(settings.hostname)[0]}:{port}"

    def _lock_disk(self, parent: str) -> str:
        """Locks a subdirectory for this node: several processes of a host get the same parent directory, and a disk
        belongs to one node."""
        os.makedirs(parent, exist_ok=True)
        for number in range(DISKS_MAX):
            disk_dir = os.path.join(parent, f"node-{number}")
            lock = os.open(f"{disk_dir}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            self._lock = lock
            os.makedirs(disk_dir, exist_ok=True)
            return disk_dir
        raise ValueError(f"{parent} is already used by {DISKS_MAX} processes")

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Shuts the node down. Its objects in memory are lost."""
        self._node.close()
        self._unlock()


def _connect(settings: Settings) -> Store:
    return Store(settings.master, tenant=settings.tenant, connect_timeout=CONNECT_TIMEOUT_S)


def open_store(settings: Settings) -> tuple[Store, Segment | None]:
    """Connects, and starts a node in this process if it contributes memory. Raises Moontide's errors."""
    if settings.ignored:
        LOG.info("ignored arguments of setup: %s", "; ".join(settings.ignored))
    # Without a master this fails first, within CONNECT_TIMEOUT_S.
    store = _connect(settings)
    if not settings.segment_bytes:
        return store, None
    store.close()
    segment = Segment(settings)
    try:
        # Connects again, so that the store knows the local node from its first call on.
        return _connect(settings), segment
    except BaseException:
        segment.close()
        raise


def split_port(address: str) -> tuple[str, int | None]:
    """Returns host and port of "host", "host:port", "[v6]:port" or a plain v6 address."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):
        return address.strip("[]"), None
    return host.strip("[]"), int(port)


def address_of(hostname: str) -> str:
    """Returns an address to listen on. Raises ValueError for an unknown name."""
    host, _ = split_port(hostname)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"local_hostname {host!r} has no address: {error}") from None
    # A name may have IPv4 and IPv6 addresses; more peers can reach IPv4.
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


def master_of_node(server_address: str) -> str | None:
    """Returns the master of the local node whose admin endpoint has this address. Logs an error and returns None on
    failure.

    Programs can pass any name of the host; the endpoint may listen on loopback only.
    """
    host, port = split_port(server_address)
    if port is None:
        LOG.error("%r is not the host:port of a node started by mooncake_client", server_address)
        return None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    scheme = "http"
    if ca := os.environ.get("MOONTIDE_CA"):
        # The certificate names the node, not its host. `/health` needs no certificate of this process.
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = False
        handlers.append(urllib.request.HTTPSHandler(context=context))
        scheme = "https"
    opener = urllib.request.build_opener(*handlers)
    reason: object = None
    for name in dict.fromkeys((host, "127.0.0.1")):
        name = f"[{name}]" if ":" in name else name
        try:
            with opener.open(f"{scheme}://{name}:{port}/health", timeout=2) as response:
                page = json.load(response)
        except (OSError, ValueError) as error:
            reason = error
            continue
        if isinstance(page, dict) and page.get("master"):
            return str(page["master"])
        reason = "/health does not contain a master"
    LOG.error("no node at %s (%s): start one with mooncake_client --port=%d", server_address, reason, port)
    return None
