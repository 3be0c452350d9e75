"""The programs ``mooncake_master`` and ``mooncake_client``: flags, and processes that work together."""

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from mooncake_support import unused_port

from moontide.compat.mooncake import MooncakeDistributedStore, commands


def options(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def master(*flags: str) -> tuple[dict[str, str], list[str]]:
    given = commands.Flags(list(flags))
    return options(commands.master_arguments(given)), given.left()


def node(*flags: str) -> tuple[dict[str, str], list[str]]:
    given = commands.Flags(list(flags))
    return options(commands.node_arguments(given)), given.left()


def test_master_flags_on_loopback_are_translated():
    words, left = master(
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        "--rpc_port=50061",
        "--metrics_port=51061",
        "--enable_metric_reporting=false",
    )
    assert words.pop("--frame-listen").startswith("127.0.0.1:")
    assert words == {"--grpc-listen": "127.0.0.1:50061", "--admin-listen": "127.0.0.1:51061"}
    assert not left


def test_master_flags_on_all_interfaces_add_advertise_addresses():
    words, left = master("-port", "50052", "--max_threads=64", "--logtostderr")
    assert words["--grpc-listen"] == "0.0.0.0:50052"
    assert words["--grpc-advertise"].endswith(":50052")
    assert not words["--grpc-advertise"].startswith("0.0.0.0")
    frame_port = words["--frame-listen"].rpartition(":")[2]
    assert words["--frame-advertise"].endswith(f":{frame_port}")
    assert words["--admin-listen"] == "0.0.0.0:9003"
    assert words["--insecure-no-tls"] == "true"
    assert not left


def test_programs_with_certificate_do_not_allow_peers_without_tls(monkeypatch):
    monkeypatch.setenv("MOONTIDE_CA", "ca.pem")
    assert "--insecure-no-tls" not in master("--port=50052")[0]
    assert "--insecure-no-tls" not in node("--host=0.0.0.0")[0]


def test_eviction_flags_are_translated():
    flags = ["--enable_offload=true", "--default_kv_lease_ttl=500", "--eviction_high_watermark_ratio=0.8"]
    words, left = master(*flags, "--eviction_ratio=0.2", "--client_ttl=3", "--rpc_thread_num=2")
    assert (words["--eviction-high-watermark-permille"], words["--eviction-low-watermark-permille"]) == ("800", "600")
    assert (words["--session-ttl-ms"], words["--frame-threads"]) == ("3000", "2")
    assert left == ["default_kv_lease_ttl"]


def test_unsupported_flags_are_reported():
    words, left = master("--enable_ha", "--noenable_oplog", "--etcd_endpoints", "a;b", "stray", "--unknown=1")
    assert left == ["enable_ha", "enable_oplog", "etcd_endpoints", "stray", "unknown"]
    assert "--grpc-listen" in words


def test_node_flags_are_translated():
    words, left = node(
        "--master_server_address=127.0.0.1:50091",
        "--host=127.0.0.1",
        "--protocol=tcp",
        "--port=50092",
        "--global_segment_size=3 GB",
        "--metadata_server=P2PHANDSHAKE",
        "--threads=1",
    )
    assert words == {
        "--master": "127.0.0.1:50091",
        "--memory-bytes": str(3 << 30),
        "--admin-listen": "127.0.0.1:50092",
        "--listen": "127.0.0.1:0",
    }
    assert not left


def test_node_disk_flags_need_storage_path(monkeypatch, tmp_path):
    monkeypatch.delenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"):
        node("--enable_offload")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path / "ssd"))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "1GB")
    words, _ = node("--enable_offload=true")
    assert (words["--disk-dir"], words["--disk-limit"]) == (str(tmp_path / "ssd"), str(1 << 30))
    assert words["--listen"].startswith("0.0.0.0:") and "--advertise" in words


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("mooncake_master", ["--rpc_port=x"]),
        ("mooncake_master", ["--eviction_ratio=much"]),
        ("mooncake_client", ["--global_segment_size=lots"]),
    ],
)
def test_invalid_flag_value_exits_with_code_2(program, flags):
    ended = subprocess.run(command(program, *flags), capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def command(program: str, *flags: str) -> list[str]:
    script = f"import sys; from moontide.compat.mooncake import commands; sys.exit(commands.{program}())"
    return [sys.executable, "-c", script, *flags]


@pytest.mark.smoke
def test_mooncake_master_and_client_form_a_cluster():
    port, metrics, client = unused_port(), unused_port(), unused_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    where = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    running = [
        subprocess.Popen(command("mooncake_master", *where, f"--rpc_port={port}", f"--metrics_port={metrics}"), **quiet)
    ]
    try:
        wait_for_page(f"http://127.0.0.1:{metrics}/health")
        flags = [f"--master_server_address=127.0.0.1:{port}", "--host=127.0.0.1", f"--port={client}"]
        running.append(subprocess.Popen(command("mooncake_client", *flags, "--global_segment_size=64 MB"), **quiet))
        wait_for_page(f"http://127.0.0.1:{client}/health")
        store = MooncakeDistributedStore()
        begun = time.monotonic()
        while store.setup_dummy(1 << 20, 0, f"127.0.0.1:{client}") != 0:
            assert time.monotonic() - begun < 20
            time.sleep(0.1)
        assert store.put("k", b"v") == 0
        store.close()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{port}") == 0
        assert store.get("k") == b"v"
        store.close()
        assert wait_for_page(f"http://127.0.0.1:{metrics}/get_all_segments")
        for process in reversed(running):
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(15) == 0, "the process is the server, and exits cleanly"
    finally:
        for process in running:
            process.kill()
            process.wait()


def wait_for_page(url: str) -> str:
    begun = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.read().decode()
        except OSError:
            assert time.monotonic() - begun < 20, url
            time.sleep(0.05)


def test_mooncake_package_reexports_moontide_compat():
    mooncake = pytest.importorskip("mooncake.store", reason="moontide-mooncake-compat is not installed")
    if not hasattr(mooncake.MooncakeDistributedStore, "_open"):
        pytest.skip("the real Mooncake is installed")
    import mooncake as package

    import moontide.compat.mooncake as ours

    assert mooncake.MooncakeDistributedStore is ours.MooncakeDistributedStore is package.MooncakeDistributedStore
    for name in ours.__all__:
        assert getattr(mooncake, name) is getattr(ours, name)
