"""Every call of every kind of store: results and invalid arguments."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

import moontide


@pytest.mark.smoke
def test_put_get_round_trip(caller, key):
    assert caller.put(key("a"), b"one") is True
    assert caller.get(key("a")) == b"one"
    assert caller.exists(key("a")) is True
    assert caller.remove(key("a")) is True
    assert caller.get(key("a")) is None


def test_missing_key_returns_none_or_false(caller, key):
    nothing = key("nothing")
    assert caller.get(nothing) is None
    assert caller.get_into(nothing, bytearray(8)) is None
    assert caller.get_into(nothing, [bytearray(8), bytearray(8)]) is None
    assert caller.get_view(nothing) is None
    assert caller.get_tensor(nothing) is None
    assert caller.exists(nothing) is False
    assert caller.remove(nothing) is False
    assert caller.touch(nothing) is False
    assert caller.prefetch([nothing]) == [False]
    assert caller.batch_get([nothing]) == [None]
    assert caller.batch_get_into([nothing], [bytearray(1)]) == [None]
    assert caller.batch_exists([nothing]) == [False]
    assert caller.batch_remove([nothing]) == [False]
    assert caller.batch_touch([nothing]) == [False]
    assert caller.batch_get_view([nothing]) == [None]
    assert caller.set_pin(nothing, "hard") is False
    assert caller.batch_set_pin([nothing], "hard") == [False]


def test_missing_key_is_none_in_stat_and_key_error_in_mapping(either, key):
    nothing = key("nothing")
    assert either.stat(nothing) is None
    assert nothing not in either
    with pytest.raises(KeyError, match="nothing"):
        either[nothing]
    with pytest.raises(KeyError, match="nothing"):
        del either[nothing]


def test_put_of_existing_key_does_not_overwrite(caller, key):
    assert caller.put(key("a"), b"one")
    assert caller.put(key("a"), b"two") is False
    assert caller.put_from(key("a"), [b"t", b"wo"]) is False
    assert caller.batch_put([key("a"), key("b")], [b"two", b"new"]) == [False, True]
    assert caller.batch_get([key("a"), key("b")]) == [b"one", b"new"]


@pytest.mark.parametrize("content", [b"", b"longer than before", b"s"])
def test_overwrite_replaces(caller, key, content):
    assert caller.put(key("a"), b"before")
    assert caller.put(key("a"), content, overwrite=True) is True
    assert caller.get(key("a")) == content
    assert caller.put(key("a"), b"again", moontide.PutOptions(overwrite=True))
    assert caller.get(key("a")) == b"again"


def test_str_and_bytes_keys_are_equal(caller, key):
    name = key("Gezeiten-潮汐")
    assert caller.put(name, b"1")
    assert caller.get(name.encode()) == b"1"
    raw = key().encode() + b"\x00\xff\xfe"
    assert caller.put(raw, b"2")
    assert caller.get(raw) == b"2"


def test_put_from_gathers_and_get_into_scatters(caller, key):
    assert caller.put_from(key("a"), [b"0123", bytearray(b"45"), memoryview(b"6789"), b""])
    assert caller.get(key("a")) == b"0123456789"
    parts = [bytearray(3), bytearray(0), bytearray(3), bytearray(b"......")]
    assert caller.get_into(key("a"), parts) == 10
    assert parts == [b"012", b"", b"345", b"6789.."]
    assert caller.get_into(key("a"), tuple(parts)) == 10


def test_put_from_empty_list_stores_empty_object(caller, key):
    assert caller.put_from(key("a"), [])
    assert caller.get(key("a")) == b""


def test_get_into_leaves_bytes_after_object_unchanged(caller, key):
    caller.put(key("a"), b"1234")
    space = bytearray(b"......")
    assert caller.get_into(key("a"), space) == 4
    assert space == b"1234.."


@pytest.mark.parametrize("space", [bytearray(3), [bytearray(1), bytearray(2)], []])
def test_get_into_too_small_buffer_reports_required_size(caller, key, space):
    caller.put(key("a"), b"1234")
    with pytest.raises(moontide.InvalidArgument, match="at least 4"):
        caller.get_into(key("a"), space)


def test_batch_results_keep_key_order(caller, key):
    keys = [key(str(number)) for number in range(300)]
    values = [bytes([number % 251]) * number for number in range(300)]
    assert caller.batch_put(keys[::2], values[::2]) == [True] * 150
    assert caller.batch_exists(keys) == [True, False] * 150
    expected = [value if number % 2 == 0 else None for number, value in enumerate(values)]
    assert caller.batch_get(keys) == expected
    spaces = [bytearray(300) for _ in keys]
    lengths = [None if value is None else len(value) for value in expected]
    assert caller.batch_get_into(keys, spaces) == lengths
    assert all(value is None or space[: len(value)] == value for value, space in zip(expected, spaces, strict=True))
    assert caller.batch_touch(keys) == [True, False] * 150
    assert caller.prefetch(keys) == [True, False] * 150
    assert caller.batch_remove(keys) == [True, False] * 150
    assert caller.batch_exists(keys) == [False] * 300


def test_batch_get_view_returns_none_for_missing_keys(caller, key):
    keys = [key(str(number)) for number in range(100)]
    caller.batch_put(keys[::2], [str(number).encode() for number in range(0, 100, 2)])
    views = caller.batch_get_view(keys)
    assert [view and bytes(view) for view in views] == [
        str(number).encode() if number % 2 == 0 else None for number in range(100)
    ]


def test_empty_batches_return_empty_lists(caller):
    assert caller.batch_put([], []) == []
    assert caller.batch_get([]) == []
    assert caller.batch_get_into([], []) == []
    assert caller.batch_exists([]) == []
    assert caller.batch_remove([]) == []
    assert caller.batch_touch([]) == []
    assert caller.batch_get_view([]) == []
    assert caller.prefetch([]) == []


def test_batches_accept_iterators(caller, key):
    names = [key("a"), key("b")]
    assert caller.batch_put(iter(names), (value for value in (b"1", b"2"))) == [True, True]
    assert caller.batch_get(name for name in names) == [b"1", b"2"]
    assert caller.put_from(key("c"), iter([b"1", b"2"]))


def test_duplicate_key_in_batch_is_stored_once(caller, key):
    assert sorted(caller.batch_put([key("a"), key("a")], [b"1", b"1"])) == [False, True]
    assert caller.batch_get([key("a"), key("a")]) == [b"1", b"1"]
    assert caller.batch_exists([key("a"), key("a")]) == [True, True]


def test_batch_get_into_scatters(caller, key):
    caller.batch_put([key("a"), key("b")], [b"1234", b"5678"])
    spaces = [bytearray(2), bytearray(2), bytearray(4)]
    assert caller.batch_get_into([key("a"), key("b")], [spaces[:2], spaces[2]]) == [4, 4]
    assert spaces == [b"12", b"34", b"5678"]


def test_batch_error_has_outcome_per_key_and_others_succeed(caller, key):
    with pytest.raises(moontide.BatchError, match="1 of 3 failed; the first: key has") as caught:
        caller.batch_put([key("a"), "k" * 5000, key("b")], [b"1", b"2", b"3"])
    fine, wrong, also_fine = caught.value.outcomes
    assert (fine, also_fine) == (True, True)
    assert isinstance(wrong, moontide.InvalidArgument)
    assert caught.value.code == 2
    assert caught.value.retryable is False
    with pytest.raises(moontide.BatchError) as caught:
        caller.batch_get_into([key("a"), key("b")], [bytearray(0), bytearray(1)])
    assert isinstance(caught.value.outcomes[0], moontide.InvalidArgument)
    assert caught.value.outcomes[1] == 1


WRONG_KEYS = [3, None, 1.5, bytearray(b"k"), memoryview(b"k"), ["k"], object()]


@pytest.mark.parametrize("wrong", WRONG_KEYS, ids=lambda wrong: type(wrong).__name__)
def test_keys_of_wrong_type_are_rejected(caller, wrong):
    for call in (
        lambda: caller.put(wrong, b""),
        lambda: caller.put_from(wrong, [b""]),
        lambda: caller.put_tensor(wrong, b""),
        lambda: caller.get(wrong),
        lambda: caller.get_into(wrong, bytearray(1)),
        lambda: caller.get_view(wrong),
        lambda: caller.get_tensor(wrong),
        lambda: caller.exists(wrong),
        lambda: caller.remove(wrong),
        lambda: caller.touch(wrong),
        lambda: caller.batch_get([wrong]),
        lambda: caller.batch_put([wrong], [b""]),
        lambda: caller.batch_exists([wrong]),
        lambda: caller.batch_remove([wrong]),
    ):
        with pytest.raises(TypeError, match="a key is a str or bytes, not"):
            call()


@pytest.mark.parametrize("one", ["ab", b"ab"])
def test_batch_calls_reject_single_key(caller, one):
    for name in ("batch_get", "batch_exists", "batch_remove", "batch_touch", "prefetch"):
        with pytest.raises(TypeError, match="a list of keys is expected"):
            getattr(caller, name)(one)
    with pytest.raises(TypeError, match="a list of keys is expected"):
        caller.batch_put(one, [b"", b""])


def test_key_with_lone_surrogate_is_rejected(caller):
    with pytest.raises(UnicodeEncodeError):
        caller.get("\ud800")


WRONG_VALUES = ["text", None, 3, [1, 2], {}, object()]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda wrong: type(wrong).__name__)
def test_values_of_wrong_type_are_rejected(caller, key, wrong):
    expected = "bytes, a buffer or an array is expected, not"
    for call in (
        lambda: caller.put(key("a"), wrong),
        lambda: caller.put_from(key("a"), [b"", wrong]),
        lambda: caller.batch_put([key("a")], [wrong]),
        lambda: caller.batch_get_into([key("a")], [[wrong]]),
        lambda: caller.get_into(key("a"), [bytearray(1), wrong]),
    ):
        with pytest.raises(TypeError, match=expected):
            call()
    assert not caller.exists(key("a"))


def test_lists_of_unequal_length_are_rejected(caller):
    with pytest.raises(ValueError, match="1 keys, but 2 values"):
        caller.batch_put(["a"], [b"", b""])
    with pytest.raises(ValueError, match="2 keys, but 1 buffers"):
        caller.batch_get_into(["a", "b"], [bytearray(1)])


@pytest.mark.parametrize("wrong", ["", "k" * 4097, b""], ids=["empty", "long", "empty bytes"])
def test_empty_and_too_long_keys_are_rejected(caller, wrong):
    with pytest.raises(moontide.InvalidArgument, match="key (is|has)"):
        caller.put(wrong, b"")
    with pytest.raises(moontide.InvalidArgument, match="key (is|has)"):
        caller.get(wrong)


def test_key_of_maximum_length_is_accepted(caller, key):
    longest = key().ljust(4096, "k")
    assert caller.put(longest, b"1")
    assert caller.get(longest) == b"1"


WRONG_OPTIONS = [
    ({"replicas": 0}, ValueError, "replicas must be 1 to 8"),
    ({"replicas": 9}, ValueError, "replicas must be 1 to 8"),
    ({"replicas": 2, "replicas_min": 3}, ValueError, "replicas_min"),
    ({"replicas_min": 0}, ValueError, "replicas_min"),
    ({"disk_replicas": 2}, ValueError, "disk_replicas must be 0 to the number of replicas"),
    ({"disk_replicas": -1}, ValueError, "disk_replicas"),
    ({"stripes": 0}, ValueError, "stripes"),
    ({"stripes": 1025}, ValueError, "stripes"),
    ({"ttl": -1}, ValueError, "ttl must be a number of seconds"),
    ({"ttl": float("nan")}, ValueError, "ttl must be a number of seconds"),
    ({"ttl": float("inf")}, ValueError, "ttl must be a number of seconds"),
    ({"ttl": "soon"}, TypeError, "."),
    ({"pin": "iron"}, ValueError, "pin must be"),
    ({"cohort": b"c" * 65}, ValueError, "cohort"),
    ({"cohort": b""}, ValueError, "cohort"),
    ({"cohort": 3}, TypeError, "."),
    ({"prefer": ["127.0.0.1:7500"]}, ValueError, "prefer: .* is not a place"),
    ({"prefer": ["0" * 16] * 9}, ValueError, "prefer must be at most 8 places"),
    ({"prefer": "0" * 16}, TypeError, "."),
    ({"prefer": [7]}, TypeError, "."),
    ({"spread": "row"}, ValueError, "spread must be"),
    ({"spread": 1}, TypeError, "."),
    ({"color": "blue"}, TypeError, "color"),
    ({"options": {"ttl": 1}}, TypeError, "PutOptions"),
    ({"options": moontide.PutOptions(), "ttl": 1}, TypeError, "not both"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG_OPTIONS, ids=lambda value: str(value)[:24])
def test_invalid_put_options_are_rejected(caller, key, options, kind, text):
    for call in (
        lambda: caller.put(key("a"), b"", **options),
        lambda: caller.put_from(key("a"), [b""], **options),
    ):
        with pytest.raises(kind, match=text):
            call()
    with pytest.raises((kind, moontide.BatchError), match=text):
        caller.batch_put([key("a")], [b""], **options)
    assert not caller.exists(key("a"))


def test_all_put_options_are_accepted(caller, store, key):
    options = moontide.PutOptions(
        replicas=2,
        replicas_min=1,
        disk_replicas=2,
        stripes=1,
        overwrite=True,
        ttl=60,
        pin="soft",
        cohort="c",
        spread=None,
        prefer=["0" * 16],
        prefer_local=False,
    )
    assert caller.put(key("a"), b"1", options)
    assert caller.put_from(key("b"), [b"1"], options)
    assert caller.batch_put([key("c")], [b"1"], options) == [True]
    for name in "abc":
        found = store.stat(key(name))
        assert found["pin"] == "soft"
        assert found["expires"] == pytest.approx(time.time() + 60, abs=10)
        assert len(found["locations"]) == 2


def test_put_options_have_repr_and_equality():
    options = moontide.PutOptions(replicas=2, disk_replicas=1, ttl=1.5, pin="hard", spread="zone", prefer=["0123456789abcdef/7", "f" * 16])
    assert eval(repr(options), {"PutOptions": moontide.PutOptions}) == options
    assert options != moontide.PutOptions(replicas=2)
    assert moontide.PutOptions(cohort="a") == moontide.PutOptions(cohort=b"a")


def test_object_expires_after_ttl(caller, key):
    assert caller.put(key("a"), b"1", ttl=0.3)
    assert caller.get(key("a")) == b"1"
    ends = time.monotonic() + 10
    while caller.get(key("a")) is not None:
        assert time.monotonic() < ends, "the object has not expired"
        time.sleep(0.05)
    assert not caller.exists(key("a"))
    assert caller.put(key("a"), b"2")
    assert caller.get(key("a")) == b"2"


def test_replicas_are_on_different_nodes(caller, store, key):
    assert caller.put(key("a"), b"twice", replicas=2, replicas_min=2)
    locations = store.stat(key("a"))["locations"]
    assert len({location["node"] for location in locations}) == 2
    assert {location["replica"] for location in locations} == {0, 1}


def test_preferred_nodes_hold_the_replicas_in_order(caller, store, key):
    nodes = [node["node"] for node in store.nodes()]
    for number, node in enumerate(nodes * 3):
        assert caller.put(key(f"a{number}"), b"there", prefer=[node])
        assert [location["node"] for location in store.stat(key(f"a{number}"))["locations"]] == [node]
    for number, order in enumerate([nodes, nodes[::-1]]):
        # The first node does not exist.
        assert caller.put(key(f"b{number}"), b"there", replicas=2, prefer=["0" * 16, *order])
        assert [location["node"] for location in store.stat(key(f"b{number}"))["locations"]] == order[:2]


def test_preferred_segment_holds_the_object(own_cluster):
    # A segment has objects of one group, and a cluster of one group has one segment in each node.
    cluster = own_cluster(nodes=2)
    with moontide.Store(cluster.master) as store:
        for number, node in enumerate([node["node"] for node in store.nodes()] * 2):
            assert store.put(f"a{number}", b"there", prefer=[f"{node}/7", f"{node}/0"], prefer_local=False)
            assert [location["node"] for location in store.stat(f"a{number}")["locations"]] == [node]


def test_spread_places_replicas_apart_or_not_at_all(caller, store, key):
    # All nodes of the cluster are on this host, and have no other labels: these are equal to nothing, but a host is in
    # one rack.
    for spread in ("host", "rack", "zone"):
        assert caller.put(key(spread), b"apart", replicas=2, spread=spread)
        assert len(store.stat(key(spread))["locations"]) == 1
        with pytest.raises(moontide.NoSpace, match=f"different {spread}s"):
            caller.put(key("all"), b"apart", replicas=2, replicas_min=2, spread=spread)
        assert not caller.exists(key("all"))


def test_put_fails_when_nodes_are_fewer_than_replicas_min(own_cluster):
    cluster = own_cluster(nodes=1)
    with moontide.Store(cluster.master, timeout=1) as store:
        assert store.put("fewer", b"1", replicas=2)
        with pytest.raises(moontide.NoSpace, match="2 nodes") as caught:
            store.put("all", b"1", replicas=2, replicas_min=2)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.retryable


def test_hard_pinned_object_is_removed_only_by_force(caller, key):
    assert caller.put(key("a"), b"1", pin="hard")
    with pytest.raises(moontide.Leased, match="force"):
        caller.remove(key("a"))
    assert caller.exists(key("a"))
    with pytest.raises(moontide.BatchError):
        caller.batch_remove([key("a")])
    assert caller.batch_remove([key("a")], force=True) == [True]
    assert not caller.exists(key("a"))


def test_stat_reports_size_and_location(either, key):
    either.put(key("a"), b"123")
    found = either.stat(key("a"))
    (location,) = found.pop("locations")
    assert found.pop("version") > 0
    assert found == {"size": 3, "pin": "none", "writing": False, "expires": None}
    assert location["node"] in {node["node"] for node in either.nodes()}
    fields = [location[name] for name in ("medium", "replica", "offset", "size")]
    assert fields == ["memory", 0, 0, 3]


def test_nodes_are_listed(either):
    nodes = either.nodes()
    assert len(nodes) == 2
    assert all(any(engine == "tcp" for engine, _ in node["addresses"]) for node in nodes)


def test_keys_are_listed_by_prefix(either, key):
    names = [key(f"{number:04}") for number in range(2500)]
    either.batch_put(names, [b""] * len(names))
    assert sorted(either.keys(key())) == [name.encode() for name in names]
    assert either.keys(key("000").encode()) != []
    assert either.keys(key("none")) == []
    assert set(either.keys(key("001"))) <= set(either.keys())


def test_stats_count_hits_misses_and_puts(cluster, key):
    with moontide.Store(cluster.master) as store:
        store.put(key("a"), b"123")
        store.put(key("a"), b"123")
        store.get(key("a"))
        store.get(key("b"))
        store.get_into(key("a"), bytearray(3))
        store.batch_get([key("a"), key("b")])
        view = store.get_view(key("a"))
        counted = store.stats()
    assert bytes(view) == b"123"
    assert counted["gets"] == 6
    hits = counted["hits_local"] + counted["hits_remote"] + counted["hits_disk"]
    assert counted["gets"] == hits + counted["misses"] + counted["gets_failed"]
    assert counted["misses"] == 2
    assert (counted["puts"], counted["puts_already_existed"]) == (2, 1)


def test_tenants_are_isolated(cluster, store, key):
    with moontide.Store(cluster.master, tenant="another") as other:
        store.put(key("a"), b"mine")
        assert other.get(key("a")) is None
        assert other.put(key("a"), b"theirs")
        assert store.get(key("a")) == b"mine"
        assert other.remove_all() == 1
        assert other.keys() == []
        assert store.get(key("a")) == b"mine"


def test_bulk_removals_return_counts_and_keep_hard_pins(caller, key):
    for name in ("a/1", "a/2", "b/1"):
        caller.put(key(name), b"x")
    caller.put(key("a/3"), b"x", pin="hard")
    assert caller.remove_by_prefix(key("a/")) == 2
    assert caller.get(key("a/3")) == b"x"
    assert caller.remove_by_prefix(key("a/"), force=True) == 1
    assert caller.get(key("b/1")) == b"x"
    assert caller.remove_by_regex("^" + re.escape(key("")) + "b/[0-9]$") == 1
    assert caller.get(key("b/1")) is None
    with pytest.raises(ValueError):
        caller.remove_by_regex("(")


def test_remove_all_returns_count_and_keeps_hard_pins(cluster):
    with moontide.Store(cluster.master, tenant="cleaner") as store:
        assert store.remove_all() == 0
        store.batch_put(["a", "b", "c"], [b"1"] * 3)
        assert store.remove_all() == 3
        store.put("pinned", b"1", pin="hard")
        assert store.remove_all() == 0
        assert store.keys() == [b"pinned"]
        assert store.get("pinned") == b"1"
        assert store.remove_all(force=True) == 1
        assert store.get("pinned") is None
        assert store.keys() == []


@pytest.mark.smoke
def test_store_behaves_like_a_mapping(either, key):
    either[key("a")] = b"one"
    assert either[key("a")] == b"one"
    assert key("a") in either
    either[key("a")] = bytearray(b"two")
    assert either[key("a")] == b"two"
    either[key("a")] = memoryview(b"three")
    assert either[key("a")] == b"three"
    either[key("a")] = np.arange(3, dtype="u2")
    assert either[key("a")].numpy().tolist() == [0, 1, 2]
    del either[key("a")]
    assert key("a") not in either
    with pytest.raises(TypeError, match="encode"):
        either[key("a")] = "text"


WRONG_SETTINGS = [
    ({"timeout": 0}, ValueError, "timeout"),
    ({"timeout": -1}, ValueError, "timeout"),
    ({"timeout": 601}, ValueError, "timeout"),
    ({"connect_timeout": 0}, ValueError, "connect"),
    ({"connections_per_node": 0}, ValueError, "connections"),
    ({"connections_per_node": 17}, ValueError, "connections"),
    ({"tenant": ""}, ValueError, "tenant"),
    ({"color": 1}, TypeError, "color"),
    ({"shm": "yes"}, TypeError, "."),
    ({"timeout": "soon"}, ValueError, "timeout"),
    ({"hedge": "maybe"}, ValueError, "hedge"),
    ({"connections_per_node": 1.5}, TypeError, "connections"),
]


@pytest.mark.parametrize(("settings", "kind", "text"), WRONG_SETTINGS, ids=lambda value: str(value)[:24])
def test_invalid_store_settings_are_rejected(cluster, settings, kind, text):
    with pytest.raises(kind, match=text):
        moontide.Store(cluster.master, **settings)
    with pytest.raises(kind, match=text):
        moontide.Store.connect(cluster.master, **settings)


def test_all_store_settings_are_accepted(cluster, key):
    settings = {
        "tenant": "default",
        "timeout": 2.5,
        "connect_timeout": 1.0,
        "shm": True,
        "verify_shm": False,
        "connections_per_node": 4,
        "hedge": False,
        "location_cache_entries": 16,
        "rack": "r1",
        "zone": "z1",
    }
    with moontide.Store.connect(cluster.master, **settings) as store:
        assert store.put(key("a"), b"1")
        assert store.get(key("a")) == b"1"
        assert store.master == cluster.master
        assert repr(store) == f"<moontide.Store of {cluster.master}>"
    assert store.closed
    assert repr(store) == f"<moontide.Store of {cluster.master}, closed>"


def test_store_settings_accept_units_and_come_from_environment(cluster, key, monkeypatch):
    with moontide.Store(cluster.master, timeout="2500ms", connect_timeout="1s", hedge="20ms") as store:
        assert store.put(key("a"), b"1")
    monkeypatch.setenv("MOONTIDE_CLIENT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MOONTIDE_CLIENT_TIMEOUT"):
        moontide.Store(cluster.master)


def test_calls_after_close_raise_closed(cluster, key):
    store = moontide.Store(cluster.master)
    store.close()
    store.close()
    for call in (
        lambda: store.put(key("a"), b""),
        lambda: store.put_from(key("a"), [b""]),
        lambda: store.put_tensor(key("a"), np.zeros(1)),
        lambda: store.get(key("a")),
        lambda: store.get_into(key("a"), bytearray(1)),
        lambda: store.get_view(key("a")),
        lambda: store.get_tensor(key("a")),
        lambda: store.exists(key("a")),
        lambda: store.remove(key("a")),
        lambda: store.touch(key("a")),
        lambda: store.prefetch([key("a")]),
        lambda: store.batch_put([key("a")], [b""]),
        lambda: store.batch_get([key("a")]),
        lambda: store.batch_get_into([key("a")], [bytearray(1)]),
        lambda: store.batch_get_view([key("a")]),
        lambda: store.batch_exists([key("a")]),
        lambda: store.batch_remove([key("a")]),
        lambda: store.batch_touch([key("a")]),
        lambda: store.keys(),
        lambda: store.stat(key("a")),
        lambda: store.nodes(),
        lambda: store.stats(),
        lambda: store.remove_all(),
        lambda: store[key("a")],
        lambda: key("a") in store,
    ):
        with pytest.raises(moontide.Closed, match="the store is closed"):
            call()


def test_drained_node_is_empty_and_nothing_is_lost(own_cluster):
    with moontide.Store(own_cluster(nodes=2).master) as store:
        values = {f"drained/{n}": bytes([n]) * 50_000 for n in range(40)}
        store.batch_put(list(values), list(values.values()))
        node = store.stat("drained/0")["locations"][0]["node"]
        store.drain_node(node)
        deadline = time.monotonic() + 30
        while not (progress := store.drain_progress(node))["empty"]:
            assert time.monotonic() < deadline, progress
            time.sleep(0.05)
        assert progress["bytes_left"] == 0 and progress["segments"] == progress["segments_draining"] > 0
        assert {info["node"]: info["draining"] for info in store.nodes()}[node]
        assert store.batch_get(list(values)) == list(values.values())
        assert all(place["node"] != node for key in values for place in store.stat(key)["locations"])
        store.undrain_node(node)
        with pytest.raises(moontide.Error):
            store.drain_node("0000000000000123")
        with pytest.raises(ValueError, match="16 hexadecimal"):
            store.drain_node("here")


def test_set_pin_changes_the_class(caller, either, key):
    names = [key("a"), key("b"), key("nothing")]
    assert caller.batch_put(names[:2], [b"1", b"2"]) == [True, True]
    assert caller.set_pin(names[0], "hard") is True
    assert caller.batch_set_pin(names, "soft") == [True, True, False]
    with pytest.raises(moontide.InvalidArgument, match="pin must be"):
        caller.set_pin(names[0], "very")
    assert [stat and stat["pin"] for stat in either.batch_stat(names)] == ["soft", "soft", None]


def test_operators_calls():
    with moontide.dev(64 << 20) as dev, dev.store() as store, dev.store(tenant="team") as team:
        store.set_tenant_quota("team", objects_max=5)
        for number in range(20):
            team.put(f"{number}", bytes(1000))
        store.put("pinned", b"x", pin="hard")
        by_name = {tenant["tenant"]: tenant for tenant in store.tenants()}
        assert by_name["team"]["objects"] <= 5
        assert by_name["team"]["objects_max"] == 5 and by_name["team"]["bytes_max"] == 0
        node = store.nodes()[0]["node"]
        segments = store.segments()
        assert segments == store.segments(node) and store.segments("0000000000000001") == []
        assert {segment["state"] for segment in segments} == {"serving"}
        assert sum(segment["live_bytes"] for segment in segments) > 0
        assert store.evict(0.0)["objects"] == by_name["team"]["objects"]
        assert team.keys() == [] and store.keys() == [b"pinned"]
        for share in (-0.1, 1.1, float("nan")):
            with pytest.raises(moontide.InvalidArgument, match=r"0\.0 to 1\.0"):
                store.evict(share)
        store.drain_segment(node, segments[0]["segment"], evict=True)
        assert "draining" in {segment["state"] for segment in store.segments(node)}
        with pytest.raises(moontide.NotFound):
            store.drain_segment(node, 4000)
