"""The engines' connectors for Mooncake, unchanged, with ``moontide-mooncake-compat`` instead of Mooncake."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, prompt, wait_for_keys
from support import Cluster

# The real Mooncake may be installed instead, and would pass the tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("moontide.compat.mooncake") is None or importlib.util.find_spec("mooncake") is None,
    reason="needs moontide-mooncake-compat",
)

PROMPT = prompt(1)
BLOCKS = len(PROMPT) // 32
PAGES = len(PROMPT) // 16
VLLM = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares tokens and log probabilities."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


def test_mooncake_import_resolves_to_moontide() -> None:
    from mooncake.store import MooncakeDistributedStore

    assert MooncakeDistributedStore.__module__.startswith("moontide.")


def test_importing_mooncake_engine_raises_module_not_found() -> None:
    """LMCache does not start after any other error."""
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("mooncake.engine")
    assert raised.value.name == "mooncake"


def test_vllm_connector_loads_blocks_saved_by_another_process(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": cluster.master,
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "64mb",
            }
        )
    )
    job, variables = {"model": str(model), "transfer": VLLM}, {"MOONCAKE_CONFIG_PATH": str(config)}
    with EngineProcess(tmp_path / "alone.log", "engine_connector.py", {"model": str(model)}) as engine:
        expected = engine.ask(PROMPT)
    with cluster.store() as store:
        with EngineProcess(tmp_path / "save.log", "engine_connector.py", job, **variables) as engine:
            cold = engine.ask(PROMPT)
            assert wait_for_keys(store, "", BLOCKS) == BLOCKS
        with EngineProcess(tmp_path / "load.log", "engine_connector.py", job, **variables) as engine:
            warm = engine.ask(PROMPT)
            other = engine.ask(prompt(2))
    same(cold, expected)
    same(warm, expected)
    print(f"cold {cold['seconds']} s, warm {warm['seconds']} s, {warm['cached']} of {warm['prompt']} cached")
    print(f"warm: {warm['metrics']}")
    assert cold["cached"] == other["cached"] == 0
    assert warm["cached"] > 0.9 * warm["prompt"]
    # "cached" counts blocks that the lookup found; the counters of vLLM's connector show that they were loaded.
    assert warm["metrics"]["operation_keys load_get"] == BLOCKS
    assert warm["metrics"]["operation_bytes load_get"] == BLOCKS * 65536
    assert warm["metrics"]["operation_failed_keys load_get"] == 0


def test_sglang_backend_loads_pages_saved_by_another_process(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    extra = {
        "master_server_address": cluster.master,
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "prefetch_threshold": 16,
    }
    job = {"model": str(model), "backend": "mooncake", "extra": extra}
    # Otherwise SGLang creates a transfer engine first, which moontide-mooncake-compat does not have.
    variables = {"SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0"}
    with cluster.store() as store:
        with EngineProcess(tmp_path / "save.log", "engine_sglang.py", job, **variables) as engine:
            cold = engine.ask(PROMPT)
            before = wait_for_keys(store, "", 2 * PAGES)
        with EngineProcess(tmp_path / "load.log", "engine_sglang.py", job, **variables) as engine:
            warm = engine.ask(PROMPT)
    same(warm, cold)
    print(
        f"{before} objects; warm {warm['cached']} of {warm['prompt']} cached, from {warm['from']}, {warm['seconds']} s"
    )
    assert cold["cached"] == 0
    assert warm["cached"] > 0.9 * warm["prompt"]
    assert warm["from"]["storage"] == warm["cached"]
