"""The programs ``mooncake_master`` and ``mooncake_client``: translate Mooncake's flags to those of ``moontide``.

Flags have the syntax of gflags: ``--name=value``, ``--name value``, ``-name=value``, ``--name``, ``--noname``. Flags
without a counterpart are listed on standard error and ignored. The process then executes ``moontide``; its pid stays
the same.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable

from moontide._binary import become

from .setup import parse_size

_TRUE = ("true", "t", "yes", "y", "1")
# Boolean flags: true without a value, so the next word is not their value.
_SWITCHES = {
    "allow_evict_soft_pinned_objects",
    "enable_cxl",
    "enable_disk_eviction",
    "enable_ha",
    "enable_http_metadata_server",
    "enable_http_server",
    "enable_kv_events",
    "enable_metadata_cleanup_on_timeout",
    "enable_metric_reporting",
    "enable_multi_tenants",
    "enable_offload",
    "enable_oplog",
    "enable_snapshot",
    "enable_snapshot_restore",
    "help",
    "logtostderr",
    "offload_force_evict",
    "offload_on_evict",
    "promotion_on_hit",
    "rpc_enable_tcp_no_delay",
    "start_offload_rpc_server",
    "use_mmap_arena_allocator",
    "version",
}
# Flags without a counterpart that are ignored silently: logging, thread counts, and settings that Moontide's nodes do
# not need.
_SILENT = {
    "alsologtostderr",
    "device_names",
    "enable_metric_reporting",
    "enable_offload",
    "local_buffer_size",
    "log_dir",
    "logtostderr",
    "max_threads",
    "metadata_server",
    "minloglevel",
    "protocol",
    "rpc_enable_tcp_no_delay",
    "stderrthreshold",
    "threads",
    "v",
}


class Flags:
    """Parsed flags. ``take`` removes a flag; the remaining ones have no counterpart."""

    def __init__(self, arguments: list[str]) -> None:
        self._given: dict[str, str] = {}
        words = iter(arguments)
        for word in words:
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("-") or not name:
                self._given[word] = ""
            elif equals:
                self._given[name] = value
            elif name in _SWITCHES:
                self._given[name] = "true"
            elif name.startswith("no") and name[2:] in _SWITCHES:
                self._given[name[2:]] = "false"
            else:
                self._given[name] = next(words, "")

    def take(self, name: str, default: str = "") -> str:
        """Removes a flag and returns its value."""
        return self._given.pop(name, default)

    def take_bool(self, name: str) -> bool:
        """Removes a boolean flag and returns its value."""
        return self.take(name, "false").lower() in _TRUE

    def left(self) -> list[str]:
        """Returns the remaining flags, except the silent ones."""
        return [name for name in self._given if name not in _SILENT]


def _print_error(program: str, line: str) -> None:
    print(f"{program}: {line}", file=sys.stderr, flush=True)


def _own_address() -> str:
    """Returns the address of this host for other hosts: the source address of the default route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _ip(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"{host} has no address: {error}") from None


def _permille(ratio: str) -> int:
    return round(float(ratio) * 1000)


def _tls(*hosts: str) -> list[str]:
    """Returns the words that allow hosts on the network without TLS, as Mooncake does, unless there is a certificate."""
    public = any(not ipaddress.ip_address(host).is_loopback for host in hosts)
    return ["--insecure-no-tls", "true"] if public and "MOONTIDE_CA" not in os.environ else []


def master_arguments(flags: Flags) -> list[str]:
    """Returns the arguments of ``moontide master``. Raises ValueError for invalid values."""
    host = _ip(flags.take("rpc_address") or "0.0.0.0")
    old_port = flags.take("port")
    port = int(flags.take("rpc_port") or 0) or int(old_port or 0) or 50051
    words = ["--grpc-listen", f"{host}:{port}"]
    wildcard = host == "0.0.0.0"
    own = _own_address() if wildcard else host
    if wildcard:
        words += ["--grpc-advertise", f"{own}:{port}"]
    # Clients get the address of the frame server over gRPC. The environment can set a fixed port, e.g. for a firewall.
    if "MOONTIDE_MASTER_FRAME_LISTEN" not in os.environ:
        frame = _free_port(host)
        words += ["--frame-listen", f"{host}:{frame}"]
        if wildcard:
            words += ["--frame-advertise", f"{own}:{frame}"]
    metrics_host = _ip(flags.take("metrics_host") or "0.0.0.0")
    words += ["--admin-listen", f"{metrics_host}:{int(flags.take('metrics_port') or 9003)}"]
    words += _tls(host, metrics_host)
    high, share = flags.take("eviction_high_watermark_ratio"), flags.take("eviction_ratio")
    if high or share:
        high_permille = _permille(high or "0.95")
        low_permille = max(high_permille - _permille(share or "0.05"), 0)
        words += ["--eviction-high-watermark-permille", str(high_permille)]
        words += ["--eviction-low-watermark-permille", str(low_permille)]
    if session := flags.take("client_ttl"):
        words += ["--session-ttl-ms", str(round(float(session) * 1000))]
    if threads := int(flags.take("rpc_thread_num") or 0):
        words += ["--frame-threads", str(threads)]
    if strategy := flags.take("allocation_strategy"):
        words += ["--placement", "random" if strategy == "random" else "free-ratio"]
    return words


def node_arguments(flags: Flags) -> list[str]:
    """Returns the arguments of ``moontide node``. Raises ValueError for invalid values."""
    host = _ip(flags.take("host") or "0.0.0.0")
    port = int(flags.take("port") or 50052)
    words = ["--master", flags.take("master_server_address") or "127.0.0.1:50051"]
    words += ["--memory-bytes", str(parse_size(flags.take("global_segment_size") or "4 GB"))]
    # `setup_dummy` gets the address of the master from the admin endpoint. Only local processes call it.
    words += ["--admin-listen", f"127.0.0.1:{port}"]
    if host == "0.0.0.0":
        data_port = _free_port(host)
        words += ["--listen", f"{host}:{data_port}", "--advertise", f"{_own_address()}:{data_port}"]
    else:
        words += ["--listen", f"{host}:0"]
    words += _tls(host)
    if flags.take_bool("enable_offload"):
        disk_dir = os.environ.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
        if not disk_dir:
            raise ValueError("--enable_offload needs MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
        os.makedirs(disk_dir, exist_ok=True)
        words += ["--disk-dir", disk_dir]
        if limit := os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"):
            words += ["--disk-limit", str(parse_size(limit))]
    return words


def _run(program: str, command: str, translate: Callable[[Flags], list[str]]) -> int:
    flags = Flags(sys.argv[1:])
    if flags.take_bool("version"):
        become(["--version"])
    if flags.take_bool("help"):
        print(f"{program} takes Mooncake's flags and runs `moontide {command}`, whose help follows.\n", flush=True)
        become([command, "--help"])
    try:
        words = [command, *translate(flags)]
    except ValueError as error:
        _print_error(program, f"{error}")
        return 2
    if left := flags.left():
        _print_error(program, f"ignored flags without a counterpart: {', '.join(left)}")
    _print_error(program, f"runs moontide {' '.join(words)}")
    become(words)


def mooncake_master() -> int:
    """The program ``mooncake_master``."""
    return _run("mooncake_master", "master", master_arguments)


def mooncake_client() -> int:
    """The program ``mooncake_client``."""
    return _run("mooncake_client", "node", node_arguments)
