"""The same calls to Mooncake itself and to us, with the same answers.

Runs where MOONTIDE_MOONCAKE_PYTHON names the Python of an environment in which Mooncake is installed:

    python -m venv /tmp/mooncake
    /tmp/mooncake/bin/pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy
    MOONTIDE_MOONCAKE_PYTHON=/tmp/mooncake/bin/python pytest python/tests/test_mooncake_parity.py
"""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from mooncake_support import unused_port

CALLS = pathlib.Path(__file__).with_name("mooncake_calls.py")
REAL = os.environ.get("MOONTIDE_MOONCAKE_PYTHON")


def answers(python: str, module: str, master: str) -> list[str]:
    ended = subprocess.run([python, str(CALLS), module, master], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    # Mooncake writes about itself to standard output as well.
    return [line for line in ended.stdout.splitlines() if line.startswith(("[", '"'))]


@pytest.fixture
def mooncake_master():
    port, metrics = unused_port(), unused_port()
    program = pathlib.Path(REAL).with_name("mooncake_master")
    where = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={metrics}"]
    process = subprocess.Popen([program, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as door:
                if door.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def ours(own_cluster):
    return answers(sys.executable, "moontide.compat.mooncake", own_cluster(nodes=0, groups=4).master)


def test_the_calls_are_answered(ours):
    assert len(ours) > 150


@pytest.mark.skipif(not REAL, reason="MOONTIDE_MOONCAKE_PYTHON does not name a Python with Mooncake")
def test_mooncake_answers_the_same(ours, mooncake_master):
    assert ours == answers(REAL, "mooncake.store", mooncake_master)
