"""The list of failed tests, from an inner run of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = """
import time

def test_that_passes():
    pass

def test_that_fails():
    time.sleep(0.1)
    raise AssertionError
"""


def test_failed_tests_are_listed_with_their_times(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    failures = tmp_path / "failures.txt"
    words = [sys.executable, "-m", "pytest", "-p", "ci_failures", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = os.environ | {"MOONTIDE_FAILURES": str(failures), "PYTHONPATH": str(Path(__file__).parent)}
    before = time.time()
    ended = subprocess.run([*words, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    (line,) = failures.read_text().splitlines()
    start, stop, name = line.split("\t")
    assert before <= float(start) <= float(stop) - 0.1 <= time.time()
    assert name == "test_some.py::test_that_fails"
