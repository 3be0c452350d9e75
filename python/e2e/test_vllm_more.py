"""vLLM with ``MoontideConnector`` under faults and in other modes. Outputs are compared with vLLM without a
connector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from engine_vllm import prompt
from support import ENGINE_TIMEOUT_S, Cluster, Engine, Run, free_port, corrupt
from test_vllm import PROMPT, same

#: Six requests with the same prefix and long outputs, so that the requests run for some time.
MANY: list[dict[str, Any]] = [{"tokens": [[1, 320], [100 + at, 150]], "max_tokens": 48} for at in range(6)]
BLOCK_BYTES = 65536
TP2 = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def all_same(run: Run, number: int, expected: list[dict[str, Any]]) -> None:
    assert len(run.outputs[number]) == len(expected)
    for found, correct in zip(run.outputs[number], expected, strict=True):
        same(found, correct)


def objects(cluster: Cluster) -> dict[str, bytes]:
    """Returns all objects of the store."""
    with cluster.store() as store:
        found = {}
        for key in store.keys("kv1/"):
            content = store.get(key)
            assert content is not None
            found[key.decode()] = content
        return found


# ----------------------------------------------------------------------------------------------------------- corruption


def test_blocks_load_from_intact_replica_when_other_is_corrupt(
    model: Path, start_cluster: Callable[..., Cluster], run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    cluster = start_cluster(nodes=2)
    job = {"model": str(model), "store": cluster.settings | {"replicas": 2}, "rounds": [PROMPT]}
    run_engine(job)
    kept = objects(cluster)
    assert len(kept) == 14 and all(len(content) == BLOCK_BYTES for content in kept.values())
    assert sum(corrupt(cluster.nodes[0], content) for content in kept.values()) == 14
    second = run_engine(job)
    same(second.outputs[0][0], alone([PROMPT]).outputs[0][0])
    print(second.counters[0])
    assert second.counters[0]["loaded_blocks"] == 14
    assert not second.counters[0].get("load_failures")


def test_corrupt_block_is_recomputed_and_saved_again(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    job = {"model": str(model), "store": cluster.settings, "rounds": [PROMPT]}
    run_engine(job)
    before = objects(cluster)
    victim = sorted(before)[5]
    assert corrupt(cluster.nodes[0], before[victim]) == 1
    second = run_engine(job)
    expected = alone([PROMPT]).outputs[0][0]
    same(second.outputs[0][0], expected)
    print(second.counters[0])
    assert second.counters[0]["load_failures"] == 1
    assert "Recovered from KV load failure" in second.log
    # The corrupt object was replaced by a correct one: the next engine loads all blocks.
    assert set(objects(cluster)) == set(before)
    third = run_engine(job)
    same(third.outputs[0][0], expected)
    assert third.counters[0]["loaded_blocks"] == 14
    assert not third.counters[0].get("load_failures")


# ------------------------------------------------------------------------------------------------------- store failures


def round_of(engine: Engine, number: int, seconds: float) -> None:
    engine.until(lambda line: "counters" in line and line["round"] == number, seconds)


@pytest.mark.parametrize("fault", ["node killed", "all stopped", "all stopped before", "node stopped, read over TCP"])
def test_requests_succeed_when_store_fails(
    fault: str,
    model: Path,
    cluster: Cluster,
    start_engine: Callable[..., Engine],
    alone: Callable[..., Run],
) -> None:
    store = {"master": cluster.master, "transfer_timeout_s": 2.0, "shm": "TCP" not in fault}
    # The blocks of the third round are not stored, and cannot be saved.
    new = [{"tokens": [[900 + at, 200]], "max_tokens": 16} for at in range(4)]
    rounds = [MANY, MANY, new]
    job = {"model": str(model), "store": store, "rounds": rounds, "wait": True, "reset_local": True}
    expected = alone(rounds)
    engine = start_engine(job)
    engine.until(lambda line: "ready" in line)
    engine.go()
    round_of(engine, 0, 120)
    time.sleep(1)
    if fault == "all stopped before":
        for server in cluster.servers:
            server.signal(signal.SIGSTOP)
    elif fault.startswith("node stopped"):
        cluster.nodes[0].signal(signal.SIGSTOP)
    engine.go()
    if fault in ("node killed", "all stopped"):
        time.sleep(0.3)
        for server in cluster.nodes if fault == "node killed" else cluster.servers:
            server.signal(signal.SIGKILL if fault == "node killed" else signal.SIGSTOP)
    round_of(engine, 1, 120)
    engine.go()
    round_of(engine, 2, 120)
    run = engine.run
    print(f"{fault}: rounds of {run.seconds} s, alone {expected.seconds} s; {run.counters[-1]}")
    for number in range(3):
        all_same(run, number, expected.outputs[number])
    # A hanging store costs its timeout once or twice, not once per request.
    assert run.seconds[1] < expected.seconds[1] + 3 * 2.0 + 5
    assert run.seconds[2] < expected.seconds[2] + 3 * 2.0 + 5
    if fault.startswith("node stopped"):
        assert run.counters[1]["load_failures"] > 0


# ---------------------------------------------------------------------------------------------------------------- modes


def test_tp2_loads_only_blocks_present_for_both_ranks(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    engine = {"tensor_parallel_size": 2}
    job = {"model": str(model), "store": cluster.settings, "rounds": [PROMPT], "engine": engine}
    first, second = run_engine(job, TP2), run_engine(job, TP2)
    expected = alone([PROMPT]).outputs[0][0]
    same(first.outputs[0][0], expected)
    same(second.outputs[0][0], expected)
    print(second.counters[0])
    assert second.outputs[0][0]["cached"] == 448
    assert second.counters[0]["loaded_blocks"] == 2 * 14
    assert second.counters[0]["loaded_bytes"] == 14 * BLOCK_BYTES
    # If the part of one rank is removed, the prefix ends before this block for both ranks.
    with cluster.store() as store:
        of_rank_1 = sorted(key for key in store.keys("kv1/") if b"/tp1" in key)
        assert len(of_rank_1) == 14
        store.batch_remove(of_rank_1[3:4], force=True)
    third = run_engine(job, TP2)
    same(third.outputs[0][0], expected)
    assert third.outputs[0][0]["cached"] < 448
    assert not third.counters[0].get("load_failures")


def test_two_concurrent_engines_load_correct_blocks(
    model: Path, cluster: Cluster, start_engine: Callable[..., Engine], alone: Callable[..., Run]
) -> None:
    # The blocks of the first round are not stored, those of the second one are.
    rounds = [MANY, MANY]
    job = {
        "model": str(model),
        "store": cluster.settings,
        "rounds": rounds,
        "wait": True,
        "reset_local": True,
    }
    engines = [start_engine(job), start_engine(job)]
    for engine in engines:
        engine.until(lambda line: "ready" in line)
    expected = alone([MANY, MANY, [{"tokens": [[900 + at, 200]], "max_tokens": 16} for at in range(4)]])
    for number in range(2):
        for engine in engines:
            engine.go()
        for engine in engines:
            round_of(engine, number, 120)
    for engine in engines:
        run = engine.finish()
        print(run.seconds, run.counters[-1])
        for number in range(2):
            all_same(run, number, expected.outputs[number])
        assert run.counters[1]["loaded_blocks"] > 0
        assert not run.counters[1].get("load_failures")


def test_layerwise_load_saves_new_blocks_and_recovers_from_corruption(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    store = cluster.settings | {"load": "layerwise"}
    rounds = [PROMPT, [{"tokens": [[1, 320], [7, 200]], "max_tokens": 40}]]
    expected = alone(rounds)
    first = run_engine({"model": str(model), "store": store, "rounds": [PROMPT]})
    same(first.outputs[0][0], expected.outputs[0][0])
    assert len(objects(cluster)) == 2 * 14
    second = run_engine({"model": str(model), "store": store, "rounds": rounds, "reset_local": True})
    all_same(second, 0, expected.outputs[0])
    all_same(second, 1, expected.outputs[1])
    print(second.counters)
    assert second.counters[0]["loaded_blocks"] == 2 * 14
    assert second.counters[1]["loaded_blocks"] == 2 * (14 + 10)
    # Blocks after the loaded prefix are saved too: 560 tokens, of which the last was not computed.
    assert len(objects(cluster)) == 2 * (14 + 17 - 10)
    third = run_engine({"model": str(model), "store": store, "rounds": rounds[1:]})
    all_same(third, 0, expected.outputs[1])
    assert third.outputs[0][0]["cached"] == 512

    # Corrupt bytes: the step that loaded them is discarded, and none of its blocks is saved.
    kept = objects(cluster)
    victim = sorted(kept)[9]
    assert corrupt(cluster.nodes[0], kept[victim]) == 1
    fourth = run_engine({"model": str(model), "store": store, "rounds": rounds, "reset_local": True})
    all_same(fourth, 0, expected.outputs[0])
    all_same(fourth, 1, expected.outputs[1])
    print(fourth.counters)
    assert fourth.counters[-1]["load_failures"] >= 1
    assert {key: content for key, content in objects(cluster).items() if key in kept} == kept


def test_staging_and_direct_transfers_use_the_same_objects(
    model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    expected = alone([PROMPT, MANY])

    def job(staging: bool, rounds: list[Any]) -> dict[str, Any]:
        return {"model": str(model), "store": cluster.settings | {"staging": staging}, "rounds": rounds}

    saved_copied = run_engine(job(True, [PROMPT]))
    all_same(saved_copied, 0, expected.outputs[0])
    loaded_direct = run_engine(job(False, [PROMPT, MANY]))
    assert loaded_direct.counters[0]["loaded_blocks"] == 14
    loaded_copied = run_engine(job(True, [PROMPT, MANY]))
    assert loaded_copied.counters[1]["loaded_blocks"] > 14
    for run in (loaded_direct, loaded_copied):
        all_same(run, 0, expected.outputs[0])
        all_same(run, 1, expected.outputs[1])
        assert not run.counters[1].get("load_failures")


@pytest.mark.parametrize("staging", [False, True])
def test_preemption_saves_no_wrong_bytes(
    staging: bool, model: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    many = [{"tokens": [[300 + at, 180]], "max_tokens": 120} for at in range(8)]
    store = cluster.settings | {"staging": staging}
    tight = {"num_gpu_blocks_override": 34, "max_model_len": 512}
    expected = alone([many])
    first = run_engine({"model": str(model), "store": store, "rounds": [many], "engine": tight})
    print(first.counters[0])
    all_same(first, 0, expected.outputs[0])
    assert first.counters[0]["vllm:num_preemptions"] > 0
    # The saved blocks are loaded as the prefix of longer prompts: a wrong byte would change the output.
    longer = [
        {"ids": prompt(one["tokens"]) + answer["tokens"] + prompt([[50, 20]]), "max_tokens": 16}
        for one, answer in zip(many, expected.outputs[0], strict=True)
    ]
    second = run_engine({"model": str(model), "store": store, "rounds": [longer]})
    all_same(second, 0, alone([longer]).outputs[0])
    print(second.counters[0])
    assert all(answer["cached"] >= 256 for answer in second.outputs[0])
    assert second.counters[0]["loaded_blocks"] >= 8 * 8


def test_sliding_window_layers_save_and_load_blocks(
    tmp_path: Path, cluster: Cluster, run_engine: Callable[..., Run], alone: Callable[..., Run]
) -> None:
    """Some layers have a sliding window and free blocks while a request runs."""
    folder = tmp_path / "windows"
    write_windowed(folder)
    rounds = [[{"tokens": [[1, 468]], "max_tokens": 80}], [{"tokens": [[1, 300], [8, 100]], "max_tokens": 40}]]
    engine = {"disable_hybrid_kv_cache_manager": False}
    expected = alone(rounds, engine, folder)
    job = {"model": str(folder), "store": cluster.settings, "rounds": rounds, "engine": engine}
    first = run_engine(job | {"rounds": rounds[:1]})
    all_same(first, 0, expected.outputs[0])
    second = run_engine(job | {"reset_local": True})
    print(second.counters, [answer["cached"] for answers in second.outputs for answer in answers])
    for number in range(2):
        all_same(second, number, expected.outputs[number])
    assert second.outputs[0][0]["cached"] == 448
    assert second.counters[0]["loaded_blocks"] > 14
    assert {key.rpartition("/")[2].split(".")[1] for key in objects(cluster)} >= {"g0", "g1"}


def write_windowed(folder: Path) -> None:
    import torch
    from model import VOCABULARY, write_tokenizer
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder.mkdir()
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.25,
        dtype="float32",
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


def test_other_weights_under_same_name_do_not_share_blocks(
    model: Path, tmp_path: Path, cluster: Cluster, run_engine: Callable[..., Run]
) -> None:
    from model import write

    other = tmp_path / model.name
    write(other, seed=1)
    store = cluster.settings
    run_engine({"model": str(model), "store": store, "rounds": [PROMPT]})
    second = run_engine({"model": str(other), "store": store, "rounds": [PROMPT]})
    assert second.outputs[0][0]["cached"] == 0
    assert len(objects(cluster)) == 2 * 14


# --------------------------------------------------------------------------------------------------- events and metrics


def test_kv_events_report_stored_and_removed_blocks(
    model: Path, cluster: Cluster, start_engine: Callable[..., Engine]
) -> None:
    import msgspec
    import zmq
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    port = free_port()
    job = {
        "model": str(model),
        "store": cluster.settings,
        "rounds": [PROMPT, *([{"tokens": [[seed, 40]], "max_tokens": 4}] for seed in (5, 6))],
        "wait": True,
        "events": port,
    }
    engine = start_engine(job)
    received: list[Any] = []

    def listen() -> None:
        while subscriber.poll(2000):
            _, _, payload = subscriber.recv_multipart()
            received.extend(msgspec.msgpack.decode(payload)[1])

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        engine.until(lambda line: "ready" in line)
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.subscribe("")
        time.sleep(1)
        # The second round makes the engine step again: it publishes events in its steps.
        for number in range(2):
            engine.go()
            round_of(engine, number, 120)
        listen()
        assert not [event for event in received if event["type"] == "BlockRemoved"], "no block was removed"
        with cluster.store() as store:
            removed = sorted(store.keys("kv1/"))[3:5]
            assert store.batch_remove(removed, force=True) == [True, True]
        # The connector learns of the removal within a second, and publishes it in the next step of the engine.
        time.sleep(3)
        before = len(received)
        engine.go()
        round_of(engine, 2, 120)
        listen()
    engine.finish()
    removals = [event for event in received[before:] if event["type"] == "BlockRemoved"]
    assert {event["medium"] for event in removals} == {"STORAGE"}
    hashes = [block for event in removals for block in event["block_hashes"]]
    names = [bytes.fromhex(key.decode().split("/")[-2]) for key in removed]
    assert sorted(hashes) == sorted(maybe_convert_block_hash(cast(Any, name)) for name in names)
    by_medium: dict[str, dict[int, Any]] = {"STORAGE": {}, "GPU": {}}
    for event in received:
        if event["type"] == "BlockStored":
            by_medium[event["medium"]] |= {block: event for block in event["block_hashes"]}
    kept = by_medium["STORAGE"]
    print(f"{len(received)} events, {len(kept)} blocks in the store")
    # The block of the last round may not be published yet.
    assert len(kept) in (15, 16)
    # The events of both media have the same hashes and form the same chain.
    assert set(kept) <= set(by_medium["GPU"])
    roots = [event for event in kept.values() if event["parent_block_hash"] is None]
    beginnings = [prompt(tokens)[:32] for tokens in ([[1, 468]], [[5, 40]], [[6, 40]])]
    assert [event["token_ids"] for event in roots] == beginnings[: len(roots)] and len(roots) >= 2
    assert all(event["parent_block_hash"] in kept for event in kept.values() if event not in roots)
    assert set(hashes) < set(kept), "removed blocks have the hashes of stored ones"


def test_vllm_serve_exports_moontide_metrics(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    """Runs ``vllm serve`` as documented, and reads its ``/metrics``."""
    port = free_port()
    transfer = {
        "kv_connector": "MoontideConnector",
        "kv_connector_module_path": "moontide.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": cluster.master},
    }
    words = ["serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
    words += ["--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "4"]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    log = tmp_path / "serve.log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            ["nice", "-n", "5", str(Path(sys.executable).parent / "vllm"), *words],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )

    def get(path: str, body: dict[str, Any] | None = None) -> str:
        url = f"http://127.0.0.1:{port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    try:
        start_deadline = time.monotonic() + ENGINE_TIMEOUT_S
        while True:
            try:
                get("/health")
                break
            except OSError:
                assert time.monotonic() < start_deadline and server.poll() is None, log.read_text()[-4000:]
                time.sleep(0.5)
        body = {"model": str(model), "prompt": prompt([[1, 468]]), "max_tokens": 4, "temperature": 0}
        get("/v1/completions", body)
        deadline = time.monotonic() + 20
        values: dict[str, float] = {}
        while values.get("saved_blocks_total", 0) < 14 and time.monotonic() < deadline:
            get("/v1/completions", body | {"prompt": [5, 6, 7]})
            for line in get("/metrics").splitlines():
                if line.startswith("vllm:moontide_"):
                    name, value = line.rsplit(" ", 1)
                    values[name.split("{")[0].removeprefix("vllm:moontide_")] = float(value)
        print(values)
        assert values["saved_blocks_total"] == 14
        assert values["saved_bytes_total"] == 14 * BLOCK_BYTES
        assert values["save_seconds_total"] > 0
        assert values["lookups_total"] >= 1
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)
