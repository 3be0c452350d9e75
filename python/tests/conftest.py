"""Fixtures of the tests of ``moontide``: a cluster of real processes, stores, unique keys, seeds.

The cluster is started once: a master and two nodes on free ports of this host. ``store`` maps the nodes' memory.
``remote`` does not; it reads over TCP, as a program on another host does. The report of a failed test contains the logs
of the servers during the test.
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

pytest_plugins = ["ci_failures", "ci_skips"]

MIB = 1 << 20
READY_TIMEOUT_S = 20.0
ANY_PORT = "127.0.0.1:0"


class Server:
    """A process of ``moontide``, its start-up lines (``facts``) and its log."""

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
        timer = threading.Timer(READY_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                word, _, rest = line.strip().partition(" ")
                self.facts[word] = rest
                if word == last:
                    return
        finally:
            timer.cancel()
        self.end()
        raise RuntimeError(f"{self.name} ended before it printed {last!r}:\n{self.log.read_text()}")

    def end(self, kill: bool = False) -> None:
        """Terminates the process, or kills it with SIGKILL."""
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
    """A master and nodes, each in its own process."""

    def __init__(self, folder: Path, *, nodes: int, memory: str, groups: int, master: list[str] | None = None) -> None:
        self.folder = folder
        self.servers: list[Server] = []
        self._master_words = ["master", "--groups", str(groups), "--reallocation-delay-ms", "0", *(master or [])]
        listens = ["--grpc-listen", ANY_PORT, "--frame-listen", ANY_PORT, "--admin-listen", ANY_PORT]
        self.master_server = self._start("master", [*self._master_words, *listens], "admin")
        #: Address for stores.
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
                    "--drain-timeout",
                    "1s",
                    "--admin-listen",
                    ANY_PORT,
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
        """Starts a master at the addresses of the previous one."""
        facts = self.master_server.facts
        listens = ["--grpc-listen", facts["grpc"], "--frame-listen", facts["frame"], "--admin-listen", ANY_PORT]
        self.master_server = self._start("master", [*self._master_words, *listens], "admin")

    def end(self) -> None:
        for server in reversed(self.servers):
            server.end()


RUNNING: list[Cluster] = []


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, and ends them with the session."""

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
    """Starts clusters for one test, which may stop or kill their servers."""
    own: list[Cluster] = []

    def start(**settings: Any) -> Cluster:
        own.append(start_cluster(**settings))
        return own[-1]

    yield start
    for cluster in own:
        cluster.end()
        RUNNING.remove(cluster)


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """A master and two nodes."""
    return start_cluster(nodes=2, memory="1GiB", groups=4)


@pytest.fixture(scope="session")
def _shm(cluster: Cluster) -> Iterator[moontide.Store]:
    with moontide.Store(cluster.master) as store:
        yield store


@pytest.fixture(scope="session")
def _tcp(cluster: Cluster) -> Iterator[moontide.Store]:
    with moontide.Store(cluster.master, shm=False) as store:
        yield store


@pytest.fixture
def store(_shm: moontide.Store) -> moontide.Store:
    """A store that maps the memory of the nodes."""
    return _shm


@pytest.fixture
def remote(_tcp: moontide.Store) -> moontide.Store:
    """A store that reads over TCP, as on another host."""
    return _tcp


@pytest.fixture(params=["shm", "tcp"])
def either(request: pytest.FixtureRequest, _shm: moontide.Store, _tcp: moontide.Store) -> moontide.Store:
    """Both kinds of ``Store``: shm and TCP."""
    return {"shm": _shm, "tcp": _tcp}[request.param]


class BlockingAsyncStore:
    """An ``AsyncStore`` with blocking calls, so that one test covers both kinds of store."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: moontide.AsyncStore) -> None:
        self._loop = loop
        self._store = store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def run(*given: Any, **named: Any) -> Any:
            return await call(*given, **named)

        return lambda *given, **named: self._loop.run_until_complete(run(*given, **named))


@pytest.fixture(scope="session")
def _async_stores(cluster: Cluster) -> Iterator[dict[str, BlockingAsyncStore]]:
    loop = asyncio.new_event_loop()

    async def connect(shm: bool) -> moontide.AsyncStore:
        return await moontide.AsyncStore.connect(cluster.master, shm=shm)

    stores = {
        "async-shm": loop.run_until_complete(connect(True)),
        "async-tcp": loop.run_until_complete(connect(False)),
    }
    yield {name: BlockingAsyncStore(loop, store) for name, store in stores.items()}
    for store in stores.values():
        store.close()
    loop.close()


@pytest.fixture(params=["shm", "tcp", "async-shm", "async-tcp"])
def caller(
    request: pytest.FixtureRequest,
    _shm: moontide.Store,
    _tcp: moontide.Store,
    _async_stores: dict[str, BlockingAsyncStore],
) -> Any:
    """Every kind of store: shm and TCP, for threads and for asyncio. All have the same calls."""
    return ({"shm": _shm, "tcp": _tcp} | _async_stores)[request.param]


_numbers = itertools.count()


@pytest.fixture
def key(request: pytest.FixtureRequest, _shm: moontide.Store) -> Iterator[Callable[[str], str]]:
    """Makes keys that no other test uses. Removes their objects after the test."""
    prefix = f"{request.node.name}/{os.getpid()}.{next(_numbers)}/"
    yield lambda name="": prefix + name
    _shm.batch_remove(_shm.keys(prefix), force=True)


@pytest.fixture
def seed() -> int:
    """Seed of the random numbers of a test: MOONTIDE_SEED, or a random one. It is printed."""
    seed = int(os.environ.get("MOONTIDE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MOONTIDE_SEED={seed}")
    return seed


@pytest.fixture
def python(cluster: Cluster) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in another interpreter, with the address of the master as its first argument."""

    def run(program: str, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", "-c", program, cluster.master, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)

    return run


@pytest.fixture
def stopped() -> Callable[[Server], AbstractContextManager[None]]:
    """Stops a server with SIGSTOP inside a ``with`` block: the kernel accepts connections, and the server does not
    answer."""

    @contextmanager
    def stop(server: Server) -> Iterator[None]:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            # Threads stop one after the other; one of them may still answer meanwhile.
            tasks = Path(f"/proc/{server.pid}/task")
            while any("State:\tT" not in task.read_text() for task in tasks.glob("*/status")):
                time.sleep(0.01)
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)

    return stop


# Logs of the servers in the report of a failed test.


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
                text = file.read()[-8192:].decode(errors="replace")
            if text:
                report.sections.append((f"log of {log.parent.name}/{log.stem}", text))
    return report
