"""An engine as a process with requests and responses line by line: ``engine_sglang.py`` and ``engine_connector.py``."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: A start takes 15 to 40 s on two cores, and several times that during a build.
START_TIMEOUT_S = float(os.environ.get("MOONTIDE_E2E_MAX_S", "240"))
RESPONSE_TIMEOUT_S = 90.0
PROMPT_TOKENS = 468
MARK = "RESPONSE "


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Returns random tokens for a seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment variables of engines on this machine: see ``install.py``."""
    bin_folder = Path(sys.executable).parent
    paths = [str(HERE / "shim"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(paths),
        # SGLang compiles its hash function at first use; the folder keeps the result.
        "TORCH_EXTENSIONS_DIR": str(bin_folder.parent.parent / "torch_ext"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        **variables,
    }


class EngineProcess:
    """Process of an engine. The constructor waits until the engine is ready."""

    def __init__(self, log: Path, program: str, job: dict[str, Any], **variables: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", sys.executable, "-X", "faulthandler", str(HERE / program), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(**variables),
                start_new_session=True,
            )
        self._responses: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._next(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    self._responses.put(json.loads(line[len(MARK) :]))
                log.write(line)
                log.flush()
        self._responses.put(None)

    def _next(self, seconds: float) -> dict[str, Any]:
        reason = "the engine ended"
        try:
            response = self._responses.get(timeout=seconds)
        except queue.Empty:
            response, reason = None, f"no response within {seconds:.0f} s"
        if response is None:
            self.kill()
            raise AssertionError(f"{reason}:\n{self.text()[-6000:]}")
        return response

    def send(self, tokens: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens}) + "\n")
        self.process.stdin.flush()

    def ask(self, tokens: list[int], seconds: float = RESPONSE_TIMEOUT_S) -> dict[str, Any]:
        self.send(tokens)
        return self._next(seconds)

    def receive(self, seconds: float = RESPONSE_TIMEOUT_S) -> dict[str, Any]:
        """Waits for the response to an earlier `send`."""
        return self._next(seconds)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """Ends the engine: closes its input, then kills it after 60 s."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """Kills the engine and all its child processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def wait_for_keys(store: Any, prefix: str, count: int, seconds: float = 20.0) -> int:
    """Waits until the store has ``count`` objects: engines save in the background. Returns the number of objects."""
    deadline = time.monotonic() + seconds
    while (found := len(store.keys(prefix))) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
