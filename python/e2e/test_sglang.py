"""SGLang with ``MoontideHiCache``: each of its methods with SGLang's own pools, and the engine itself.

Copies between "device" and "host" are those of ``shim``, in plain torch: there is no GPU. All else is SGLang's own.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import Lines, prompt, wait_for_keys
from support import Cluster, Server, free_port, spoil

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

PAGE = 16
PAGES = len(prompt(1)) // PAGE
EXTRA = {"backend_name": "moontide", "module_path": "moontide.sglang", "class_name": "MoontideHiCache"}
NAMES = [f"{number:064x}" for number in range(6)]

# ---------------------------------------------------------------------------------------------------------- the class


def host_pool(layout: str = "page_first", heads: int = 2, dtype: Any = None) -> Any:
    """SGLang's pool of host memory for a model with two layers."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(
        size=256,
        page_size=PAGE,
        dtype=dtype or torch.float16,
        head_num=heads,
        head_dim=64,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=256,
        start_layer=0,
        end_layer=2,
    )
    pool.kv_buffer.normal_()
    return pool


def latent_pool() -> Any:
    """The same for a model with one latent vector for each token (MLA)."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=256,
        page_size=PAGE,
        dtype=torch.float16,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        2.0,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=256,
        start_layer=0,
        end_layer=2,
        target_layer_num=2,
    )
    pool.kv_buffer.normal_()
    return pool


def state_pool() -> Any:
    """The pool of states of a hybrid model: one slot for a page."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(temporal=torch.zeros(2, 8, 4, 8), conv=(torch.zeros(2, 8, 16, 3),))
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    pool.temporal_buffer.normal_()
    for buffer in pool.conv_buffer:
        buffer.normal_()
    return pool


def page_bytes(pool: Any, indices: Any) -> bytes:
    """What a pool has in these slots, as it says itself where that is."""
    import ctypes

    return b"".join(map(ctypes.string_at, *pool.get_page_buffer_meta(indices)))


Backend = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for tests that do it no harm."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"))
    yield cluster
    cluster.end()


_numbers = itertools.count()


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Makes backends as SGLang does; those of a test share a namespace."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    made: list[Any] = []
    namespace = f"test {next(_numbers)}"

    def make(cluster: Cluster, pool: Any, extra: dict[str, Any] | None = None, **changed: Any) -> Any:
        facts: dict[str, Any] = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": True,
            "model_name": "org/model",
        }
        ours = {"interface_v1": 1, "master": cluster.master, "namespace": namespace}
        config = HiCacheStorageConfig(**(facts | changed), extra_config=EXTRA | ours | (extra or {}))
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage

    yield make
    for storage in made:
        storage.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
def test_pages_come_back_in_other_places(shared: Cluster, backend: Backend, layout: str) -> None:
    pool = host_pool(layout)
    storage = backend(shared, pool)
    here, there = pool.alloc(4 * PAGE), pool.alloc(4 * PAGE)
    assert storage.batch_exists(NAMES) == 0
    assert storage.batch_set_v1(NAMES[:4], here) == [True] * 4
    assert storage.batch_exists(NAMES) == 4
    assert page_bytes(pool, there) != page_bytes(pool, here)
    assert storage.batch_get_v1(NAMES[:4], there) == [True] * 4
    assert page_bytes(pool, there) == page_bytes(pool, here)
    # One object for a page, with all of its keys and values.
    assert storage.counts.saved == storage.counts.loaded == 4
    assert storage.counts.loaded_bytes == 4 * 2 * 2 * PAGE * 2 * 64 * 2


def test_pages_that_are_not_there_are_said_one_by_one(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1([NAMES[0], NAMES[2]], pool.alloc(2 * PAGE))
    assert storage.batch_exists(NAMES[:3]) == 1
    assert storage.batch_get_v1(NAMES[:3], pool.alloc(3 * PAGE)) == [True, False, True]
    # Saved again, it is there as well.
    assert storage.batch_set_v1(NAMES[:3], pool.alloc(3 * PAGE)) == [True] * 3
    assert storage.batch_exists(NAMES) == 3
    assert storage.batch_exists([]) == 0 and storage.batch_get_v1([], pool.alloc(0)) == []


def test_a_spoilt_page_is_not_loaded_and_can_be_saved_anew(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool)
    here, there = pool.alloc(3 * PAGE), pool.alloc(3 * PAGE)
    storage.batch_set_v1(NAMES[:3], here)
    assert spoil(cluster.nodes[0], page_bytes(pool, here[PAGE : 2 * PAGE])) == 1
    assert storage.batch_exists(NAMES) == 3
    assert storage.batch_get_v1(NAMES[:3], there) == [True, False, True]
    assert storage.batch_exists(NAMES) == 1
    assert storage.batch_set_v1(NAMES[:3], here) == [True] * 3
    assert storage.batch_get_v1(NAMES[:3], there) == [True] * 3
    assert page_bytes(pool, there) == page_bytes(pool, here)


def test_copies_of_pages(shared: Cluster, backend: Backend) -> None:
    """The interface without places: ``interface_v1`` is not set."""
    pool = host_pool()
    storage = backend(shared, pool, {"interface_v1": 0})
    pages = [pool.get_data_page(int(index)) for index in pool.alloc(3 * PAGE)[::PAGE]]
    assert not storage.exists(NAMES[0]) and storage.get(NAMES[0]) is None
    assert storage.set(NAMES[0], pages[0]) and storage.exists(NAMES[0])
    assert storage.batch_set(NAMES[1:3], pages[1:])
    assert storage.batch_exists(NAMES) == 3
    target = pool.get_dummy_flat_data_page()
    assert storage.get(NAMES[0], target) is target and torch.equal(target, pages[0].flatten())
    found = storage.batch_get(NAMES[:4], [pool.get_dummy_flat_data_page() for _ in range(4)])
    assert found[3] is None
    assert all(torch.equal(one, page.flatten()) for one, page in zip(found[:3], pages, strict=True))
    # The same page handed over in place is another object: its bytes may lie otherwise.
    assert backend(shared, pool).batch_exists(NAMES) == 0


def test_a_folder_with_other_weights_is_another_model(shared: Cluster, backend: Backend, tmp_path: Path) -> None:
    pool = host_pool()
    folders = [tmp_path / place / "model" for place in ("one", "two", "three")]
    for folder, weights in zip(folders, (b"1", b"1", b"2"), strict=True):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
    one, two, three = (backend(shared, pool, model_name=str(folder)) for folder in folders)
    one.batch_set_v1(NAMES[:1], pool.alloc(PAGE))
    assert two.batch_exists(NAMES[:1]) == 1 and three.batch_exists(NAMES[:1]) == 0


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"model_name": "org/other"}, {}),
    "revision": ({}, {"revision": "2"}),
    "namespace": ({}, {"namespace": "other"}),
    "tenant": ({}, {"tenant": "other"}),
    "tp size": ({"tp_size": 2}, {}),
    "tp rank": ({"tp_size": 2, "tp_rank": 1}, {}),
    "pp size": ({"pp_size": 2}, {}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_engines_that_differ_do_not_share(shared: Cluster, backend: Backend, what: str) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE))
    changed, extra = DIFFERENT[what]
    other = backend(shared, pool, extra, **changed)
    assert other.batch_exists(NAMES[:1]) == 0
    assert other.batch_get_v1(NAMES[:1], pool.alloc(PAGE)) == [False]
    assert backend(shared, host_pool()).batch_exists(NAMES[:1]) == 1


@pytest.mark.parametrize("other", [{"dtype": torch.bfloat16}, {"heads": 4}, {"layout": "page_head"}])
def test_pools_that_differ_do_not_share(shared: Cluster, backend: Backend, other: dict[str, Any]) -> None:
    pool = host_pool()
    backend(shared, pool).batch_set_v1(NAMES[:1], pool.alloc(PAGE))
    assert backend(shared, host_pool(**other)).batch_exists(NAMES[:1]) == 0


def test_ranks_share_what_is_equal_on_all_of_them(shared: Cluster, backend: Backend) -> None:
    """MLA: the first rank writes, all read, whatever their number."""
    pool = latent_pool()
    writer = backend(shared, pool, is_mla_model=True, tp_size=2)
    here, there = pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    assert writer.batch_set_v1(NAMES[:2], here) == [True] * 2
    reader = backend(shared, pool, is_mla_model=True, tp_size=4, tp_rank=3)
    assert reader.batch_exists(NAMES) == 2
    assert reader.batch_get_v1(NAMES[:2], there) == [True] * 2
    assert page_bytes(pool, here) == page_bytes(pool, there)


def test_engines_with_other_numbers_of_ranks_share_heads(shared: Cluster, backend: Backend) -> None:
    """``tp_lcm_size``: one rank with four heads writes, the second of two ranks reads its two."""
    whole, half = host_pool("page_head", heads=4), host_pool("page_head", heads=2)
    writer = backend(shared, whole, tp_lcm_size=2, should_split_heads=True)
    reader = backend(shared, half, tp_lcm_size=2, tp_size=2, tp_rank=1)
    here, there = whole.alloc(2 * PAGE), half.alloc(2 * PAGE)
    assert writer.batch_set_v1(NAMES[:2], here) == [True] * 2
    assert writer.batch_exists(NAMES) == reader.batch_exists(NAMES) == 2
    assert reader.batch_get_v1(NAMES[:2], there) == [True] * 2
    # [keys or values, page, head, slot, layer, number]
    expected = whole.kv_buffer[:, here[::PAGE] // PAGE][:, :, 2:]
    assert torch.equal(half.kv_buffer[:, there[::PAGE] // PAGE], expected)


def test_several_pools_at_once(shared: Cluster, backend: Backend) -> None:
    """v2: keys and values, a window beside them, and states at the ends of pages 2 and 4 only."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pool, window, states = host_pool(), host_pool(heads=4), state_pool()
    storage = backend(shared, pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    here = window.alloc(4 * PAGE)
    at = states.alloc(2)
    storage.batch_set_v1(NAMES[:5], pool.alloc(5 * PAGE))
    saved = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.SWA, host_indices=here, keys=NAMES[:4]),
            PoolTransfer(PoolName.MAMBA, host_indices=at, keys=[NAMES[1], NAMES[3]]),
        ]
    )
    assert saved == {PoolName.SWA: [True] * 4, PoolName.MAMBA: [True] * 2}

    every = PoolTransfer(PoolName.SWA, keys=NAMES)
    last = PoolTransfer(PoolName.MAMBA, keys=NAMES[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(NAMES, [every, last])
    assert found.kv_hit_pages == 4 and found.restorable_prefix_pages == [2, 4]
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 4, PoolName.MAMBA: 4}
    assert storage.batch_exists_v2(NAMES[:3], [every, last]).restorable_prefix_pages == [2]
    assert storage.batch_exists_v2(NAMES, [every]).kv_hit_pages == 4
    assert storage.batch_exists_v2(NAMES[5:], [every, last]).kv_hit_pages == 0

    there, then = window.alloc(4 * PAGE), states.alloc(2)
    came = storage.batch_get_v2(
        [
            PoolTransfer(PoolName.SWA, host_indices=there, keys=NAMES[:4]),
            PoolTransfer(PoolName.MAMBA, host_indices=then, keys=[NAMES[3], NAMES[0]]),
        ]
    )
    assert came == {PoolName.SWA: [True] * 4, PoolName.MAMBA: [True, False]}
    assert page_bytes(window, there) == page_bytes(window, here)
    assert page_bytes(states, then[:1]) == page_bytes(states, at[1:])


def test_clear_leaves_others_alone(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage, other = backend(shared, pool), backend(shared, pool, model_name="org/other")
    for each in (storage, other):
        assert each.batch_set_v1(NAMES, pool.alloc(len(NAMES) * PAGE)) == [True] * len(NAMES)
    assert storage.clear()
    assert storage.batch_exists(NAMES) == 0 and other.batch_exists(NAMES) == len(NAMES)


def test_stats_are_those_of_sglang(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1(NAMES[:3], pool.alloc(3 * PAGE))
    storage.batch_get_v1(NAMES[:2], pool.alloc(2 * PAGE))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().backup_pgs == []


@pytest.mark.parametrize(
    "wrong", [{"mastre": "a:1"}, {"replicas": 0}, {"replicas": 1.5}, {"deadline_s": "soon"}, {"tenant": 1}]
)
def test_what_makes_no_sense_is_refused_by_name(shared: Cluster, backend: Backend, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        backend(shared, host_pool(), wrong)


def all_calls(storage: Any, pool: Any) -> dict[str, Callable[[], Any]]:
    """Each call, and what it answers for false."""
    places = pool.alloc(2 * PAGE)
    return {
        "batch_exists": lambda: storage.batch_exists(NAMES[:2]) == 0,
        "exists": lambda: storage.exists(NAMES[0]) is False,
        "batch_get_v1": lambda: storage.batch_get_v1(NAMES[:2], places) == [False] * 2,
        "batch_set_v1": lambda: storage.batch_set_v1(NAMES[:2], places) == [False] * 2,
        "get": lambda: storage.get(NAMES[0], pool.get_dummy_flat_data_page()) is None,
        "set": lambda: storage.set(NAMES[0], pool.get_data_page(int(places[0]))) is False,
        "clear": lambda: storage.clear() is False,
    }


def test_a_store_that_is_away_costs_nothing(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool, {"pause_s": 60})
    assert storage.batch_set_v1(NAMES[:2], pool.alloc(2 * PAGE)) == [True] * 2
    for server in cluster.servers:
        server.process.kill()
        server.process.wait(10)
    calls = all_calls(storage, pool)
    began = time.monotonic()
    # Not by a get: memory of a dead node that is mapped already can still be read, and has its digest.
    assert calls["batch_set_v1"]() and calls["batch_exists"]()
    print(f"noticed after {time.monotonic() - began:.3f} s")
    assert time.monotonic() - began < 6
    for name, call in calls.items():
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert call(), name
            times.append(time.monotonic() - began)
        print(f"{name}: {sorted(times)[10] * 1e6:.0f} µs")
        assert sorted(times)[10] < 1e-3, name


def test_a_store_that_comes_later_is_found(tmp_path: Path, backend: Backend) -> None:
    """The engine starts without it, and no request waits for a connection."""
    pool, port = host_pool(), free_port()

    class Nowhere:
        master = f"127.0.0.1:{port}"

    storage = backend(Nowhere, pool, {"pause_s": 0.2})
    began = time.monotonic()
    assert storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE)) == [False] and storage.batch_exists(NAMES) == 0
    assert time.monotonic() - began < 1e-2
    listens = ["--grpc-listen", f"127.0.0.1:{port}", "--frame-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    servers = [Server(tmp_path, "master", ["master", *listens], "admin")]
    servers.append(Server(tmp_path, "node", ["node", "--master", Nowhere.master, "--memory-bytes", "64MiB"], "ready"))
    until = time.monotonic() + 20
    while storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE)) == [False] and time.monotonic() < until:
        time.sleep(0.1)
    assert storage.batch_exists(NAMES) == 1
    for server in reversed(servers):
        server.end()


def test_a_store_that_hangs_is_waited_for_once_and_not_long(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool, {"pause_s": 0.5, "deadline_s": 1.0, "patience_ms": 200})
    places = pool.alloc(2 * PAGE)
    assert storage.batch_set_v1(NAMES[:2], places) == [True] * 2 and storage.batch_exists(NAMES) == 2
    for server in cluster.servers:
        server.signal(signal.SIGSTOP)
    calls = all_calls(storage, pool)
    for name, limit in (("batch_exists", 0.2), ("batch_set_v1", 1.0)):
        time.sleep(0.6)
        began = time.monotonic()
        call = (
            calls[name] if name == "batch_exists" else lambda: storage.batch_set_v1(NAMES[2:4], places) == [False] * 2
        )
        assert call(), name
        first = time.monotonic() - began
        began = time.monotonic()
        assert call(), name
        print(f"{name}: {first:.3f} s, then {(time.monotonic() - began) * 1e6:.0f} µs")
        assert first < limit + 1 and time.monotonic() - began < 0.1
    for server in cluster.servers:
        server.signal(signal.SIGCONT)
    until = time.monotonic() + 15
    while storage.batch_exists(NAMES) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert storage.batch_get_v1(NAMES[:2], places) == [True] * 2


# ---------------------------------------------------------------------------------------------------------- the engine


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same tokens, with the same certainty."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


def job(model: Path, cluster: Cluster | None, **extra: Any) -> dict[str, Any]:
    if cluster is None:
        return {"model": str(model)}
    ours = {"master": cluster.master, "interface_v1": 1, "prefetch_threshold": 16}
    return {"model": str(model), "backend": "dynamic", "extra": EXTRA | ours | extra}


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What SGLang answers without any store."""
    log = tmp_path_factory.mktemp("alone") / "alone.log"
    with Lines(log, "engine_sglang.py", job(model, None)) as engine:
        return {seed: engine.ask(prompt(seed)) for seed in range(1, 8)}


def loaded(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """It is right, and came from the store."""
    print(f"{answer['cached']} of {answer['prompt']} cached, from {answer['from']}, {answer['seconds']} s")
    same(answer, expected)
    assert answer["cached"] > 0.9 * answer["prompt"]
    assert answer["from"]["storage"] == answer["cached"]


def computed(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """It is right, in good time, and the store had no part in it."""
    print(f"{answer['cached']} of {answer['prompt']} cached, {answer['seconds']} s")
    same(answer, expected)
    assert answer["cached"] == 0
    assert answer["seconds"] < 15


def test_another_process_loads_what_one_has_saved_as_long_as_there_is_a_store(
    model: Path, cluster: Cluster, tmp_path: Path, expected: dict[int, dict[str, Any]]
) -> None:
    told = job(model, cluster)
    with cluster.store() as store, Lines(tmp_path / "save.log", "engine_sglang.py", told) as engine:
        for seed in (1, 2, 3, 4):
            same(engine.ask(prompt(seed)), expected[seed])
        assert wait_for_keys(store, "kv1/", 4 * PAGES) == 4 * PAGES
    with Lines(tmp_path / "load.log", "engine_sglang.py", told) as engine:
        loaded(engine.ask(prompt(1)), expected[1])
        computed(engine.ask(prompt(5)), expected[5])

        # In the middle of a request, as far as that can be had: it is on its way.
        engine.send(prompt(2))
        for server in cluster.servers:
            server.signal(signal.SIGSTOP)
        hit = engine.answer(30)
        print(f"stopped meanwhile: {hit['cached']} cached, {hit['seconds']} s")
        same(hit, expected[2])
        computed(engine.ask(prompt(6), 30), expected[6])
        for server in cluster.servers:
            server.signal(signal.SIGCONT)
        # It was left alone for a second.
        time.sleep(3)
        loaded(engine.ask(prompt(3)), expected[3])

        engine.send(prompt(4))
        for server in cluster.servers:
            server.signal(signal.SIGKILL)
        hit = engine.answer(30)
        print(f"killed meanwhile: {hit['cached']} cached, {hit['seconds']} s")
        same(hit, expected[4])
        computed(engine.ask(prompt(7), 30), expected[7])
