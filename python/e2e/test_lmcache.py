"""LMCache with ``MoontideL2``: the class, called as LMCache does, and LMCache's server between vLLM and the store."""

from __future__ import annotations

import importlib.util
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, environment, prompt, wait_for_keys
from moontide.lmcache import MoontideL2
from support import Cluster, free_port, corrupt

CHUNK = 64
CHUNKS = len(prompt(1)) // CHUNK
SERVER_TIMEOUT_S = 60.0

# ------------------------------------------------------------------------------------------------------------ the class

NAMES = [f"org-model@01000000@0@{number:064x}" for number in range(6)]


def chunks(count: int, fill: int | None = None, size: int = 5000) -> list[memoryview]:
    return [memoryview(bytearray([number if fill is None else fill]) * size) for number in range(1, count + 1)]


def outcome(plugin: MoontideL2, number: int, seconds: float = 10.0) -> tuple[bool, str, list[bool] | None]:
    """Waits for the result of a submission as LMCache does."""
    poller = select.poll()
    poller.register(plugin.event_fd(), select.POLLIN)
    assert poller.poll(seconds * 1000), "no completion arrived"
    ((found, *rest),) = plugin.drain_completions()
    assert found == number
    # Level triggered: if the descriptor stayed readable, LMCache's thread would spin.
    assert not poller.poll(0)
    ok, reason, objects = rest
    return ok, reason, objects


@pytest.fixture
def plugin(cluster: Cluster) -> Iterator[Callable[..., MoontideL2]]:
    made: list[MoontideL2] = []

    def make(**settings: Any) -> MoontideL2:
        made.append(MoontideL2(**({"master": cluster.master} | settings)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_chunks_saved_by_one_plugin_are_loaded_by_another(plugin: Callable[..., MoontideL2]) -> None:
    one, other = plugin(), plugin()
    assert outcome(one, one.submit_batch_exists(NAMES[:2])) == (True, "", [False, False])
    assert outcome(one, one.submit_batch_set(NAMES[:3], chunks(3))) == (True, "", [True] * 3)
    # A second save of existing chunks succeeds.
    assert outcome(one, one.submit_batch_set(NAMES[:3], chunks(3))) == (True, "", [True] * 3)
    assert outcome(other, other.submit_batch_exists(NAMES[:4])) == (True, "", [True] * 3 + [False])
    found = chunks(4, fill=0)
    assert outcome(other, other.submit_batch_get(NAMES[:4], found))[2] == [True] * 3 + [False]
    assert found[:3] == chunks(3)
    assert (other.counts.loaded, other.counts.loaded_bytes, other.counts.not_loaded) == (3, 15000, 1)
    assert outcome(one, one.submit_batch_delete([NAMES[0], NAMES[5]])) == (True, "", [True, False])
    assert outcome(other, other.submit_batch_exists(NAMES[:3]))[2] == [False, True, True]


def test_chunk_of_another_length_is_not_loaded(plugin: Callable[..., MoontideL2]) -> None:
    one = plugin()
    outcome(one, one.submit_batch_set(NAMES[:1], chunks(1)))
    for size in (4999, 5001):
        assert outcome(one, one.submit_batch_get(NAMES[:1], chunks(1, size=size)))[2] == [False]


def test_corrupt_chunk_is_not_loaded_and_can_be_saved_again(
    cluster: Cluster, plugin: Callable[..., MoontideL2]
) -> None:
    one = plugin()
    outcome(one, one.submit_batch_set(NAMES[:2], chunks(2)))
    assert corrupt(cluster.nodes[0], bytes(chunks(2)[1])) == 1
    assert outcome(one, one.submit_batch_get(NAMES[:2], chunks(2, fill=0)))[2] == [True, False]
    assert outcome(one, one.submit_batch_exists(NAMES[:2]))[2] == [True, False]
    assert outcome(one, one.submit_batch_set(NAMES[:2], chunks(2)))[0]
    assert outcome(one, one.submit_batch_get(NAMES[:2], chunks(2, fill=0)))[2] == [True, True]


@pytest.mark.parametrize("what", ["revision", "namespace", "tenant"])
def test_plugins_with_different_settings_do_not_share_chunks(plugin: Callable[..., MoontideL2], what: str) -> None:
    one, other = plugin(), plugin(**{what: "other"})
    outcome(one, one.submit_batch_set(NAMES[:1], chunks(1)))
    assert outcome(other, other.submit_batch_exists(NAMES[:1]))[2] == [False]


def test_concurrent_submissions_all_complete(plugin: Callable[..., MoontideL2]) -> None:
    one = plugin()
    keys = [[f"m@1@0@{batch}.{number}" for number in range(8)] for batch in range(40)]
    waiting = {one.submit_batch_set(batch, chunks(8)) for batch in keys}
    assert len(waiting) == 40
    poller, deadline = select.poll(), time.monotonic() + 20
    poller.register(one.event_fd(), select.POLLIN)
    while waiting and time.monotonic() < deadline:
        poller.poll(500)
        for number, ok, reason, _ in one.drain_completions():
            assert ok, reason
            waiting.remove(number)
    assert not waiting


def test_submission_does_not_block_while_store_hangs(cluster: Cluster, plugin: Callable[..., MoontideL2]) -> None:
    """LMCache holds a global lock during a submission."""
    one = plugin(transfer_timeout_s=1.0, lookup_timeout_ms=200, retry_after_s=0.5)
    outcome(one, one.submit_batch_set(NAMES[:1], chunks(1)))
    for server in cluster.servers:
        server.signal(signal.SIGSTOP)
    times: list[float] = []
    numbers: set[int] = set()
    for _ in range(10):
        for submit in (
            lambda: one.submit_batch_exists(NAMES),
            lambda: one.submit_batch_set(NAMES[1:3], chunks(2)),
            lambda: one.submit_batch_get(NAMES[3:], chunks(3)),
            lambda: one.submit_batch_delete(NAMES[5:]),
        ):
            began = time.monotonic()
            numbers.add(submit())
            times.append(time.monotonic() - began)
    print(f"submission to a hanging store: at most {max(times) * 1e6:.0f} µs")
    assert max(times) < 0.05
    began = time.monotonic()
    poller = select.poll()
    poller.register(one.event_fd(), select.POLLIN)
    while numbers and time.monotonic() - began < 20:
        poller.poll(500)
        for number, _, _, each in one.drain_completions():
            assert each is not None and not any(each)
            numbers.remove(number)
    print(f"all 40 completed within {time.monotonic() - began:.2f} s")
    assert not numbers
    for server in cluster.servers:
        server.signal(signal.SIGCONT)
    deadline = time.monotonic() + 15
    while outcome(one, one.submit_batch_exists(NAMES[:1]))[2] != [True] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert outcome(one, one.submit_batch_exists(NAMES[:1]))[2] == [True]


@pytest.mark.parametrize("wrong", [{"mastre": "a:1"}, {"load_threads": 0}, {"save_threads": "two"}, {"replicas": 0}])
def test_invalid_setting_is_rejected_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MoontideL2(**wrong)


def test_close_is_idempotent_and_stops_threads(plugin: Callable[..., MoontideL2]) -> None:
    one = plugin()
    outcome(one, one.submit_batch_set(NAMES[:1], chunks(1)))
    one.close()
    one.close()
    assert not any(thread.name.startswith("moontide-") for thread in threading.enumerate())


# ------------------------------------------------------------------------------------------------ LMCache server, vLLM

needs_lmcache = pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="needs LMCache")


class CacheServer:
    """LMCache's server in a separate process."""

    def __init__(self, log: Path, master: str) -> None:
        self.log, self.port = log, free_port()
        l2 = {
            "type": "native_plugin",
            "module_path": "moontide.lmcache",
            "class_name": "MoontideL2",
            "adapter_params": {"master": master},
        }
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--chunk-size", str(CHUNK), "--l1-size-gb", "1"]
        words += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-metrics"]
        words += ["--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(l2)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", sys.executable, "-m", "lmcache.v1.multiprocess.server", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(),
            )
        deadline = time.monotonic() + SERVER_TIMEOUT_S
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"LMCache's server did not start:\n{self.text()[-4000:]}")
            time.sleep(0.2)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def transfer(self) -> dict[str, Any]:
        """vLLM's configuration for this server."""
        address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": address}

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def from_l2(self) -> int:
        """Returns the number of chunks that the server got from its L2, according to its log."""
        return sum(map(int, re.findall(r"retained keys \(\d+ L1, (\d+) L2\)", self.text())))

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)

    def __enter__(self) -> CacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares tokens and log probabilities."""
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)


@needs_lmcache
def test_lmcache_servers_share_chunks_and_survive_store_loss(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    with EngineProcess(tmp_path / "alone.log", "engine_connector.py", {"model": str(model)}) as engine:
        expected = {seed: engine.ask(prompt(seed)) for seed in range(1, 6)}
    with cluster.store() as store, CacheServer(tmp_path / "server-1.log", cluster.master) as server:
        job = {"model": str(model), "transfer": server.transfer}
        with EngineProcess(tmp_path / "save.log", "engine_connector.py", job) as engine:
            cold = engine.ask(prompt(1))
            engine.ask(prompt(2))
            assert wait_for_keys(store, "kv1/lmcache/", 2 * CHUNKS) == 2 * CHUNKS
        assert server.from_l2() == 0
        assert server.end() == 0
    # Server and engine are new: hits come from the store.
    with CacheServer(tmp_path / "server-2.log", cluster.master) as server:
        job = {"model": str(model), "transfer": server.transfer}
        with EngineProcess(tmp_path / "load.log", "engine_connector.py", job) as engine:
            warm = engine.ask(prompt(1))
            chunks_loaded = server.from_l2()
            for each in cluster.servers:
                each.process.kill()
                each.process.wait(10)
            without = {seed: engine.ask(prompt(seed), 60) for seed in (2, 3, 4, 5)}
    same(cold, expected[1])
    same(warm, expected[1])
    print(f"warm: {warm['cached']} of {warm['prompt']} cached, {chunks_loaded} chunks from L2, {warm['seconds']} s")
    assert cold["cached"] == 0
    assert warm["cached"] > 0.9 * warm["prompt"]
    assert chunks_loaded == CHUNKS
    for seed, output in without.items():
        print(f"prompt {seed} without the store: {output['seconds']} s, {output['cached']} cached")
        same(output, expected[seed])
    assert max(output["seconds"] for output in without.values()) < 20
