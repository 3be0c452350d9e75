"""``moontide.compat.mooncake``: calls by value, and calls for metadata."""

import array
import ctypes
import logging
import threading

import pytest
from mooncake_support import MIB, set_up

import moontide
from moontide.compat.mooncake import (
    MooncakeDistributedStore,
    ObjectDataType,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
)


@pytest.fixture(scope="module")
def pool(start_cluster):
    cluster = start_cluster(memory="2GiB", groups=4)
    yield cluster.master
    cluster.end()


@pytest.fixture
def store(pool):
    store = set_up(pool)
    store.remove_all(True)
    yield store
    store.close()


@pytest.mark.smoke
def test_put_get_round_trip(store):
    assert store.put("k", b"hello") == 0
    assert store.get("k") == b"hello"
    assert store.get_size("k") == 5
    assert store.is_exist("k") == 1


def test_put_of_existing_key_succeeds_without_overwriting(store):
    assert store.put("k", b"first") == 0
    assert store.put("k", b"second") == 0
    assert store.get("k") == b"first"


def test_upsert_overwrites(store):
    assert store.put("k", b"first") == 0
    assert store.upsert("k", b"second") == 0
    assert store.get("k") == b"second"
    assert store.upsert_parts("k", b"th", b"ird") == 0
    assert store.get("k") == b"third"
    assert store.upsert_batch(["k", "l"], [b"4", b"5"]) == 0
    assert store.get_batch(["k", "l"]) == [b"4", b"5"]


def test_missing_key_returns_empty_none_or_error_code(store):
    assert store.get("nope") == b""
    assert store.get_buffer("nope") is None
    assert store.is_exist("nope") == 0
    assert store.get_size("nope") == -704
    assert store.remove("nope") == -704
    assert store.get_tensor("nope") is None
    assert store.get_replica_desc("nope") == []


def test_empty_values_are_not_stored(store):
    assert store.put("e", b"") == -600
    assert store.put_parts("e") == 0
    assert store.put_parts("e", b"", b"") == 0
    assert store.is_exist("e") == 0
    assert store.put_batch(["e", "f"], [b"", b"f"]) == -600
    assert store.batch_is_exist(["e", "f"]) == [0, 0]


@pytest.mark.parametrize("key", ["", "x" * 5000], ids=["empty", "long"])
def test_empty_and_too_long_keys_are_rejected(store, key):
    assert store.put(key, b"x") == -600
    assert store.get(key) == b""
    assert store.get_buffer(key) is None
    assert store.is_exist(key) == 0
    assert store.get_size(key) == -704
    assert store.remove(key) == -704
    assert store.put("good", b"x") == 0
    assert store.batch_is_exist([key, "good", "nope"]) == [0, 1, 0]
    assert store.get_batch([key, "good"]) == [b"", b"x"]
    assert [found is None for found in store.batch_get_buffer([key, "good"])] == [True, False]
    assert store.put_batch([key, "other"], [b"1", b"2"]) == -600
    assert store.get("other") == b"2"
    assert store.batch_remove([key, "good", "nope"]) == [-704, 0, -704]


@pytest.mark.parametrize("key", ["a\0b", "a b/ü", "k@tp_rank:0", "x" * 4096, b"bytes"])
def test_keys_may_be_any_text(store, key):
    assert store.put(key, b"value") == 0
    assert store.get(key) == b"value"
    assert store.batch_is_exist([key]) == [1]


@pytest.mark.parametrize("value", [b"1234", bytearray(b"1234"), memoryview(b"1234"), array.array("B", b"1234")])
def test_put_accepts_buffers(store, value):
    assert store.put("v", value) == 0
    assert store.get("v") == b"1234"


def test_multibyte_array_is_stored_completely(store):
    # Mooncake counts elements instead of bytes, and stores a quarter of this array.
    assert store.put("v", array.array("I", [1, 2, 3, 4])) == 0
    assert store.get_size("v") == 16


@pytest.mark.parametrize(
    "wrong",
    [
        lambda store: store.put("k", "text"),
        lambda store: store.put("k", None),
        lambda store: store.put(5, b"x"),
        lambda store: store.put("k", b"x", {"replica_num": 1}),
        lambda store: store.put_parts("k", "text"),
        lambda store: store.batch_is_exist([3]),
        lambda store: store.batch_is_exist("kk"),
        lambda store: store.put(),
        lambda store: store.get(),
    ],
)
def test_wrong_argument_types_raise_type_error(store, wrong):
    with pytest.raises(TypeError):
        wrong(store)


def test_put_parts_concatenates_parts(store):
    assert store.put_parts("p", b"ab", bytearray(b"cd"), memoryview(b"ef")) == 0
    assert store.get("p") == b"abcdef"
    assert store.put_parts("p", b"other") == 0
    assert store.get("p") == b"abcdef"
    assert store.put_parts("q", b"a", b"", config=ReplicateConfig()) == 0
    assert store.get("q") == b"a"


def test_put_batch_returns_single_code(store):
    assert store.put_batch(["b1", "b2"], [b"1", b"22"]) == 0
    assert store.put_batch(["b1", "b3"], [b"x", b"3"]) == 0
    assert store.get_batch(["b1", "b2", "nope", "b3", "b1"]) == [b"1", b"22", b"", b"3", b"1"]
    assert store.put_batch(["b4", "b5"], [b"x"]) == -600
    assert store.put_batch([], []) == 0
    assert store.put_batch(["d", "d"], [b"1", b"1"]) == 0


def test_empty_lists_return_empty_results(store):
    assert store.batch_is_exist([]) == []
    assert store.batch_get_buffer([]) == []
    assert store.get_batch([]) == []
    assert store.batch_remove([]) == []
    assert store.batch_get_replica_desc([]) == {}


def test_batch_larger_than_one_request_succeeds(store):
    keys = [f"many_{i}" for i in range(10_000)]
    assert store.put_batch(keys[::2], [b"x"] * 5_000) == 0
    assert store.batch_is_exist(keys) == [1, 0] * 5_000
    assert store.remove_by_regex("^many_", True) == 5_000


def test_buffer_exposes_bytes_and_outlives_removal(store):
    assert store.put("k", b"hello") == 0
    found = store.get_buffer("k")
    assert found.size() == len(found) == 5
    assert bytes(found) == b"hello"
    assert memoryview(found)[1:3] == b"el"
    assert isinstance(found.ptr(), int) and found.ptr() > 0
    assert ctypes.string_at(found.ptr(), found.size()) == b"hello"
    assert store.remove("k", True) == 0
    assert bytes(found) == b"hello", "a buffer does not change"
    del found
    assert store.get_buffer("k") is None


def test_batch_get_buffer_returns_none_for_missing_keys(store):
    assert store.put_batch(["a", "b"], [b"1", b"22"]) == 0
    a, none, b = store.batch_get_buffer(["a", "nope", "b"])
    assert none is None
    assert bytes(a) == b"1" and bytes(b) == b"22"


def test_replica_descriptors_report_status_and_location(store):
    assert store.put("k", b"hello") == 0
    found = store.batch_get_replica_desc(["k", "nope", ""])
    assert list(found) == ["k"]
    (replica,) = found["k"]
    assert replica.status == ReplicaStatus.COMPLETE
    assert replica.is_memory_replica() and not replica.is_disk_replica() and not replica.is_local_disk_replica()
    buffer = replica.get_memory_descriptor().buffer_descriptor
    assert buffer.size == 5
    assert ":" in buffer.transport_endpoint
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()
    assert store.get_replica_desc("k")[0].is_memory_replica()


def test_remove_returns_code_per_key(store):
    assert store.put_batch(["r1", "r2", "r3"], [b"1"] * 3) == 0
    assert store.remove("r1") == 0
    assert store.remove("r1") == -704
    assert store.batch_remove(["r2", "nope"], True) == [0, -704]
    assert store.remove("r3", force=True) == 0
    assert store.batch_is_exist(["r1", "r2", "r3"]) == [0, 0, 0]


def test_remove_all_returns_count(store):
    assert store.put_batch(["z1", "z2", "z3"], [b"1"] * 3) == 0
    assert store.remove_all() == 3
    assert store.batch_is_exist(["z1", "z2", "z3"]) == [0, 0, 0]
    assert store.remove_all(True) == 0
    assert store.remove_all(force=True) == 0


@pytest.mark.parametrize(
    ("pattern", "removed"),
    [
        ("^zzz", 0),
        ("1$", 2),
        ("^b[0-9]", 3),
        ("^b", 3),
        ("^bc?", 3),
        ("^b1|^c", 2),
        ("", 4),
        ("^u7_.*", 0),
        (".", 4),
    ],
)
def test_remove_by_regex_matches_anywhere_in_key(store, pattern, removed):
    keys = ["b1", "b2", "b3", "c1"]
    assert store.put_batch(keys, [b"x"] * 4) == 0
    assert store.remove_by_regex(pattern, True) == removed
    assert sum(store.batch_is_exist(keys)) == 4 - removed


def test_remove_by_regex_rejects_invalid_pattern(store):
    assert store.remove_by_regex("([") == -600


def test_hard_pinned_object_is_removed_only_by_force(store):
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("pinned", b"x", config) == 0
    assert store.remove("pinned") == -706
    assert store.batch_remove(["pinned", "nope"]) == [-706, -704]
    assert store.remove_by_regex("^pinned") == 0
    assert store.get("pinned") == b"x"
    assert store.remove("pinned", True) == 0


def test_pins_of_replicate_config_are_those_of_the_object(store, pool):
    plain = moontide.Store(pool)
    for name, fields, pin in [
        ("none", {}, "none"),
        ("soft", {"with_soft_pin": True}, "soft"),
        ("action", {"soft_pin_action": SoftPinAction.ENABLE}, "soft"),
        ("hard", {"with_hard_pin": True}, "hard"),
        ("both", {"with_soft_pin": True, "with_hard_pin": True}, "hard"),
    ]:
        config = ReplicateConfig()
        for field, value in fields.items():
            setattr(config, field, value)
        assert store.put(name, b"x", config) == 0
        assert plain.stat(name)["pin"] == pin
    store.remove_all(True)
    plain.close()


def test_remove_all_keeps_hard_pinned_objects(store):
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("pinned", b"x", config) == 0
    assert store.remove_all() == 0
    assert store.get("pinned") == b"x"


def test_recently_read_object_can_be_removed(store):
    assert store.put("k", b"x") == 0
    assert store.get("k") == b"x"
    assert store.remove("k") == 0
    assert store.get("k") == b""


def test_replicate_config_checks_field_names_and_types():
    config = ReplicateConfig()
    assert hasattr(ReplicateConfig, "group_ids")
    assert (config.replica_num, config.group_ids, config.preferred_segments) == (1, None, [])
    config.replica_num = 2
    config.preferred_segment = "a:1"
    config.preferred_segments = ("a", "b")
    config.with_soft_pin = config.with_hard_pin = config.prefer_alloc_in_same_node = True
    config.group_ids = ["g"]
    config.data_type = ObjectDataType.KVCACHE
    config.soft_pin_action = SoftPinAction.ENABLE
    assert config.preferred_segments == ["a", "b"]
    assert "replica_num: 2" in str(config)
    for name, value in [
        ("replica_num", "x"),
        ("replica_num", -1),
        ("preferred_segment", 3),
        ("group_ids", "g"),
        ("soft_pin_ttl_ms", -1),
    ]:
        with pytest.raises(TypeError):
            setattr(config, name, value)
    with pytest.raises(AttributeError):
        config.unknown_field = 1
    with pytest.raises(TypeError):
        ReplicateConfig(replica_num=2)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"replica_num": 2}, 0),  # fewer replicas are enough if there are fewer nodes
        ({"replica_num": 100}, 0),
        ({"replica_num": 0}, -600),
        ({"preferred_segment": "no:1"}, 0),
        ({"preferred_segments": ["no:1"]}, 0),
        ({"with_soft_pin": True}, 0),
        ({"soft_pin_action": SoftPinAction.ENABLE, "soft_pin_ttl_ms": 5}, 0),
        ({"soft_pin_ttl_ms": 5}, -600),
        ({"group_ids": ["a"]}, 0),
        ({"group_ids": ["a" * 300]}, 0),
        ({"group_ids": ["a", "b"]}, -600),
        ({"group_ids": []}, -600),
    ],
)
def test_put_validates_replicate_config(store, fields, code):
    config = ReplicateConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    assert store.put("k", b"x", config) == code
    assert store.is_exist("k") == (code == 0)


def test_replicate_config_can_change_between_puts(store):
    config = ReplicateConfig()
    assert store.put("k1", b"x", config) == 0
    config.replica_num = 0
    assert store.put("k2", b"x", config) == -600
    config.replica_num = 1
    assert store.put("k2", b"x", config) == 0


@pytest.mark.slow
def test_256_mib_value_round_trips(store):
    value = bytes(range(256)) * MIB
    assert store.put("large", value) == 0
    assert store.get_size("large") == 256 * MIB
    assert store.get("large") == value


@pytest.mark.slow
def test_value_that_does_not_fit_returns_no_space(pool):
    store = set_up(pool)
    assert store.put("too much", bytes(600 * MIB)) == -200
    store.close()


def test_64_threads_put_get_and_remove(store):
    wrong = []

    def work(number: int) -> None:
        for turn in range(20):
            key, value = f"t{number}_{turn}", b"%d %d" % (number, turn)
            shared = f"shared_{turn}"
            if store.put(key, value) != 0 or store.get(key) != value or store.is_exist(key) != 1:
                wrong.append(key)
            if store.put(shared, b"the same") != 0 or store.get(shared) not in (b"the same", b""):
                wrong.append(shared)
            if store.remove(key, True) != 0:
                wrong.append(f"removal of {key}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tenants_are_isolated(pool, store):
    other = set_up(pool, tenant_id="other")
    assert store.put("k", b"ours") == 0
    assert other.is_exist("k") == 0
    assert other.put("k", b"theirs") == 0
    assert (store.get("k"), other.get("k")) == (b"ours", b"theirs")
    assert other.remove_all(True) == 1
    assert store.is_exist("k") == 1
    other.close()


def test_tensors_keep_type_and_shape(store):
    numpy = pytest.importorskip("numpy")
    tensor = numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4)
    assert store.put_tensor("t", tensor) == 0
    found = numpy.asarray(store.get_tensor("t"))
    assert found.dtype == tensor.dtype and (found == tensor).all()
    assert store.put_tensor("no tensor", "text") == -600
    assert store.batch_put_tensor(["t1", "t2"], [tensor, tensor]) == [0, 0]
    assert [found is None for found in store.batch_get_tensor(["t1", "nope"])] == [False, True]
    assert store.batch_upsert_tensor(["t1"], [tensor + 1]) == [0]
    assert (numpy.asarray(store.get_tensor("t1")) == tensor + 1).all()
    assert store.batch_put_tensor(["t1"], []) == [-600]


def test_put_tensor_with_tp_splits_tensor_over_ranks(store):
    numpy = pytest.importorskip("numpy")
    tensor = numpy.arange(20, dtype=numpy.int32).reshape(4, 5)
    assert store.put_tensor_with_tp("t", tensor, tp_size=2, split_dim=1) == 0
    assert store.batch_is_exist(["t", "t_tp_0", "t_tp_1"]) == [0, 1, 1]
    parts = [numpy.asarray(store.get_tensor_with_tp("t", rank, 2)) for rank in (0, 1)]
    assert (numpy.concatenate(parts, axis=1) == tensor).all()
    assert store.put_tensor_with_tp("t", tensor, tp_size=2, split_dim=7) == -600
    assert store.batch_put_tensor_with_tp(["u"], [tensor], tp_size=2) == [0]
    assert len(store.batch_get_tensor_with_tp(["u"], 1, 2)) == 1


def test_get_before_setup_logs_no_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert MooncakeDistributedStore().get("k") == b""
    assert not caplog.records
