"""Skips under ``CI=true``, in an inner run of pytest: failures, but for the forms that CI does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_that_runs():
    pass

def test_without_driver():
    pytest.skip("no driver")

@pytest.mark.skipif(True, reason="no package")
def test_without_package():
    pass

@pytest.mark.not_in_ci("original-mooncake")
def test_of_excluded_form():
    pytest.skip("not installed")

@pytest.mark.xfail
def test_known_failure():
    raise AssertionError
"""
MODULE = 'import pytest\npytest.skip("no torch", allow_module_level=True)\n'
UNKNOWN = 'import pytest\n@pytest.mark.not_in_ci("tea")\ndef test_of_unknown_form():\n    pass\n'


def run(folder: Path, ci: str, **files: str) -> str:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    plugins = str(Path(__file__).parent)
    words = [sys.executable, "-m", "pytest", "-p", "ci_skips", "-p", "no:cacheprovider", "-rA", "--rootdir", str(folder)]
    environment = os.environ | {"CI": ci, "PYTHONPATH": plugins}
    ended = subprocess.run([*words, str(folder)], env=environment, capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


@pytest.mark.smoke
def test_skips_fail_under_ci_except_excluded_forms(tmp_path):
    text = run(tmp_path, "true", some=TESTS)
    # A skip by a marker happens before the test, so pytest calls the failure an error.
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in text, text
    assert "this test must run under CI=true: Skipped: no driver" in text
    assert "this test must run under CI=true: Skipped: no package" in text


def test_skips_are_skips_elsewhere(tmp_path):
    text = run(tmp_path, "", some=TESTS, module=MODULE)
    assert "1 passed, 4 skipped, 1 xfailed" in text, text


def test_skipped_module_fails_under_ci(tmp_path):
    text = run(tmp_path, "true", module=MODULE)
    assert "this test must run under CI=true: Skipped: no torch" in text and "1 error" in text, text


def test_unknown_form_is_a_usage_error(tmp_path):
    assert "is not in ci_skips.NOT_IN_CI" in run(tmp_path, "true", unknown=UNKNOWN)
