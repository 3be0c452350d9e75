"""Fixtures of the end-to-end tests: a model, clusters, engines.

    target/engines/venv/bin/python -m pytest python/e2e -m short        # what takes a few minutes
    target/engines/venv/bin/python -m pytest python/e2e                 # everything

The environment comes from ``install.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support import Cluster, Engine, Run  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "short: what CI runs at every change")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Engines take their time; the limit for other tests is too short for them. Each wait of theirs has its own."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    from model import write

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder)
    return folder


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters that end with the test."""
    running: list[Cluster] = []

    def start(**settings: Any) -> Cluster:
        folder = tmp_path / f"cluster-{len(running)}"
        folder.mkdir()
        running.append(Cluster(folder, **settings))
        return running[-1]

    yield start
    for cluster in running:
        cluster.end()


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """A master and one node."""
    return start_cluster()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts vLLM as a process that ends with the test."""
    running: list[Engine] = []

    def start(job: dict[str, Any], environment: dict[str, str] | None = None) -> Engine:
        running.append(Engine(tmp_path, job, environment))
        return running[-1]

    yield start
    for engine in running:
        if engine.process.poll() is None:
            engine.kill()


@pytest.fixture
def run_engine(start_engine: Callable[..., Engine]) -> Callable[..., Run]:
    """Runs vLLM from its start to its end."""

    def run(job: dict[str, Any], environment: dict[str, str] | None = None) -> Run:
        return start_engine(job, environment).finish()

    return run


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """What vLLM answers without any store: each job is run once a session."""
    known: dict[str, Run] = {}

    def run(rounds: list[Any], engine: dict[str, Any] | None = None, folder: Path = model) -> Run:
        job = {"model": str(folder), "rounds": rounds, "engine": (engine or {}) | {"enable_prefix_caching": False}}
        name = repr(job)
        if name not in known:
            known[name] = Engine(tmp_path_factory.mktemp("alone"), job).finish()
        return known[name]

    return run
