"""Runs the code blocks of the documentation for Python, in order, and compares their output with the page.

A ``python`` block is executed. The following ``text`` block is its exact output; without one, the block must print
nothing. A block whose first line is a comment with a file name is also saved to that file, so that other programs of
the page can import it.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGES = ["tutorial.md", "python.md", "blocks.md", "ep.md", "nano.md"]
DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Returns the code blocks of a page: first line, code, and expected output."""
    text = page.read_text()
    found: list[tuple[int, str, str]] = []
    for match in BLOCK.finditer(text):
        kind, content = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        if kind == "python":
            found.append((line, content, ""))
        elif found:
            before, code, expected = found.pop()
            assert expected == "", f"{page.name}:{line}: two outputs of one block"
            found.append((before, code, content))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_doc_page_code_prints_documented_output(name, tmp_path, monkeypatch):
    if not DOCS.is_dir():
        pytest.skip("the pages are not available")
    monkeypatch.chdir(tmp_path)
    page = DOCS / name
    names: dict[str, object] = {"__name__": "__main__"}
    ran = blocks(page)
    assert len(ran) > 5
    for line, code, expected in ran:
        saved = re.match(r"# (\w+\.py)\n", code)
        if saved:
            with Path(saved[1]).open("a") as file:
                file.write(code + "\n\n")
        printed = io.StringIO()
        # Empty lines first, so that a traceback has the line numbers of the page.
        compiled = compile("\n" * (line - 1) + code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(compiled, names)
        assert printed.getvalue() == expected, f"{name}:{line}: unexpected output"


@pytest.mark.parametrize("name", PAGES)
def test_doc_page_links_resolve(name):
    page = DOCS / name
    if not page.is_file():
        pytest.skip("the pages are not available")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (DOCS / target).exists(), target
