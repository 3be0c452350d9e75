"""vLLM with ``MoontideConnector``: what one process computed, another one finds."""

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
    """The same tokens, with the same certainty."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


@pytest.mark.short
def test_another_process_loads_what_one_has_saved(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    job = {"model": str(model), "store": cluster.settings, "rounds": [PROMPT]}
    expected = alone([PROMPT]).answers[0][0]
    first = run_engine(job)
    second = run_engine(job)
    cold, warm = first.answers[0][0], second.answers[0][0]
    same(cold, expected)
    same(warm, expected)
    assert cold["cached"] == 0
    assert warm["cached"] > 0.9 * warm["prompt"]
    # What is said to be cached was only matched; that it came, the worker says.
    counters = second.counters[0]
    print(f"cold {cold['ttft']} s, warm {warm['ttft']} s, {warm['cached']} of {warm['prompt']} cached; {counters}")
    assert counters["loaded_blocks"] == warm["cached"] // 32
    assert counters["loaded_bytes"] == warm["cached"] // 32 * 65536
    assert not counters.get("failed_loads")


@pytest.mark.short
def test_a_salt_keeps_tenants_apart(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    def asks(*salts: str) -> dict[str, Any]:
        rounds = [[PROMPT[0] | {"salt": salt}] for salt in salts]
        return {"model": str(model), "store": cluster.settings, "rounds": rounds}

    run_engine(asks("alice"))
    second = run_engine(asks("bob", "alice"))
    expected = alone([PROMPT]).answers[0][0]
    (bob,), (alice,) = second.answers
    same(bob, expected)
    same(alice, expected)
    assert bob["cached"] == 0
    assert alice["cached"] == 448
    assert second.counters[0].get("loaded_blocks", 0) == 0
    assert second.counters[1]["loaded_blocks"] == 14


# ------------------------------------------------------------------------------------------------------------ overheads


def connector_of(model: Path, master: str, **extra: Any) -> Any:
    """The scheduler's half, as vLLM makes it, with a worker's greeting."""
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
        kv_connector_extra_config={"master": master, "deadline_s": 1.0} | extra,
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
    """Seconds that the scheduler spends in the connector for a request of 1,500 tokens, all calls together."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    request = Request(name, prompt([[seed, 1500]]), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    blocks = KVCacheBlocks(([KVCacheBlock(at + 1) for at in range(47)],))
    ids = blocks.get_block_ids()
    connector._plan.block_ids = lambda _: ids
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, ids)]
    output.num_scheduled_tokens = {name: 1500}
    spent = 0.0

    def timed(call: Callable[..., Any], *words: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        answer = call(*words)
        spent += time.perf_counter() - began
        return answer

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
def test_what_a_miss_costs_the_scheduler(state: str, model: Path, cluster: Cluster) -> None:
    hasher = hashing()
    if state == "down":
        cluster.end()
    connector = connector_of(model, cluster.master)
    try:
        spent = sorted(time_a_miss(connector, f"request-{at}", 5000 + at, hasher) for at in range(300))
    finally:
        connector.shutdown()
    median, worst = statistics.median(spent) * 1e6, spent[int(len(spent) * 0.99)] * 1e6
    print(f"a miss, store {state}: median {median:.0f} µs, p99 {worst:.0f} µs of the scheduler's time")
    assert median < 2 * {"up": 200, "down": 1000}[state]


# ---------------------------------------------------------------------------------------------------------- bookkeeping


@pytest.mark.short
@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_saved_of_a_step_before_all_ranks_have_loaded(whole: bool, model: Path, cluster: Cluster) -> None:
    """Layer by layer, a rank that has loaded all of it cannot tell that another one computes from garbage."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from moontide.kv import keys_of
    from moontide.vllm.messages import Report

    connector = connector_of(model, cluster.master, load="layerwise")
    plan = connector._plan
    request = Request("a", prompt([[1, 330]]), SamplingParams(max_tokens=90), None, block_hasher=hashing())
    with cluster.store() as store:
        for key in keys_of(plan._prefix, request.block_hashes[:6], plan._parts):
            store.put(key, b"anything")
    blocks = KVCacheBlocks(([KVCacheBlock(at + 1) for at in range(12)],))
    ids = blocks.get_block_ids()
    plan.block_ids = lambda _: ids
    try:
        until = time.monotonic() + 5
        while (found := connector.get_num_new_matched_tokens(request, 0)) == (None, False):
            assert time.monotonic() < until
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

        # A step that is planned before the first one's result is known.
        assert next_step(330, 1).saves == []
        plan.heard(Report(steps={step.number: (1, 0) if whole else (0, 1)}, failed=set() if whole else {"a"}), [])
        # Blocks 6 to 9 are full; after a failure in block 2 the engine computes from there on.
        (save,) = (next_step(331, 1) if whole else next_step(64, 266)).saves
        assert save.blocks == [ids[0][6:10] if whole else ids[0][2:10]]
        assert save.hashes == (request.block_hashes[6:10] if whole else request.block_hashes[2:10])
        # It ends while this is being saved: its blocks are kept until workers say that it is over.
        request.num_computed_tokens = 330
        assert connector.request_finished_all_groups(request, ids) == (True, None)
        assert next_step_of_none(connector).ended == ["a"]
    finally:
        connector.shutdown()


def next_step_of_none(connector: Any) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return connector.build_connector_meta(SchedulerOutput.make_empty())


@pytest.mark.short
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"mastre": "a:1"}, "mastre, which MoontideConnector does not know"),
        ({"load": "eager"}, 'load is \'eager\', and should be "async" or "layerwise"'),
        ({"replicas": "two"}, "replicas is 'two', and should be a value of type int"),
        ({"save_decode": "perhaps"}, "save_decode is 'perhaps', and should be true or false"),
        ({"deadline_s": 0}, "deadline_s is 0.0, and should be more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(said: dict[str, Any], wanted: str) -> None:
    from moontide.vllm.settings import Settings

    with pytest.raises(ValueError, match=re.escape(wanted)):
        Settings.of(said)
    assert Settings.of({"replicas": "2", "save_decode": "false", "staging": True}) == Settings(
        replicas=2, save_decode=False, staging="true"
    )
