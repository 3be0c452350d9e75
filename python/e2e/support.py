"""Helpers of the end-to-end tests: engines as processes, and clusters."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moontide

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
READY_TIMEOUT_S = 20.0
#: A start takes 15 to 25 s on two cores, and several times that during a build.
ENGINE_TIMEOUT_S = float(os.environ.get("MOONTIDE_E2E_MAX_S", "240"))
ANY_PORT = "127.0.0.1:0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        raise RuntimeError(f"{name} ended before it printed {last!r}:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            # A stopped process does not handle SIGTERM.
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Cluster:
    """A master and nodes, each in its own process, on free ports."""

    def __init__(self, folder: Path, nodes: int = 1, memory: str = "256MiB", node: list[str] | None = None) -> None:
        listens = ["--grpc-listen", ANY_PORT, "--frame-listen", ANY_PORT, "--admin-listen", ANY_PORT]
        words = ["master", "--groups", "1", "--reallocation-delay-ms", "0", *listens]
        self.folder = folder
        self.master_server = Server(folder, "master", words, "admin")
        self.servers = [self.master_server]
        #: Address for stores.
        self.master = self.master_server.facts["grpc"]
        self._node = ["node", "--master", self.master, "--drain-timeout", "1s", "--admin-listen", ANY_PORT]
        self._node += node or []
        self.nodes: list[Server] = []
        for _ in range(nodes):
            self.add_node(memory)

    def add_node(self, memory: str, *words: str) -> Server:
        name = f"node-{len(self.servers)}"
        server = Server(self.folder, name, [*self._node, "--memory-bytes", memory, *words], "ready")
        self.servers.append(server)
        self.nodes.append(server)
        return server

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the connector, with a long lookup timeout for slow machines."""
        return {"master": self.master, "lookup_timeout_ms": 10000}

    def store(self, **settings: Any) -> moontide.Store:
        return moontide.Store(self.master, **settings)

    def end(self) -> None:
        for server in reversed(self.servers):
            server.end()


@dataclass
class Run:
    """Results of an engine: outputs by round, counters and durations."""

    outputs: list[list[dict[str, Any]]] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    log: str = ""

    @property
    def tokens(self) -> list[list[int]]:
        return [output["tokens"] for outputs in self.outputs for output in outputs]


class Engine:
    """``engine_vllm.py`` as a process. A thread reads its output."""

    def __init__(self, folder: Path, job: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self._log = folder / f"engine-{time.monotonic_ns()}.log"
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        # PYTHONHASHSEED would become part of the block hashes.
        env.pop("PYTHONHASHSEED", None)
        env |= environment or {}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", sys.executable, str(HERE / "engine_vllm.py"), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
                start_new_session=True,
            )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.run = Run()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith("E2E "):
                    self._lines.put(json.loads(line[4:]))
                else:
                    log.write(line)
                    log.flush()
        self._lines.put(None)

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = ENGINE_TIMEOUT_S) -> dict[str, Any]:
        """Waits for a line that satisfies the condition. Records all lines meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                self.kill()
                raise AssertionError(f"timed out after {seconds:.0f} s:\n{self.text()[-6000:]}") from None
            if line is None:
                raise AssertionError(f"the engine ended:\n{self.text()[-6000:]}")
            self._keep(line)
            if condition(line):
                return line

    def _keep(self, line: dict[str, Any]) -> None:
        if "tokens" in line:
            while len(self.run.outputs) <= line["round"]:
                self.run.outputs.append([])
            self.run.outputs[line["round"]].append(line)
        elif "counters" in line:
            self.run.counters.append(line["counters"])
            self.run.seconds.append(line["seconds"])

    def go(self) -> None:
        """Starts the next round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self, seconds: float = ENGINE_TIMEOUT_S) -> Run:
        self.until(lambda line: "over" in line, seconds)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        self.run.log = self.text()
        return self.run

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kills the engine and all its child processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)


def corrupt(server: Server, content: bytes) -> int:
    """Flips a byte in every copy of ``content`` in the shared memory of a node. Returns the number of copies."""
    found = 0
    with Path(f"/proc/{server.pid}/maps").open() as maps, Path(f"/proc/{server.pid}/mem").open("r+b", 0) as memory:
        for line in maps:
            bounds, rights, *_ = line.split()
            if rights != "rw-s":
                continue
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            memory.seek(first)
            data = memory.read(last - first)
            at = data.find(content)
            while at >= 0:
                middle = at + len(content) // 2
                memory.seek(first + middle)
                memory.write(bytes([data[middle] ^ 0xFF]))
                found += 1
                at = data.find(content, at + 1)
    return found
