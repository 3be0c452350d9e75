"""What the tests of ``moontide`` share: a cluster of real processes, stores of it, keys that do not meet, seeds.

The cluster is started once: a master and two nodes on free ports of this host. A ``store`` maps the nodes' memory, a
``far`` one does not and reads over TCP, as a program on another host would. What servers log during a test is shown
when it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import moontide

MIB = 1 << 20
READY_MAX_S = 20.0
ANYWHERE = "127.0.0.1:0"


class Server:
    """A process of ``moontide``: what it says about itself, and its log."""

    def __init__(self, folder: Path, name: str, words: list[str], last: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.facts: dict[str, str] = {}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [moontide.binary(), *words], stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
            )
        self._read_facts(last)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read_facts(self, last: str) -> None:
        assert self.process.stdout is not None
        too_slow = threading.Timer(READY_MAX_S, self.process.kill)
        too_slow.start()
        try:
            for line in self.process.stdout:
                word, _, rest = line.strip().partition(" ")
                self.facts[word] = rest
                if word == last:
                    return
        finally:
            too_slow.cancel()
        self.end()
        raise RuntimeError(f"{self.name} ended before it said {last!r}:\n{self.log.read_text()}")

    def end(self, kill: bool = False) -> None:
        """Ends the process: in order if it can, or as if the power were cut."""
        if self.process.poll() is None:
            (self.process.kill if kill else self.process.terminate)()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Cluster:
    """A master and nodes, each a process of its own."""

    def __init__(self, folder: Path, *, nodes: int, memory: str, groups: int, master: list[str] | None = None) -> None:
        self.folder = folder
        self.servers: list[Server] = []
        self._master_words = ["master", "--groups", str(groups), "--reallocate-wait-ms", "0", *(master or [])]
        listens = ["--grpc-listen", ANYWHERE, "--frame-listen", ANYWHERE, "--admin-listen", ANYWHERE]
        self.master_server = self._start("master", [*self._master_words, *listens], "admin")
        #: What stores connect to.
        self.master = self.master_server.facts["grpc"]
        self.nodes = [
            self._start(
                f"node-{number}",
                [
                    "node",
                    "--master",
                    self.master,
                    "--memory-bytes",
                    memory,
                    "--drain",
                    "1s",
                    "--admin-listen",
                    ANYWHERE,
                ],
                "ready",
            )
            for number in range(nodes)
        ]

    def _start(self, name: str, words: list[str], last: str) -> Server:
        server = Server(self.folder, name, words, last)
        self.servers.append(server)
        return server

    def restart_master(self) -> None:
        """A master in place of one that ended, at the same addresses."""
        facts = self.master_server.facts
        listens = ["--grpc-listen", facts["grpc"], "--frame-listen", facts["frame"], "--admin-listen", ANYWHERE]
        self.master_server = self._start("master", [*self._master_words, *listens], "admin")

    def end(self) -> None:
        for server in reversed(self.servers):
            server.end()


RUNNING: list[Cluster] = []


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters that end with the session at the latest."""

    def start(**settings: Any) -> Cluster:
        folder = tmp_path_factory.mktemp("cluster")
        cluster = Cluster(folder, **({"nodes": 1, "memory": "64MiB", "groups": 1} | settings))
        RUNNING.append(cluster)
        return cluster

    yield start
    for cluster in RUNNING:
        cluster.end()
    RUNNING.clear()


@pytest.fixture
def own_cluster(start_cluster: Callable[..., Cluster]) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters for one test, which may harm them."""
    mine: list[Cluster] = []

    def start(**settings: Any) -> Cluster:
        mine.append(start_cluster(**settings))
        return mine[-1]

    yield start
    for cluster in mine:
        cluster.end()
        RUNNING.remove(cluster)


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """A master and two nodes."""
    return start_cluster(nodes=2, memory="1GiB", groups=4)


@pytest.fixture(scope="session")
def _near(cluster: Cluster) -> Iterator[moontide.Store]:
    with moontide.Store(cluster.master) as store:
        yield store


@pytest.fixture(scope="session")
def _far(cluster: Cluster) -> Iterator[moontide.Store]:
    with moontide.Store(cluster.master, local=False) as store:
        yield store


@pytest.fixture
def store(_near: moontide.Store) -> moontide.Store:
    """A store that maps the memory of the nodes."""
    return _near


@pytest.fixture
def far(_far: moontide.Store) -> moontide.Store:
    """A store that reads over TCP, as one on another host."""
    return _far


@pytest.fixture(params=["near", "far"])
def either(request: pytest.FixtureRequest, _near: moontide.Store, _far: moontide.Store) -> moontide.Store:
    """One after the other."""
    return {"near": _near, "far": _far}[request.param]


class Waiting:
    """An ``AsyncStore`` whose calls are waited for, so that one test serves both kinds of store."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: moontide.AsyncStore) -> None:
        self._loop = loop
        self._store = store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def awaited(*given: Any, **named: Any) -> Any:
            return await call(*given, **named)

        return lambda *given, **named: self._loop.run_until_complete(awaited(*given, **named))


@pytest.fixture(scope="session")
def _waiting(cluster: Cluster) -> Iterator[dict[str, Waiting]]:
    loop = asyncio.new_event_loop()

    async def connect(local: bool) -> moontide.AsyncStore:
        return await moontide.AsyncStore.connect(cluster.master, local=local)

    stores = {
        "async-near": loop.run_until_complete(connect(True)),
        "async-far": loop.run_until_complete(connect(False)),
    }
    yield {name: Waiting(loop, store) for name, store in stores.items()}
    for store in stores.values():
        store.close()
    loop.close()


@pytest.fixture(params=["near", "far", "async-near", "async-far"])
def caller(
    request: pytest.FixtureRequest, _near: moontide.Store, _far: moontide.Store, _waiting: dict[str, Waiting]
) -> Any:
    """Every kind of store: near and far, for threads and for tasks. All have the same calls."""
    return ({"near": _near, "far": _far} | _waiting)[request.param]


_numbers = itertools.count()


@pytest.fixture
def key(request: pytest.FixtureRequest, _near: moontide.Store) -> Iterator[Callable[[str], str]]:
    """Makes keys that no other test has; their objects go with the test."""
    prefix = f"{request.node.name}/{os.getpid()}.{next(_numbers)}/"
    yield lambda name="": prefix + name
    _near.batch_remove(_near.keys(prefix), force=True)


@pytest.fixture
def seed() -> int:
    """What random numbers of the test begin with: MOONTIDE_SEED, or another one each time. It is printed."""
    seed = int(os.environ.get("MOONTIDE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MOONTIDE_SEED={seed}")
    return seed


@pytest.fixture
def python(cluster: Cluster) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in another interpreter, with the master's address as its first argument."""

    def run(program: str, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", "-c", program, cluster.master, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)

    return run


@pytest.fixture
def stopped() -> Callable[[Server], AbstractContextManager[None]]:
    """Holds a server up for a while: it accepts what the kernel accepts for it, and answers nothing."""

    @contextmanager
    def hold(server: Server) -> Iterator[None]:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            # Threads stop one after the other; one of them may answer meanwhile.
            tasks = Path(f"/proc/{server.pid}/task")
            while any("State:\tT" not in task.read_text() for task in tasks.glob("*/status")):
                time.sleep(0.01)
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)

    return hold


# What servers log during a test, among what is shown when it fails.


def _log_ends() -> dict[Path, int]:
    logs = {server.log for cluster in RUNNING for server in cluster.servers}
    return {log: log.stat().st_size for log in logs if log.exists()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[LOG_ENDS] = _log_ends()
    return (yield)


LOG_ENDS = pytest.StashKey[dict[Path, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        before = item.stash.get(LOG_ENDS, {})
        for log in sorted(_log_ends()):
            with log.open("rb") as file:
                file.seek(before.get(log, 0))
                said = file.read()[-8192:].decode(errors="replace")
            if said:
                report.sections.append((f"log of {log.parent.name}/{log.stem}", said))
    return report
