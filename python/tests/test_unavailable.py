"""Unavailable, slow and failed servers: errors with a remedy, within the timeout."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moontide

MIB = 1 << 20


def address_of(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connect_async(master: str, **settings) -> moontide.AsyncStore:
    async def connect() -> moontide.AsyncStore:
        return await moontide.AsyncStore.connect(master, **settings)

    return asyncio.run(connect())


@pytest.mark.smoke
@pytest.mark.parametrize("connect", [moontide.Store, connect_async])
def test_connect_without_master_raises_unreachable(connect):
    begun = time.monotonic()
    with pytest.raises(moontide.Unreachable, match="moontide master") as caught:
        connect(f"127.0.0.1:{free_port()}")
    assert time.monotonic() - begun < 5
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.retryable


@pytest.mark.parametrize(("connect", "settings"), [(moontide.Store, {}), (connect_async, {"connect_timeout": 1.0})])
def test_connect_to_silent_server_times_out(connect, settings):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises((moontide.Unreachable, moontide.DeadlineExceeded)) as caught:
            connect(address_of(silent), **settings)
        assert time.monotonic() - begun < 5
        assert "moontide master" in str(caught.value)


@pytest.mark.parametrize("connect", [moontide.Store, connect_async])
def test_connect_to_non_grpc_server_fails(cluster, connect):
    begun = time.monotonic()
    for fact in ("frame", "admin"):
        with pytest.raises(moontide.Error) as caught:
            connect(cluster.master_server.facts[fact].removeprefix("http://").rstrip("/"))
        assert "gRPC" in str(caught.value)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "::", "http://x y"])
def test_connect_to_invalid_address_fails(address):
    begun = time.monotonic()
    with pytest.raises((moontide.Unreachable, moontide.InvalidArgument, ValueError)):
        moontide.Store(address)
    assert time.monotonic() - begun < 5


def test_connect_timeout_is_honored():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(moontide.Error):
            moontide.Store(address_of(silent), connect_timeout=0.3)
        assert time.monotonic() - begun < 2


def test_local_node_without_master_raises_unreachable():
    begun = time.monotonic()
    with pytest.raises(moontide.Unreachable, match="master"):
        moontide.LocalNode(f"127.0.0.1:{free_port()}", 16 * MIB)
    assert time.monotonic() - begun < 7


def test_local_servers_check_and_report_addresses():
    with pytest.raises(ValueError, match="address"):
        moontide.LocalMaster("nonsense")
    master = moontide.LocalMaster()
    with pytest.raises(moontide.Error, match="another process"):
        moontide.LocalMaster(master.address)
    with pytest.raises(ValueError, match="address"):
        moontide.LocalNode(master.address, 16 * MIB, listen="nonsense")
    node = moontide.LocalNode(master.address, 16 * MIB, rack="r", zone="z")
    with moontide.Store(master.address) as store:
        (found,) = store.nodes()
        assert (found["node"], found["rack"], found["zone"]) == (node.id, "r", "z")
        assert len(node.id) == 16 and int(node.id, 16) > 0
        assert ("tcp", node.addresses[0]) in found["addresses"]
        assert store.put("a", b"1")
    node.close()
    node.close()
    master.close()
    master.close()


def test_dev_cluster_serves_stores_until_closed(tmp_path):
    with moontide.dev(64 * MIB, nodes=2) as dev:
        assert repr(dev) == f"<moontide.Dev with its master at {dev.master}>"
        assert dev.admin.startswith("http://")
        with dev.store(shm=False) as store:
            assert store.put("a", b"1", replicas=2, replicas_min=2)
    dev.close()
    assert repr(dev).endswith(", closed>")
    with pytest.raises(moontide.Closed, match="moontide.dev"):
        dev.store()
    with pytest.raises(moontide.InvalidArgument):
        moontide.dev(64 * MIB, nodes=0)
    with pytest.raises(moontide.InvalidArgument):
        moontide.dev(1)


def test_store_keeps_its_dev_cluster_alive():
    store = moontide.dev(64 * MIB).store()
    gc.collect()
    assert store.put("a", b"1")
    assert store.get("a") == b"1"


def test_dev_cluster_removes_its_disk_files_on_close(tmp_path):
    for _ in range(2):
        with moontide.dev(64 * MIB, disk_dir=tmp_path) as dev, dev.store() as store:
            assert store.put("a", b"1")
        assert list(tmp_path.iterdir()) == []


def test_master_address_is_read_from_environment(cluster, monkeypatch):
    monkeypatch.setenv("MOONTIDE_MASTER", cluster.master)
    with moontide.Store() as store:
        assert store.master == cluster.master


@pytest.mark.slow
def test_objects_beyond_memory_are_offloaded_to_disk(tmp_path):
    with moontide.dev(32 * MIB, disk_dir=str(tmp_path)) as dev, dev.store() as store:
        for number in range(48):
            store.put(str(number), bytes([number]) * MIB)
        found = [store.get(str(number)) for number in range(48)]
        kept = [number for number in range(48) if found[number] is not None]
        assert len(kept) > 32
        assert all(found[number] == bytes([number]) * MIB for number in kept)
        assert store.stats()["hits_disk"] > 0
        assert any(location["medium"] == "disk" for number in kept for location in store.stat(str(number))["locations"])


def test_node_spreads_objects_over_several_directories(tmp_path):
    dirs = [tmp_path / "a", str(tmp_path / "b")]
    master = moontide.LocalMaster()
    node = moontide.LocalNode(master.address, 32 * MIB, disk_dir=dirs)
    with moontide.Store(master.address) as store:
        for number in range(48):
            store.put(str(number), bytes([number]) * MIB)
        found = [store.get(str(number)) for number in range(48)]
        assert sum(value == bytes([number]) * MIB for number, value in enumerate(found)) > 32
    node.close()
    master.close()
    for path in dirs:
        assert list(Path(path).glob("*.bucket")), path


# -------------------------------------------------------------------------------------------------------- timeouts


def test_calls_time_out_while_master_is_stopped(own_cluster, stopped):
    cluster = own_cluster()
    with moontide.Store(cluster.master, timeout=0.3) as store:
        store.put("a", b"123")
        with stopped(cluster.master_server):
            for call in (
                lambda: store.put("b", b"1"),
                lambda: store.exists("b"),
                lambda: store.get("b"),
                lambda: store.remove("a"),
                lambda: store.stat("a"),
                lambda: store.keys(),
                lambda: store.touch("b"),
            ):
                begun = time.monotonic()
                with pytest.raises((moontide.DeadlineExceeded, moontide.Unreachable)) as caught:
                    call()
                assert time.monotonic() - begun < 2
                assert isinstance(caught.value, (TimeoutError, ConnectionError))
                assert caught.value.retryable
            for call in (
                lambda: store.batch_put(["c"], [b"1"]),
                lambda: store.batch_exists(["a", "b"]),
                lambda: store.batch_touch(["a", "b"]),
                lambda: store.prefetch(["a", "b"]),
            ):
                with pytest.raises(moontide.BatchError) as failed:
                    call()
                assert failed.value.retryable
            assert store.get("a") == b"123", "local reads need no master"
            assert bytes(store.get_view("a")) == b"123"
        assert store.put("after", b"1")


INTERRUPTED = """
import os, signal, sys, threading, time, moontide
master, server = sys.argv[1], int(sys.argv[2])
store = moontide.Store(master, timeout=0.4)
store.put("existing", b"123")
os.kill(server, signal.SIGSTOP)
time.sleep(0.1)
try:
    for call in sys.argv[3:]:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        try:
            eval(call)
        except KeyboardInterrupt:
            print(call, 0.05 < time.monotonic() - begun < 2)
finally:
    os.kill(server, signal.SIGCONT)
print(store.get("existing"), store.put("after", b"1", overwrite=True))
"""

INTERRUPTED_CALLS = [
    "store.exists('x')",
    "store.put('x', b'1')",
    "store.get('x')",
    "store.get_view('x')",
    "store.get_into('x', bytearray(1))",
    "store.batch_put(['x'], [b''])",
    "store.batch_exists(['x', 'y'])",
    "store.keys()",
]


def test_calls_are_interrupted_by_ctrl_c(own_cluster):
    cluster = own_cluster()
    command = [sys.executable, "-c", INTERRUPTED, cluster.master, str(cluster.master_server.pid), *INTERRUPTED_CALLS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    expected = [f"{call} True" for call in INTERRUPTED_CALLS] + ["b'123' True"]
    assert (ended.stdout.splitlines(), ended.stderr) == (expected, "")


def test_signal_handlers_run_during_calls(own_cluster, stopped):
    cluster = own_cluster()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with moontide.Store(cluster.master, timeout=1) as store, stopped(cluster.master_server):
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(moontide.DeadlineExceeded):
                store.exists("a")
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


# ------------------------------------------------------------------------------------------------- failures


def retry(call, seconds: float = 20):
    """Repeats a call while its errors are retryable."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return call()
        except moontide.Error as error:
            assert error.retryable, repr(error)
            assert time.monotonic() < ends, repr(error)
            time.sleep(0.05)


def test_store_recovers_after_master_restart(own_cluster, tmp_path):
    cluster = own_cluster(master=["--data-dir", str(tmp_path / "identity")])
    with (
        moontide.Store(cluster.master, timeout=1) as store,
        moontide.Store(cluster.master, timeout=1, shm=False) as remote,
    ):
        store.put("a", b"before")
        assert remote.get("a") == b"before"
        view = store.get_view("a")
        cluster.master_server.end(kill=True)
        for call in (
            lambda: store.put("b", b"1"),
            lambda: store.exists("b"),
            lambda: remote.remove("b"),
            lambda: remote.keys(),
        ):
            with pytest.raises((moontide.Unreachable, moontide.ConnectionLost, moontide.DeadlineExceeded)) as caught:
                call()
            assert caught.value.retryable
        with pytest.raises(moontide.BatchError):
            remote.batch_exists(["a"])
        assert store.get("a") == b"before", "local reads continue"
        assert remote.get("a") == b"before", "reads from cached locations continue"
        cluster.restart_master()
        assert retry(lambda: store.put("b", b"after"))
        assert retry(lambda: store.exists("a")), "the node has reported its objects"
        assert retry(lambda: remote.get("b")) == b"after"
        assert bytes(view) == b"before"

        def replace():
            try:
                return remote.put("a", b"new", overwrite=True)
            except moontide.Pending:  # stored; the new master does not know whether it has heard from all nodes
                return True

        assert retry(replace)
        assert store.get("a") == b"new"
        assert bytes(view) == b"before"


def test_replicated_objects_are_readable_after_node_is_killed(own_cluster):
    cluster = own_cluster(nodes=2)
    with (
        moontide.Store(cluster.master, timeout=2) as store,
        moontide.Store(cluster.master, timeout=2, shm=False) as remote,
    ):
        for number in range(20):
            store.put(f"twice/{number}", bytes([number]) * 1000, replicas=2, replicas_min=2)
        cluster.nodes[0].end(kill=True)
        for number in range(20):
            for connection in (store, remote):
                assert retry(lambda: connection.get(f"twice/{number}")) == bytes([number]) * 1000  # noqa: B023


# ---------------------------------------------------------------------------------------------------- classes


def test_error_classes_have_unique_codes():
    from moontide import errors

    for code, kind in errors.BY_CODE.items():
        assert kind.code == code
        assert kind.name == kind.__name__
        assert isinstance(kind.retryable, bool)
        assert issubclass(kind, moontide.Error)
        assert getattr(moontide, kind.__name__) is kind
        assert kind.__doc__
    assert len(errors.BY_CODE) == len({kind.code for kind in errors.BY_CODE.values()})
    assert errors.BY_CODE[200] is moontide.NoSpace
    assert issubclass(moontide.Closed, ValueError)
    assert issubclass(moontide.BatchError, moontide.Error)


def test_errors_can_be_pickled(store):
    import copy
    import pickle

    with pytest.raises(moontide.InvalidArgument) as caught:
        store.put("", b"")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.code) == (moontide.InvalidArgument, str(caught.value), 2)
    with pytest.raises(moontide.BatchError) as caught:
        store.batch_put(["", ""], [b"", b""])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), len(again.outcomes)) == (moontide.BatchError, str(caught.value), 2)
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_pickling_store_or_view_raises_type_error(store, key):
    import pickle

    store.put(key("a"), b"1")
    for each in (store, store.get_view(key("a"))):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(each)
