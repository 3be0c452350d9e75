"""Compares the results of the same calls to Mooncake and to Moontide.

The comparison runs if MOONTIDE_MOONCAKE_PYTHON is the Python of an environment in which Mooncake is installed:

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


def results(python: str, module: str, master: str) -> list[str]:
    ended = subprocess.run([python, str(CALLS), module, master], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    # Mooncake also logs to standard output.
    return [line for line in ended.stdout.splitlines() if line.startswith(("[", '"'))]


@pytest.fixture
def mooncake_master():
    port, metrics = unused_port(), unused_port()
    program = pathlib.Path(REAL).with_name("mooncake_master")
    where = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={metrics}"]
    process = subprocess.Popen([program, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def ours(own_cluster):
    return results(sys.executable, "moontide.compat.mooncake", own_cluster(nodes=0, groups=4).master)


def test_parity_script_completes_against_moontide(ours):
    assert len(ours) > 150


@pytest.mark.not_in_ci("original-mooncake")
@pytest.mark.skipif(not REAL, reason="MOONTIDE_MOONCAKE_PYTHON is not set")
def test_answers_equal_those_of_mooncake(ours, mooncake_master):
    assert ours == results(REAL, "mooncake.store", mooncake_master)
