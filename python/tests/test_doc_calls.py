"""Names of Python calls in docs/calls.md exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import moontide
from moontide.compat import mooncake

PAGE = Path(__file__).resolve().parents[2] / "docs" / "calls.md"
#: Columns of the tables: name, and where its names are looked up.
COLUMNS = {
    5: [moontide.Store, moontide],
    8: [mooncake.MooncakeDistributedStore, mooncake],
}


def names(column: int) -> list[str]:
    """Returns the names in a column of the tables."""
    if not PAGE.is_file():
        pytest.skip("the pages are not available")
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    return [name for row in rows for name in row[column - 1].split("`")[1::2]]


@pytest.mark.parametrize("column", COLUMNS)
def test_python_names_of_the_page_exist(column):
    found = names(column)
    assert len(found) > 30
    missing = [name for name in found if not any(hasattr(owner, name) for owner in COLUMNS[column])]
    assert missing == []


def test_async_store_has_the_calls_that_the_page_of_python_marks():
    page = PAGE.with_name("python.md")
    if not page.is_file():
        pytest.skip("the pages are not available")
    marked = [line for line in page.read_text().splitlines() if line.startswith("| `") and "` * |" in line]
    calls = [name.split("(")[0] for line in marked for name in line.split("|")[1].split("`")[1::2]]
    assert len(calls) > 20
    assert [name for name in calls if not hasattr(moontide.AsyncStore, name)] == []
