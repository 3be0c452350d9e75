"""``moontide.compat.mooncake``: setup and close."""

import ctypes
import http.server
import json
import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest
from mooncake_support import MIB, Block, set_up, unused_port

from moontide.compat.mooncake import MooncakeDistributedStore, ReplicateConfig, places
from moontide.compat.mooncake.setup import parse_size, split_port


@pytest.fixture(scope="module")
def with_node(start_cluster):
    cluster = start_cluster(memory="256MiB", groups=4)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def pool(with_node):
    return with_node.master


@pytest.fixture(scope="module")
def empty_pool(start_cluster):
    """A master without a node."""
    cluster = start_cluster(nodes=0, groups=4)
    yield cluster.master
    cluster.end()


def every_call(store: MooncakeDistributedStore, at: int) -> list[tuple[str, object, object]]:
    """Returns each call with its result and the expected result without a store."""
    none = ReplicateConfig()
    return [
        ("health_check", store.health_check(), 1),
        ("get_hostname", store.get_hostname(), ""),
        ("put", store.put("k", b"v"), -600),
        ("put", store.put("k", b"v", none), -600),
        ("upsert", store.upsert("k", b"v"), -600),
        ("put_parts", store.put_parts("k", b"v"), -600),
        ("put_parts", store.put_parts("k"), -600),
        ("put_batch", store.put_batch(["k"], [b"v"]), -600),
        ("get", store.get("k"), b""),
        ("get_batch", store.get_batch(["k", "l"]), [b"", b""]),
        ("get_buffer", store.get_buffer("k"), None),
        ("batch_get_buffer", store.batch_get_buffer(["k"]), [None]),
        ("is_exist", store.is_exist("k"), -600),
        ("batch_is_exist", store.batch_is_exist(["k", "l"]), [-600, -600]),
        ("get_size", store.get_size("k"), -600),
        ("remove", store.remove("k"), -600),
        ("batch_remove", store.batch_remove(["k"]), [-600]),
        ("remove_all", store.remove_all(), -600),
        ("remove_by_regex", store.remove_by_regex("k"), -600),
        ("register_buffer", store.register_buffer(at, 100), -600),
        ("unregister_buffer", store.unregister_buffer(at), -600),
        ("put_from", store.put_from("k", at, 10), -600),
        ("put_from", store.put_from("k", at, 0), -600),
        ("upsert_from", store.upsert_from("k", at, 10), -600),
        ("get_into", store.get_into("k", at, 10), -600),
        ("batch_put_from", store.batch_put_from(["k"], [at], [10]), [-600]),
        ("batch_get_into", store.batch_get_into(["k", ""], [at, at], [10, 10]), [-600, -600]),
        ("put multi", store.batch_put_from_multi_buffers(["k"], [[at]], [[10]]), [-600]),
        ("get multi", store.batch_get_into_multi_buffers(["k"], [[at]], [[10]]), [-600]),
        ("batch_get_replica_desc", store.batch_get_replica_desc(["k"]), {}),
        ("alloc_from_mem_pool", store.alloc_from_mem_pool(100), 0),
        ("put_tensor", store.put_tensor("k", memoryview(b"v")), -600),
        ("get_tensor", store.get_tensor("k"), None),
    ]


def check_every_call(store: MooncakeDistributedStore) -> None:
    block = Block()
    for name, result, expected in every_call(store, block.address):
        assert result == expected, name
    assert store.close() == 0


@pytest.mark.smoke
def test_calls_before_setup_return_error_codes():
    check_every_call(MooncakeDistributedStore())


def test_calls_after_close_return_error_codes(pool):
    store = set_up(pool)
    assert store.put("k", b"v") == 0
    assert store.health_check() == 0
    assert store.close() == 0
    check_every_call(store)


def test_setup_after_close_succeeds(pool):
    store = set_up(pool)
    assert store.close() == 0
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", pool) == 0
    assert store.health_check() == 0
    store.close()


def test_second_setup_forgets_registered_buffers(pool):
    store = set_up(pool)
    block = Block()
    assert store.register_buffer(block.address, block.size) == 0
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", pool) == 0
    assert store.register_buffer(block.address, block.size) == 0, "setup drops registered buffers"
    store.close()


def test_setup_without_master_fails_fast_and_logs_once(caplog):
    store = MooncakeDistributedStore()
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR):
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 0, "tcp", "", f"127.0.0.1:{unused_port()}")
    assert time.monotonic() - begun < 5
    assert code in (-900, -901)
    (record,) = caplog.records
    assert "mooncake_master" in record.getMessage()
    check_every_call(store)


def test_setup_accepts_dict_and_rejects_invalid_values(pool):
    given = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "0",
        "local_buffer_size": "16MB",
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": pool,
    }
    without_host = {name: value for name, value in given.items() if name != "local_hostname"}
    elsewhere = dict(given)
    elsewhere["master_server_address"] = elsewhere.pop("master_server_addr")
    for config, code in [
        (given, 0),
        ({**given, "unknown": 1}, 0),
        ({**given, "tenant_id": "t1"}, 0),
        ({**given, "global_segment_size": 0}, 0),
        (elsewhere, 0),
        (without_host, -600),
        ({**given, "global_segment_size": "abc"}, -600),
        ({**given, "global_segment_size": -1}, -600),
        ({**given, "enable_ssd_offload": True}, -600),
    ]:
        store = MooncakeDistributedStore()
        assert store.setup(config) == code, config
        assert store.close() == 0
    store = MooncakeDistributedStore()
    assert store.setup(config=given) == 0
    given.update(global_segment_size=0, local_buffer_size=0)
    assert store.setup(**given) == 0
    store.close()


def test_setup_rejects_wrong_arguments(pool):
    store = MooncakeDistributedStore()
    right = ["127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", pool]
    for index, value in [(2, "0"), (2, 0.0), (2, -1), (3, None), (6, None), (0, 5)]:
        wrong = list(right)
        wrong[index] = value
        with pytest.raises(TypeError):
            store.setup(*wrong)
    with pytest.raises(TypeError):
        store.setup("127.0.0.1")
    # Programs detect the supported arguments by the names in the message.
    with pytest.raises(TypeError, match="not_there"):
        store.setup(*right, not_there=1)
    assert store.setup("no such host. nowhere", "P2PHANDSHAKE", 32 * MIB, 0, "tcp", "", pool) == -600


def test_ignored_setup_arguments_are_logged_in_one_record(pool, caplog):
    store = MooncakeDistributedStore()
    with caplog.at_level(logging.INFO, logger="moontide.compat.mooncake"):
        code = store.setup("127.0.0.1", "http://metadata:8080", 0, 0, "rdma", "mlx5_0", pool, None, False, "")
    assert code == 0
    (record,) = caplog.records
    for word in ("metadata_server", "rdma", "rdma_devices"):
        assert word in record.getMessage()
    store.close()


def test_setup_with_segment_stores_objects_in_this_process(empty_pool):
    store = set_up(empty_pool, segment_bytes=64 * MIB)
    assert store.health_check() == 0
    host, port = store.get_hostname().split(":")
    assert host == "127.0.0.1" and int(port) > 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    assert store.put("k", b"in this process", config) == 0
    other = set_up(empty_pool)
    assert other.get("k") == b"in this process"
    (replica,) = other.get_replica_desc("k")
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == store.get_hostname()
    other.close()
    assert store.close() == 0


def test_preferred_segments_hold_the_replicas_in_order(empty_pool):
    stores = [set_up(empty_pool, segment_bytes=64 * MIB) for _ in range(3)]
    names = [store.get_hostname() for store in stores]

    def endpoints(key):
        replicas = stores[0].get_replica_desc(key)
        return [replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas]

    config = ReplicateConfig()
    buffer = bytearray(b"from an address")
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert stores[0].register_buffer(address, len(buffer)) == 0
    for number, name in enumerate(names * 2):
        config.preferred_segment = name
        assert stores[0].put(f"one-{number}", b"there", config) == 0
        assert stores[0].batch_put_from([f"from-{number}"], [address], [len(buffer)], config) == [0]
        assert endpoints(f"one-{number}") == endpoints(f"from-{number}") == [name]
    config = ReplicateConfig()
    config.replica_num = 2
    config.preferred_segments = ["no:1", names[2], "unknown", names[0]]
    for number in range(4):
        assert stores[1].put(f"two-{number}", b"there", config) == 0
        assert endpoints(f"two-{number}") == [names[2], names[0]]
    # A preference is a wish: the segment may be gone.
    stores[2].close()
    assert stores[1].put("gone", b"there", config) == 0
    assert names[0] in endpoints("gone")
    for store in stores[:2]:
        store.close()


def test_unknown_preferred_segment_is_looked_up_again_after_a_second(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    listed: list[dict] = []
    calls = []

    def nodes():
        calls.append(clock[0])
        return listed

    known = places.Places(nodes)
    assert known.of(["127.0.0.1:1", "127.0.0.1:2"]) == ()
    listed.append({"node": "a", "addresses": [("tcp", "127.0.0.1:1")]})
    clock[0] += 0.9
    assert known.of(["127.0.0.1:1"]) == () and len(calls) == 1
    clock[0] += 0.1
    assert known.of(["127.0.0.1:1"]) == ("a",) and len(calls) == 2
    # Known names are taken from the list for ten seconds; an unknown one is asked for once a second.
    clock[0] += 9.0
    assert known.of(["127.0.0.1:1", "127.0.0.1:1"]) == ("a",) and len(calls) == 2
    assert known.of(["127.0.0.1:1", "127.0.0.1:2"]) == ("a",) and len(calls) == 3
    listed.clear()
    clock[0] += 10.0
    assert known.of(["127.0.0.1:1"]) == () and len(calls) == 4


def test_small_segment_is_rounded_up(empty_pool):
    store = set_up(empty_pool, segment_bytes=1 * MIB)
    assert store.put("k", bytes(MIB)) == 0
    store.close()


def test_put_without_segment_returns_no_space(empty_pool):
    store = set_up(empty_pool)
    begun = time.monotonic()
    assert store.put("k", b"v") == -200
    assert time.monotonic() - begun < 8
    store.close()


def test_ssd_offload_keeps_objects_beyond_memory(empty_pool, tmp_path):
    disk = str(tmp_path / "ssd")
    named = {"enable_ssd_offload": True, "ssd_offload_path": disk}
    first = set_up(empty_pool, segment_bytes=32 * MIB, **named)
    second = set_up(empty_pool, segment_bytes=32 * MIB, **named)
    assert {"node-0", "node-1"} <= set(os.listdir(disk)), "each node has its own directory"
    keys = [f"k{number}" for number in range(96)]
    for number, key in enumerate(keys):
        assert first.put(key, bytes([number]) * MIB) == 0
    assert sum(first.batch_is_exist(keys)) == 96
    found = first.batch_get_replica_desc(keys)
    assert any(replica.is_local_disk_replica() for replicas in found.values() for replica in replicas)
    assert first.get("k0") == bytes(MIB)
    second.close()
    first.close()


def test_calls_after_master_loss_return_rpc_error_codes(own_cluster):
    cluster = own_cluster()
    store = set_up(cluster.master)
    assert store.put("k", b"v") == 0
    cluster.master_server.end(kill=True)
    assert store.health_check() == 2
    assert store.is_exist("nope") in (-900, -901)
    assert store.batch_is_exist(["nope", "k"]) in ([-900, -900], [-901, -901])
    assert store.put("l", b"v") in (-900, -901)
    assert store.remove("l") in (-900, -901)
    assert store.remove_all() in (-900, -901)
    assert store.get("nope") == b""
    assert store.get_into("nope", Block().address, 16) in (-900, -901)
    assert store.close() == 0


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_cannot_use_store(pool):
    store = set_up(pool)
    assert store.put("k", b"v") == 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        results = [store.put("l", b"v"), store.is_exist("k"), store.get("k").decode(), store.health_check()]
        os.write(writer, json.dumps(results).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        put, exists, got, health = json.loads(output.read())
    assert os.waitpid(child, 0)[1] == 0
    assert put < 0 and exists < 0 and got == "" and health != 0
    assert store.get("k") == b"v"
    store.close()


# ---------------------------------------------------------------------------------------------------------- setup_dummy


def test_setup_dummy_provides_memory_pool_and_requires_registration(with_node):
    store = MooncakeDistributedStore()
    assert store.setup_dummy(64 * MIB, 16 * MIB, with_node.nodes[0].facts["admin"].removeprefix("http://")) == 0
    assert store.health_check() == 0
    first, second = store.alloc_from_mem_pool(MIB), store.alloc_from_mem_pool(100)
    assert second - first >= MIB
    assert store.alloc_from_mem_pool(0) == 0
    assert store.alloc_from_mem_pool(128 * MIB) == 0
    ctypes.memset(first, 7, 100)
    assert store.put_from("d", first, 100) == 0, "the pool needs no registration"
    assert store.register_buffer(first, MIB) == 0
    assert store.get_into("d", first + 4096, 100) == 100
    assert ctypes.string_at(first + 4096, 100) == b"\7" * 100
    block = Block()
    assert store.put_from("e", block.address, 10) == -600, "unregistered memory is rejected"
    assert store.get_into("d", block.address, 100) == -600
    assert store.batch_get_into(["d", "d"], [block.address, first], [100, 100]) == [-600, 100]
    assert store.batch_put_from_multi_buffers(["e"], [[block.address]], [[10]]) == [-600]
    assert store.register_buffer(block.address, block.size) == 0
    assert store.get_into("d", block.address, 100) == 100
    assert store.unregister_buffer(first) == 0
    assert store.unregister_buffer(first) == -1
    assert store.put("f", b"by value") == 0
    assert store.get_hostname() == ""
    assert store.close() == 0
    assert store.alloc_from_mem_pool(100) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "", "127.0.0.1:nothing"])
def test_setup_dummy_rejects_invalid_address(address, caplog):
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, address) == -900
    assert len(caplog.records) == 1


def test_setup_dummy_without_node_fails_fast(caplog):
    begun = time.monotonic()
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, f"127.0.0.1:{unused_port()}") == -900
    assert time.monotonic() - begun < 5
    (record,) = caplog.records
    assert "mooncake_client" in record.getMessage()


def test_setup_dummy_rejects_other_http_server(caplog):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]" if self.path == "/health" else b"")

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert MooncakeDistributedStore().setup_dummy(MIB, MIB, f"127.0.0.1:{server.server_port}") == -900
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("arguments", [("x", 1, "a:1"), (-1, 1, "a:1"), (1, 1, None)])
def test_setup_dummy_rejects_wrong_types(arguments):
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup_dummy(*arguments)


# ---------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 << 30),
        ("3 GB", 3 << 30),
        ("1.5gb", 3 << 29),
        ("16MB", 16 << 20),
        ("7", 7),
        (7, 7),
        ("2 TiB", 2 << 40),
        ("0", 0),
    ],
)
def test_parse_size_accepts_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "3 XB", "-1", -1, "1e", "nan gb"])
def test_parse_size_rejects_invalid_text(text):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("a", "a", None), ("a:1", "a", 1), ("[::1]:2", "::1", 2), ("::1", "::1", None), ("10.0.0.1:", "10.0.0.1:", None)],
)
def test_split_port_separates_host_and_port(address, host, port):
    assert split_port(address) == (host, port)
