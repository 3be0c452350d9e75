"""An engine as a process that is asked line by line: ``engine_sglang.py`` and ``engine_connector.py``."""

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
#: A start takes 15 to 40 s on two cores, and several times that beside a build.
START_MAX_S = float(os.environ.get("MOONTIDE_E2E_MAX_S", "240"))
ANSWER_MAX_S = 90.0
PROMPT_TOKENS = 468
MARK = "ANSWER "


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Tokens by chance, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


def environment(**more: str) -> dict[str, str]:
    """For engines on this machine: see ``install.py``."""
    bin_folder = Path(sys.executable).parent
    paths = [str(HERE / "shim"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(paths),
        # SGLang compiles its hash at first use, and should do so once.
        "TORCH_EXTENSIONS_DIR": str(bin_folder.parent.parent / "torch_ext"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        **more,
    }


class Lines:
    """Such a process. It is there when this is made."""

    def __init__(self, log: Path, program: str, told: dict[str, Any], **more: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", sys.executable, "-X", "faulthandler", str(HERE / program), json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(**more),
                start_new_session=True,
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._next(START_MAX_S)
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    self._answers.put(json.loads(line[len(MARK) :]))
                log.write(line)
                log.flush()
        self._answers.put(None)

    def _next(self, seconds: float) -> dict[str, Any]:
        why = "the engine ended"
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            answer, why = None, f"no answer within {seconds:.0f} s"
        if answer is None:
            self.kill()
            raise AssertionError(f"{why}:\n{self.text()[-6000:]}")
        return answer

    def send(self, tokens: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens}) + "\n")
        self.process.stdin.flush()

    def ask(self, tokens: list[int], seconds: float = ANSWER_MAX_S) -> dict[str, Any]:
        self.send(tokens)
        return self._next(seconds)

    def answer(self, seconds: float = ANSWER_MAX_S) -> dict[str, Any]:
        """To what was sent."""
        return self._next(seconds)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """In order, if it can."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """With all processes that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def wait_for_keys(store: Any, prefix: str, count: int, seconds: float = 20.0) -> int:
    """Engines save in the background: waits until the store has so many objects; how many it has."""
    until = time.monotonic() + seconds
    while (found := len(store.keys(prefix))) < count and time.monotonic() < until:
        time.sleep(0.1)
    return found
