"""How a store comes to its cluster: what ``setup`` is told, the node in this process, and ``setup_dummy``."""

import fcntl
import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moontide._native import LocalNode
from moontide.store import Store

from .codes import LOG

MASTER_DEFAULT = "127.0.0.1:50051"
SEGMENT_BYTES_DEFAULT = 16 << 20
# A node has at least one segment of 1 MiB for each of a master's 16 groups.
SEGMENT_BYTES_MIN = 16 << 20
# Nodes of one host that may share a directory for their disks.
DISKS_MAX = 64
CONNECT_SECONDS = 3.0

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1 << 10 * _power, f"{_letter}b": 1 << 10 * _power, f"{_letter}ib": 1 << 10 * _power}


def parse_size(size: int | str) -> int:
    """Bytes: a number, or text as "80GB" or "3.5 gb". Units are powers of 1024, as they are to Mooncake.

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
            raise ValueError(f"{size!r} is no size") from None
    else:
        raise TypeError(f"a size is a number or text, not {type(size).__name__}")
    if parsed < 0:
        raise ValueError(f"{size!r} is no size")
    return parsed


@dataclass(frozen=True)
class Settings:
    """What ``setup`` was told, as far as it means something to us."""

    hostname: str
    master: str = MASTER_DEFAULT
    segment_bytes: int = SEGMENT_BYTES_DEFAULT
    disk_dir: str | None = None
    tenant: str = "default"
    ignored: tuple[str, ...] = field(default=())

    @staticmethod
    def of(given: dict[str, Any]) -> "Settings":
        """From names and values. Raises ValueError for what makes no sense."""
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
            ignored=tuple(_without_meaning(given)),
        )


def _is_true(value: object) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on") if isinstance(value, str) else bool(value)


def _without_meaning(given: dict[str, Any]) -> Iterator[str]:
    """What was asked for and has no counterpart here, with the reason."""
    if (given.get("metadata_server") or "P2PHANDSHAKE") != "P2PHANDSHAKE":
        yield "metadata_server (the master knows every node)"
    if (given.get("protocol") or "tcp") != "tcp":
        yield f"protocol {given['protocol']!r} (shared memory on this host, TCP between hosts)"
    if given.get("rdma_devices"):
        yield "rdma_devices"
    if given.get("engine") is not None:
        yield "engine"
    if _is_true(given.get("enable_client_http_server", False)):
        yield "enable_client_http_server"


class Segment:
    """The memory that this process gives: a node, and its claim on a directory for its disk."""

    def __init__(self, settings: Settings) -> None:
        memory = max(settings.segment_bytes, SEGMENT_BYTES_MIN)
        if memory != settings.segment_bytes:
            LOG.info("a segment has at least %d bytes; %d were asked for", memory, settings.segment_bytes)
        self._claim: int | None = None
        disk_dir = None if settings.disk_dir is None else self._claim_disk(settings.disk_dir)
        limit = os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")
        try:
            self._node = LocalNode(
                settings.master,
                memory,
                listen=f"{_address_of(settings.hostname)}:0",
                disk_dir=disk_dir,
                disk_limit_bytes=parse_size(limit) if limit and disk_dir else None,
            )
        except BaseException:
            self._drop_claim()
            raise
        _, port = split_port(self._node.addresses[0])
        self.name = f"{split_port(settings.hostname)[0]}:{port}"

    def _claim_disk(self, parent: str) -> str:
        """A directory of its own: several processes of a host are told the same one, and a disk belongs to one node."""
        os.makedirs(parent, exist_ok=True)
        for number in range(DISKS_MAX):
            disk_dir = os.path.join(parent, f"node-{number}")
            claim = os.open(f"{disk_dir}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(claim)
                continue
            self._claim = claim
            os.makedirs(disk_dir, exist_ok=True)
            return disk_dir
        raise ValueError(f"{parent} is used by {DISKS_MAX} processes already")

    def _drop_claim(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def close(self) -> None:
        """Ends the node. What it had in memory is gone."""
        self._node.close()
        self._drop_claim()


def _connect(settings: Settings) -> Store:
    # There is no argument for this in Mooncake's calls.
    local = os.environ.get("MOONTIDE_LOCAL", "1") not in ("0", "off", "false")
    return Store(settings.master, tenant=settings.tenant, connect=CONNECT_SECONDS, local=local)


def open_store(settings: Settings) -> tuple[Store, Segment | None]:
    """Connects, and runs a node in this process if memory is to be given. Raises our errors."""
    if settings.ignored:
        LOG.info("ignored: %s", "; ".join(settings.ignored))
    # Without a master this fails first, within CONNECT_SECONDS.
    store = _connect(settings)
    if not settings.segment_bytes:
        return store, None
    store.close()
    segment = Segment(settings)
    try:
        # Once more, so that the store finds the node among those of this host from its first call on.
        return _connect(settings), segment
    except BaseException:
        segment.close()
        raise


def split_port(address: str) -> tuple[str, int | None]:
    """Host and port of "host", "host:port", "[v6]:port" or a bare v6 address."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):
        return address.strip("[]"), None
    return host.strip("[]"), int(port)


def _address_of(hostname: str) -> str:
    """An address that can be listened at. Raises ValueError for a name that nobody knows."""
    host, _ = split_port(hostname)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"local_hostname {host!r} has no address: {error}") from None
    # A name may have one of each kind; the older kind is reached by more peers.
    family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    return f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])


def master_of_node(server_address: str) -> str | None:
    """The master of the node whose page for operators is at this address of this host, or None with a line in the log.

    Programs name a node of their own host here, under whichever of the host's names; the page may be on loopback only.
    """
    host, port = split_port(server_address)
    if port is None:
        LOG.error("%r is no host:port of a node that mooncake_client runs", server_address)
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    why: object = None
    for place in dict.fromkeys((host, "127.0.0.1")):
        place = f"[{place}]" if ":" in place else place
        try:
            with opener.open(f"http://{place}:{port}/health", timeout=2) as answer:
                page = json.load(answer)
        except (OSError, ValueError) as error:
            why = error
            continue
        if isinstance(page, dict) and page.get("master"):
            return str(page["master"])
        why = "the page there does not name a master"
    LOG.error("no node at %s (%s): start one with mooncake_client --port=%d", server_address, why, port)
    return None
