"""Fixtures of the end-to-end tests: a model, clusters, engines.

    target/engines/venv/bin/python -m pytest python/e2e -m short        # a few minutes
    target/engines/venv/bin/python -m pytest python/e2e                 # all tests

``install.py`` creates the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
# After everything else: it has other modules of general names.
sys.path.append(str(HERE.parent / "tests"))

from support import Cluster, Engine, Run  # noqa: E402

pytest_plugins = ["ci_failures", "ci_skips"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "short: the short form, a few minutes; CI runs that of the kernels")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises the timeout of the tests: engines start slowly. Each wait in the tests has its own timeout."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small test model."""
    from model import write

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder)
    return folder


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, and ends them after the test."""
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
    """Starts vLLM as a process, and ends it after the test."""
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
    """Runs vLLM until it exits."""

    def run(job: dict[str, Any], environment: dict[str, str] | None = None) -> Run:
        return start_engine(job, environment).finish()

    return run


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs vLLM without a store. Each job runs once per session."""
    known: dict[str, Run] = {}

    def run(rounds: list[Any], engine: dict[str, Any] | None = None, folder: Path = model) -> Run:
        job = {"model": str(folder), "rounds": rounds, "engine": (engine or {}) | {"enable_prefix_caching": False}}
        name = repr(job)
        if name not in known:
            known[name] = Engine(tmp_path_factory.mktemp("alone"), job).finish()
        return known[name]

    return run
