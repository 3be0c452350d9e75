"""Under ``CI=true`` a test that could not run is a failure. A plugin of pytest, which both conftest files load.

A skip means that something is missing: a package, a driver, memory. CI installs everything that the tests need, so a skip
there hides a test. The exceptions are forms that CI does not run on purpose; their tests name the form with the marker
``not_in_ci``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

NOT_IN_CI = {
    "original-mooncake": "it needs a second environment, with the original Mooncake; run by hand when a version changes",
    "types-before-3.12": "types are checked with one interpreter, the newest; the others have no mypy",
}
"""Forms that CI does not run, with the reasons."""


def is_ci() -> bool:
    return os.environ.get("CI") == "true"


def form_of(item: pytest.Item) -> str | None:
    """Returns the form that a test names with its marker."""
    marker = item.get_closest_marker("not_in_ci")
    if marker is None:
        return None
    (form,) = marker.args
    if form not in NOT_IN_CI:
        raise pytest.UsageError(f"{item.nodeid}: {form!r} is not in ci_skips.NOT_IN_CI")
    return str(form)


def fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"this test must run under CI=true: {reason}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_in_ci(form): may be skipped under CI=true; forms are in ci_skips.NOT_IN_CI")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        form_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    report = yield
    if report.skipped and is_ci():
        fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    is_xfail = hasattr(report, "wasxfail")
    if report.skipped and is_ci() and not is_xfail and form_of(item) is None:
        fail(report)
    return report
