"""vLLM with ``MoontideConnector``: a process loads blocks that another process computed."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_vllm import prompt
from support import Cluster, Run

PROMPT = [{"tokens": [[1, 468]]}]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares tokens and log probabilities."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


@pytest.mark.short
def test_engine_loads_blocks_saved_by_another_process(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    job = {"model": str(model), "store": cluster.settings, "rounds": [PROMPT]}
    expected = alone([PROMPT]).outputs[0][0]
    first = run_engine(job)
    second = run_engine(job)
    cold, warm = first.outputs[0][0], second.outputs[0][0]
    same(cold, expected)
    same(warm, expected)
    assert cold["cached"] == 0
    assert warm["cached"] > 0.9 * warm["prompt"]
    # "cached" counts blocks that the lookup found; the worker's counters show that they were loaded.
    counters = second.counters[0]
    print(f"cold {cold['ttft']} s, warm {warm['ttft']} s, {warm['cached']} of {warm['prompt']} cached; {counters}")
    assert counters["loaded_blocks"] == warm["cached"] // 32
    assert counters["loaded_bytes"] == warm["cached"] // 32 * 65536
    assert not counters.get("load_failures")


@pytest.mark.short
def test_cache_salt_isolates_tenants(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    def job(*salts: str) -> dict[str, Any]:
        rounds = [[PROMPT[0] | {"salt": salt}] for salt in salts]
        return {"model": str(model), "store": cluster.settings, "rounds": rounds}

    run_engine(job("alice"))
    second = run_engine(job("bob", "alice"))
    expected = alone([PROMPT]).outputs[0][0]
    (bob,), (alice,) = second.outputs
    same(bob, expected)
    same(alice, expected)
    assert bob["cached"] == 0
    assert alice["cached"] == 448
    assert second.counters[0].get("loaded_blocks", 0) == 0
    assert second.counters[1]["loaded_blocks"] == 14


# ------------------------------------------------------------------------------------------------------------ overheads


def connector_of(model: Path, master: str, **extra: Any) -> Any:
    """Creates the connector of the scheduler as vLLM does, with the handshake of a worker."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from moontide.vllm import MoontideConnector
    from moontide.vllm.messages import Handshake

    transfer = KVTransferConfig(
        kv_connector="MoontideConnector",
        kv_connector_module_path="moontide.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"master": master, "transfer_timeout_s": 1.0} | extra,
    )
    arguments = EngineArgs(
        model=str(model), dtype="float32", block_size=32, max_model_len=4096, kv_transfer_config=transfer
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(4096, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=32)
    made = MoontideConnector(arguments.create_engine_config(), KVConnectorRole.SCHEDULER, caches)
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(["tp0.00000000"], False)})
    return made


def hashing() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(32, sha256)


def time_a_miss(connector: Any, name: str, seed: int, hasher: Any) -> float:
    """Returns the time that the scheduler spends in all connector calls for a request of 1,500 tokens, in seconds."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    request = Request(name, prompt([[seed, 1500]]), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    blocks = KVCacheBlocks(([KVCacheBlock(at + 1) for at in range(47)],))
    ids = blocks.get_block_ids()
    connector._scheduler.block_ids = lambda _: ids
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, ids)]
    output.num_scheduled_tokens = {name: 1500}
    spent = 0.0

    def timed(call: Callable[..., Any], *words: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        result = call(*words)
        spent += time.perf_counter() - began
        return result

    while timed(connector.get_num_new_matched_tokens, request, 0)[0] is None:
        time.sleep(0.001)  # the engine steps meanwhile
    timed(connector.update_state_after_alloc, request, blocks, 0)
    step = timed(connector.build_connector_meta, output)
    assert len(step.saves) == 1 and len(step.saves[0].hashes) == 46
    request.num_computed_tokens = 1500
    timed(connector.request_finished_all_groups, request, ids)
    return spent


@pytest.mark.short
@pytest.mark.parametrize("state", ["up", "down"])
def test_scheduler_overhead_of_a_miss_is_bounded(state: str, model: Path, cluster: Cluster) -> None:
    hasher = hashing()
    if state == "down":
        cluster.end()
    connector = connector_of(model, cluster.master)
    try:
        spent = sorted(time_a_miss(connector, f"request-{at}", 5000 + at, hasher) for at in range(300))
    finally:
        connector.shutdown()
    median, worst = statistics.median(spent) * 1e6, spent[int(len(spent) * 0.99)] * 1e6
    print(f"miss, store {state}: median {median:.0f} µs, p99 {worst:.0f} µs of scheduler time")
    assert median < 2 * {"up": 200, "down": 1000}[state]


# ---------------------------------------------------------------------------------------------------------- bookkeeping


@pytest.mark.short
@pytest.mark.parametrize("complete", [True, False])
def test_blocks_are_not_saved_before_all_ranks_have_loaded(complete: bool, model: Path, cluster: Cluster) -> None:
    """With layerwise loads, a rank that loaded all blocks does not know that the load of another rank failed."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from moontide.kv import keys_of
    from moontide.vllm.messages import Report

    connector = connector_of(model, cluster.master, load="layerwise")
    scheduler = connector._scheduler
    request = Request("a", prompt([[1, 330]]), SamplingParams(max_tokens=90), None, block_hasher=hashing())
    with cluster.store() as store:
        for key in keys_of(scheduler._prefix, request.block_hashes[:6], scheduler._parts):
            store.put(key, b"anything")
    blocks = KVCacheBlocks(([KVCacheBlock(at + 1) for at in range(12)],))
    ids = blocks.get_block_ids()
    scheduler.block_ids = lambda _: ids
    try:
        deadline = time.monotonic() + 5
        while (found := connector.get_num_new_matched_tokens(request, 0)) == (None, False):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert found == (6 * 32, False)
        connector.update_state_after_alloc(request, blocks, 6 * 32)
        first = SchedulerOutput.make_empty()
        request.num_computed_tokens = 6 * 32
        first.scheduled_new_reqs = [NewRequestData.from_request(request, ids)]
        first.num_scheduled_tokens = {"a": 330 - 6 * 32}
        step = connector.build_connector_meta(first)
        assert step.loads[0].blocks == [[1, 2, 3, 4, 5, 6]]
        assert step.saves == []

        def next_step(computed: int, scheduled: int) -> Any:
            output = SchedulerOutput.make_empty()
            output.scheduled_cached_reqs.req_ids = ["a"]
            output.scheduled_cached_reqs.num_computed_tokens = [computed]
            output.num_scheduled_tokens = {"a": scheduled}
            return connector.build_connector_meta(output)

        # A step that is scheduled before the result of the first one is known.
        assert next_step(330, 1).saves == []
        steps = {step.number: (1, 0) if complete else (0, 1)}
        scheduler.on_worker_report(Report(steps=steps, failed=set() if complete else {"a"}), [])
        # Blocks 6 to 9 are full; after a failure in block 2 the engine computes from block 2 on.
        (save,) = (next_step(331, 1) if complete else next_step(64, 266)).saves
        assert save.blocks == [ids[0][6:10] if complete else ids[0][2:10]]
        assert save.hashes == (request.block_hashes[6:10] if complete else request.block_hashes[2:10])
        # The request ends during the save: its blocks are kept until the workers report the end of the save.
        request.num_computed_tokens = 330
        assert connector.request_finished_all_groups(request, ids) == (True, None)
        assert empty_step(connector).ended == ["a"]
    finally:
        connector.shutdown()


def empty_step(connector: Any) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return connector.build_connector_meta(SchedulerOutput.make_empty())


@pytest.mark.short
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mastre": "a:1"}, "unknown settings: mastre"),
        ({"load": "eager"}, 'load must be "async" or "layerwise", not \'eager\''),
        ({"replicas": "two"}, "replicas must be a value of type int, not 'two'"),
        ({"save_decode": "perhaps"}, "save_decode must be true or false, not 'perhaps'"),
        ({"transfer_timeout_s": 0}, "transfer_timeout_s must be more than 0, not 0.0"),
    ],
)
def test_invalid_setting_is_rejected_by_name(given: dict[str, Any], message: str) -> None:
    from moontide.vllm.settings import Settings

    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.of(given)
    assert Settings.of({"replicas": "2", "save_decode": "false", "staging": True}) == Settings(
        replicas=2, save_decode=False, staging="true"
    )
