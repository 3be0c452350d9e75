"""SGLang with ``MoontideHiCache``: each method with SGLang's own pools, and the engine.

Copies between "device" and "host" use ``shim``, in plain torch, because there is no GPU. All other code is SGLang's.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, prompt, wait_for_keys
from support import Cluster, Server, free_port, corrupt

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

PAGE = 16
PAGES = len(prompt(1)) // PAGE
EXTRA = {"backend_name": "moontide", "module_path": "moontide.sglang", "class_name": "MoontideHiCache"}
NAMES = [f"{number:064x}" for number in range(6)]

# ------------------------------------------------------------------------------------------------------------ the class


def host_pool(layout: str = "page_first", heads: int = 2, dtype: Any = None) -> Any:
    """Returns SGLang's host memory pool for a model with two layers."""
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
    """Returns the pool for a model with one latent vector per token (MLA)."""
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
    """Returns the state pool of a hybrid model: one slot per page."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(temporal=torch.zeros(2, 8, 4, 8), conv=(torch.zeros(2, 8, 16, 3),))
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    pool.temporal_buffer.normal_()
    for buffer in pool.conv_buffer:
        buffer.normal_()
    return pool


def page_bytes(pool: Any, indices: Any) -> bytes:
    """Returns the bytes of slots of a pool, at the addresses that the pool reports."""
    import ctypes

    return b"".join(map(ctypes.string_at, *pool.get_page_buffer_meta(indices)))


Backend = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for tests that do not stop or corrupt it."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"))
    yield cluster
    cluster.end()


_numbers = itertools.count()


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Creates backends as SGLang does. The backends of a test share a namespace."""
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
def test_pages_round_trip_to_other_host_indices(shared: Cluster, backend: Backend, layout: str) -> None:
    pool = host_pool(layout)
    storage = backend(shared, pool)
    source, target = pool.alloc(4 * PAGE), pool.alloc(4 * PAGE)
    assert storage.batch_exists(NAMES) == 0
    assert storage.batch_set_v1(NAMES[:4], source) == [True] * 4
    assert storage.batch_exists(NAMES) == 4
    assert page_bytes(pool, target) != page_bytes(pool, source)
    assert storage.batch_get_v1(NAMES[:4], target) == [True] * 4
    assert page_bytes(pool, target) == page_bytes(pool, source)
    # One object per page, with all its keys and values.
    assert storage.counts.saved == storage.counts.loaded == 4
    assert storage.counts.loaded_bytes == 4 * 2 * 2 * PAGE * 2 * 64 * 2


def test_missing_pages_are_reported_per_page(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1([NAMES[0], NAMES[2]], pool.alloc(2 * PAGE))
    assert storage.batch_exists(NAMES[:3]) == 1
    assert storage.batch_get_v1(NAMES[:3], pool.alloc(3 * PAGE)) == [True, False, True]
    # After another save all pages exist.
    assert storage.batch_set_v1(NAMES[:3], pool.alloc(3 * PAGE)) == [True] * 3
    assert storage.batch_exists(NAMES) == 3
    assert storage.batch_exists([]) == 0 and storage.batch_get_v1([], pool.alloc(0)) == []


def test_corrupt_page_is_not_loaded_and_can_be_saved_again(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool)
    source, target = pool.alloc(3 * PAGE), pool.alloc(3 * PAGE)
    storage.batch_set_v1(NAMES[:3], source)
    assert corrupt(cluster.nodes[0], page_bytes(pool, source[PAGE : 2 * PAGE])) == 1
    assert storage.batch_exists(NAMES) == 3
    assert storage.batch_get_v1(NAMES[:3], target) == [True, False, True]
    assert storage.batch_exists(NAMES) == 1
    assert storage.batch_set_v1(NAMES[:3], source) == [True] * 3
    assert storage.batch_get_v1(NAMES[:3], target) == [True] * 3
    assert page_bytes(pool, target) == page_bytes(pool, source)


def test_pages_round_trip_without_interface_v1(shared: Cluster, backend: Backend) -> None:
    """Uses the interface without host indices: ``interface_v1`` is not set."""
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
    # The same page passed by location is another object: its layout may differ.
    assert backend(shared, pool).batch_exists(NAMES) == 0


def test_pages_are_shared_only_between_folders_with_equal_weights(
    shared: Cluster, backend: Backend, tmp_path: Path
) -> None:
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
def test_engines_with_different_settings_do_not_share_pages(shared: Cluster, backend: Backend, what: str) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE))
    changed, extra = DIFFERENT[what]
    other = backend(shared, pool, extra, **changed)
    assert other.batch_exists(NAMES[:1]) == 0
    assert other.batch_get_v1(NAMES[:1], pool.alloc(PAGE)) == [False]
    assert backend(shared, host_pool()).batch_exists(NAMES[:1]) == 1


@pytest.mark.parametrize("other", [{"dtype": torch.bfloat16}, {"heads": 4}, {"layout": "page_head"}])
def test_pools_of_other_dtype_heads_or_layout_do_not_share_pages(
    shared: Cluster, backend: Backend, other: dict[str, Any]
) -> None:
    pool = host_pool()
    backend(shared, pool).batch_set_v1(NAMES[:1], pool.alloc(PAGE))
    assert backend(shared, host_pool(**other)).batch_exists(NAMES[:1]) == 0


def test_mla_ranks_share_pages(shared: Cluster, backend: Backend) -> None:
    """MLA: the first rank writes, and all ranks read, independent of their number."""
    pool = latent_pool()
    writer = backend(shared, pool, is_mla_model=True, tp_size=2)
    source, target = pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    assert writer.batch_set_v1(NAMES[:2], source) == [True] * 2
    reader = backend(shared, pool, is_mla_model=True, tp_size=4, tp_rank=3)
    assert reader.batch_exists(NAMES) == 2
    assert reader.batch_get_v1(NAMES[:2], target) == [True] * 2
    assert page_bytes(pool, source) == page_bytes(pool, target)


def test_engines_with_different_tp_size_share_heads(shared: Cluster, backend: Backend) -> None:
    """``tp_lcm_size``: one rank with four heads writes, and the second of two ranks reads its two heads."""
    whole, half = host_pool("page_head", heads=4), host_pool("page_head", heads=2)
    writer = backend(shared, whole, tp_lcm_size=2, should_split_heads=True)
    reader = backend(shared, half, tp_lcm_size=2, tp_size=2, tp_rank=1)
    source, target = whole.alloc(2 * PAGE), half.alloc(2 * PAGE)
    assert writer.batch_set_v1(NAMES[:2], source) == [True] * 2
    assert writer.batch_exists(NAMES) == reader.batch_exists(NAMES) == 2
    assert reader.batch_get_v1(NAMES[:2], target) == [True] * 2
    # [keys or values, page, head, slot, layer, number]
    expected = whole.kv_buffer[:, source[::PAGE] // PAGE][:, :, 2:]
    assert torch.equal(half.kv_buffer[:, target[::PAGE] // PAGE], expected)


def test_v2_interface_transfers_several_pools(shared: Cluster, backend: Backend) -> None:
    """v2: keys and values, a window pool, and states at the ends of pages 2 and 4 only."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pool, window, states = host_pool(), host_pool(heads=4), state_pool()
    storage = backend(shared, pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    source = window.alloc(4 * PAGE)
    at = states.alloc(2)
    storage.batch_set_v1(NAMES[:5], pool.alloc(5 * PAGE))
    saved = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.SWA, host_indices=source, keys=NAMES[:4]),
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

    target, then = window.alloc(4 * PAGE), states.alloc(2)
    moved = storage.batch_get_v2(
        [
            PoolTransfer(PoolName.SWA, host_indices=target, keys=NAMES[:4]),
            PoolTransfer(PoolName.MAMBA, host_indices=then, keys=[NAMES[3], NAMES[0]]),
        ]
    )
    assert moved == {PoolName.SWA: [True] * 4, PoolName.MAMBA: [True, False]}
    assert page_bytes(window, target) == page_bytes(window, source)
    assert page_bytes(states, then[:1]) == page_bytes(states, at[1:])


def test_clear_removes_only_pages_of_its_model(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage, other = backend(shared, pool), backend(shared, pool, model_name="org/other")
    for each in (storage, other):
        assert each.batch_set_v1(NAMES, pool.alloc(len(NAMES) * PAGE)) == [True] * len(NAMES)
    assert storage.clear()
    assert storage.batch_exists(NAMES) == 0 and other.batch_exists(NAMES) == len(NAMES)


def test_stats_report_pages_and_bandwidth_since_last_call(shared: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(shared, pool)
    storage.batch_set_v1(NAMES[:3], pool.alloc(3 * PAGE))
    storage.batch_get_v1(NAMES[:2], pool.alloc(2 * PAGE))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().backup_pgs == []


@pytest.mark.parametrize(
    "wrong", [{"mastre": "a:1"}, {"replicas": 0}, {"replicas": 1.5}, {"transfer_timeout_s": "soon"}, {"tenant": 1}]
)
def test_invalid_setting_is_rejected_by_name(shared: Cluster, backend: Backend, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        backend(shared, host_pool(), wrong)


def all_calls(storage: Any, pool: Any) -> dict[str, Callable[[], Any]]:
    """Returns each call, with a check that it reports a miss or a failure."""
    indices = pool.alloc(2 * PAGE)
    return {
        "batch_exists": lambda: storage.batch_exists(NAMES[:2]) == 0,
        "exists": lambda: storage.exists(NAMES[0]) is False,
        "batch_get_v1": lambda: storage.batch_get_v1(NAMES[:2], indices) == [False] * 2,
        "batch_set_v1": lambda: storage.batch_set_v1(NAMES[:2], indices) == [False] * 2,
        "get": lambda: storage.get(NAMES[0], pool.get_dummy_flat_data_page()) is None,
        "set": lambda: storage.set(NAMES[0], pool.get_data_page(int(indices[0]))) is False,
        "clear": lambda: storage.clear() is False,
    }


def test_unavailable_store_fails_fast(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool, {"retry_after_s": 60})
    assert storage.batch_set_v1(NAMES[:2], pool.alloc(2 * PAGE)) == [True] * 2
    for server in cluster.servers:
        server.process.kill()
        server.process.wait(10)
    calls = all_calls(storage, pool)
    began = time.monotonic()
    # A get would succeed: the mapped memory of a dead node is still readable and matches its digests.
    assert calls["batch_set_v1"]() and calls["batch_exists"]()
    print(f"detected after {time.monotonic() - began:.3f} s")
    assert time.monotonic() - began < 6
    for name, call in calls.items():
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert call(), name
            times.append(time.monotonic() - began)
        print(f"{name}: {sorted(times)[10] * 1e6:.0f} µs")
        assert sorted(times)[10] < 1e-3, name


def test_backend_connects_when_store_starts_later(tmp_path: Path, backend: Backend) -> None:
    """The engine starts without the store, and no request waits for a connection."""
    pool, port = host_pool(), free_port()

    class LaterCluster:
        master = f"127.0.0.1:{port}"

    storage = backend(LaterCluster, pool, {"retry_after_s": 0.2})
    began = time.monotonic()
    assert storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE)) == [False] and storage.batch_exists(NAMES) == 0
    assert time.monotonic() - began < 1e-2
    listens = ["--grpc-listen", f"127.0.0.1:{port}", "--frame-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    servers = [Server(tmp_path, "master", ["master", *listens], "admin")]
    words = ["node", "--master", LaterCluster.master, "--memory-bytes", "64MiB"]
    servers.append(Server(tmp_path, "node", words, "ready"))
    deadline = time.monotonic() + 20
    while storage.batch_set_v1(NAMES[:1], pool.alloc(PAGE)) == [False] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert storage.batch_exists(NAMES) == 1
    for server in reversed(servers):
        server.end()


def test_hanging_store_times_out_once_then_fails_fast(cluster: Cluster, backend: Backend) -> None:
    pool = host_pool()
    storage = backend(cluster, pool, {"retry_after_s": 0.5, "transfer_timeout_s": 1.0, "lookup_timeout_ms": 200})
    indices = pool.alloc(2 * PAGE)
    assert storage.batch_set_v1(NAMES[:2], indices) == [True] * 2 and storage.batch_exists(NAMES) == 2
    for server in cluster.servers:
        server.signal(signal.SIGSTOP)
    calls = all_calls(storage, pool)
    for name, limit in (("batch_exists", 0.2), ("batch_set_v1", 1.0)):
        time.sleep(0.6)
        began = time.monotonic()
        call = (
            calls[name] if name == "batch_exists" else lambda: storage.batch_set_v1(NAMES[2:4], indices) == [False] * 2
        )
        assert call(), name
        first = time.monotonic() - began
        began = time.monotonic()
        assert call(), name
        print(f"{name}: {first:.3f} s, then {(time.monotonic() - began) * 1e6:.0f} µs")
        assert first < limit + 1 and time.monotonic() - began < 0.1
    for server in cluster.servers:
        server.signal(signal.SIGCONT)
    deadline = time.monotonic() + 15
    while storage.batch_exists(NAMES) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert storage.batch_get_v1(NAMES[:2], indices) == [True] * 2


# ----------------------------------------------------------------------------------------------------------- the engine


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares tokens and log probabilities."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


def job(model: Path, cluster: Cluster | None, **extra: Any) -> dict[str, Any]:
    if cluster is None:
        return {"model": str(model)}
    ours = {"master": cluster.master, "interface_v1": 1, "prefetch_threshold": 16}
    return {"model": str(model), "backend": "dynamic", "extra": EXTRA | ours | extra}


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Outputs of SGLang without a store."""
    log = tmp_path_factory.mktemp("alone") / "alone.log"
    with EngineProcess(log, "engine_sglang.py", job(model, None)) as engine:
        return {seed: engine.ask(prompt(seed)) for seed in range(1, 8)}


def loaded(output: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that an output is correct and that its prefix was loaded from the store."""
    print(f"{output['cached']} of {output['prompt']} cached, from {output['from']}, {output['seconds']} s")
    same(output, expected)
    assert output["cached"] > 0.9 * output["prompt"]
    assert output["from"]["storage"] == output["cached"]


def computed(output: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that an output is correct, arrived in time, and was computed without the store."""
    print(f"{output['cached']} of {output['prompt']} cached, {output['seconds']} s")
    same(output, expected)
    assert output["cached"] == 0
    assert output["seconds"] < 15


def test_engine_loads_saved_pages_and_computes_when_store_fails(
    model: Path, cluster: Cluster, tmp_path: Path, expected: dict[int, dict[str, Any]]
) -> None:
    settings = job(model, cluster)
    with cluster.store() as store, EngineProcess(tmp_path / "save.log", "engine_sglang.py", settings) as engine:
        for seed in (1, 2, 3, 4):
            same(engine.ask(prompt(seed)), expected[seed])
        assert wait_for_keys(store, "kv1/", 4 * PAGES) == 4 * PAGES
    with EngineProcess(tmp_path / "load.log", "engine_sglang.py", settings) as engine:
        loaded(engine.ask(prompt(1)), expected[1])
        computed(engine.ask(prompt(5)), expected[5])

        # Stops the store during a request.
        engine.send(prompt(2))
        for server in cluster.servers:
            server.signal(signal.SIGSTOP)
        hit = engine.receive(30)
        print(f"stopped meanwhile: {hit['cached']} cached, {hit['seconds']} s")
        same(hit, expected[2])
        computed(engine.ask(prompt(6), 30), expected[6])
        for server in cluster.servers:
            server.signal(signal.SIGCONT)
        # Longer than retry_after_s.
        time.sleep(3)
        loaded(engine.ask(prompt(3)), expected[3])

        engine.send(prompt(4))
        for server in cluster.servers:
            server.signal(signal.SIGKILL)
        hit = engine.receive(30)
        print(f"killed meanwhile: {hit['cached']} cached, {hit['seconds']} s")
        same(hit, expected[4])
        computed(engine.ask(prompt(7), 30), expected[7])
