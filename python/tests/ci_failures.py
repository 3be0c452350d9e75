"""Writes when failed tests ran, for ``cargo xtask``, which retries those that failed while the machine stalled.

A plugin of pytest, which both conftest files load. ``MOONTIDE_FAILURES`` names the file; without it nothing is written.
Each line has the start and the end of a test, in seconds since 1970, and its name, separated by tabs.
"""

from __future__ import annotations

import os

import pytest

FILE = "MOONTIDE_FAILURES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(FILE)
    if path and report.failed:
        with open(path, "a") as file:
            file.write(f"{report.start}\t{report.stop}\t{report.nodeid}\n")
