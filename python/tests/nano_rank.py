"""A rank of a cache, for tests: runs Python code from standard input, with ``cache`` as a global, and prints the value
of ``out``. Ranks are real processes; the code that they run is part of each test."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

REPLY_TIMEOUT_S = 120.0


def drivers() -> dict[str, str]:
    """Returns the variables that select the fake driver for both vendors (docs/devices.md). A process that accesses
    device memory other than by copies is killed."""
    fake = os.environ.get("MOONTIDE_FAKE_DRIVER_LIB")
    if fake is None:
        return {}
    options = os.environ.get("MOONTIDE_FAKE_DRIVER", "blind=1")
    return {"MOONTIDE_CUDA_LIB": fake, "MOONTIDE_HIP_LIB": fake, "MOONTIDE_FAKE_DRIVER": options}


class Rank:
    """Handle of a rank, for the test."""

    def __init__(self, path: Path, rank: int, ranks: int, **settings: Any) -> None:
        words = [sys.executable, __file__, json.dumps({"path": str(path), "rank": rank, "ranks": ranks} | settings)]
        environment = os.environ | drivers()
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def send(self, code: str, **names: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([code, names]) + "\n")

    def receive(self) -> Any:
        assert self.process.stdout is not None
        timer = threading.Timer(REPLY_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, "the rank has ended; see its output above"
        return json.loads(line)

    def run(self, code: str, **names: Any) -> Any:
        """Runs code and returns the value of ``out``."""
        self.send(code, **names)
        return self.receive()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def dedent(code: str) -> str:
    lines = [line for line in code.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(line[indent:] for line in lines)


def main() -> None:
    import numpy

    import moontide
    from moontide.nano import NanoKVCache, NOT_READY, Ticket

    settings = json.loads(sys.argv[1])
    cache = NanoKVCache(settings.pop("heap_bytes", 16 << 20), **settings)

    def noise(seed: int, size: int) -> Any:
        return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)

    names: dict[str, Any] = {
        "cache": cache,
        "moontide": moontide,
        "NOT_READY": NOT_READY,
        "noise": noise,
        "numpy": numpy,
        "ticket_of": lambda packed: Ticket.from_bytes(bytes.fromhex(packed)),
        "packed": lambda ticket: bytes(ticket).hex(),
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        code, given = json.loads(line)
        names |= given | {"out": None}
        try:
            exec(compile(ast.parse(dedent(code)), "<test>", "exec"), names)
        except Exception as error:
            traceback.print_exc()
            names["out"] = f"{type(error).__name__}: {error}"
        print(json.dumps(names["out"]), flush=True)


if __name__ == "__main__":
    main()
