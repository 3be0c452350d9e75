"""Runs the programs of ``examples/python``. Each checks its own results and exits with a code other than 0 if one is
wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"
#: test_blocks.py and test_ep.py run these, and check what they print.
TESTED_ELSEWHERE = {"decode.py", "experts.py"}
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in TESTED_ELSEWHERE)


def test_example_programs_are_found():
    if not FOLDER.is_dir():
        pytest.skip("the examples are not available")
    assert len(PROGRAMS) >= 3, PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_program_succeeds(name, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("MOONTIDE_")}
    command = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": ok\n"), done.stdout
