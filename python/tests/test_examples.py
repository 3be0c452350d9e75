"""Runs every example in a docstring. doctest does not search extension modules, so this module collects the
examples."""

from __future__ import annotations

import doctest
import inspect
import types
from collections.abc import Iterator

import pytest

import moontide
from moontide import _binary, _native, blocks, ep, errors
from moontide import store as store_module
from moontide.ep import reference as ep_reference
from moontide.kv import cache as kv_cache
from moontide.kv import naming as kv_naming

MODULES = [moontide, _native, errors, store_module, _binary, kv_cache, kv_naming, blocks, ep, ep_reference]


def documented(name: str, thing: object, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Returns the names and docstrings of all objects of this package."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    text = getattr(thing, "__doc__", None)
    if isinstance(text, str):
        yield name, text
    if inspect.isclass(thing) or (isinstance(thing, types.ModuleType) and thing in MODULES):
        for inner_name, inner in sorted(vars(thing).items()):
            inner = getattr(inner, "__func__", inner)
            ours = getattr(inner, "__module__", None) or getattr(thing, "__module__", "") or ""
            if inspect.ismodule(inner) or not ours.startswith("moontide") or inner_name == "__class__":
                continue
            yield from documented(f"{name}.{inner_name}", inner, seen)


def examples() -> dict[str, doctest.DocTest]:
    seen: set[int] = set()
    parser = doctest.DocTestParser()
    found = {}
    for module in MODULES:
        for name, text in documented(module.__name__, module, seen):
            example = parser.get_doctest(inspect.cleandoc(text), {}, name, None, None)
            if example.examples:
                found[name] = example
    return found


EXAMPLES = examples()


def test_docstring_examples_are_collected():
    assert {"moontide", "moontide.Store", "moontide.View", "moontide.Tensor", "moontide.RawMemory"} <= set(EXAMPLES)
    assert any(name.endswith("Store.put") for name in EXAMPLES)
    assert any(name.endswith("BatchError") for name in EXAMPLES)
    assert any(name.endswith("SequenceView") for name in EXAMPLES)
    assert {"moontide.ep", "moontide.ep.reference"} <= set(EXAMPLES)


@pytest.fixture(scope="module")
def dev() -> Iterator[moontide.Dev]:
    with moontide.dev(64 << 20) as dev:
        yield dev


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example_passes(name, dev, capsys):
    with dev.store() as store:
        store.remove_all(force=True)
        example = EXAMPLES[name]
        example.globs = {"moontide": moontide, "dev": dev, "store": store, "binary": moontide.binary}
        ran = doctest.DocTestRunner().run(example)
    assert ran.failed == 0, capsys.readouterr().out


def test_public_api_has_docstrings():
    missing = []
    everything = [getattr(module, name) for module in (moontide, blocks, ep, ep_reference) for name in module.__all__]
    for kind in everything:
        if inspect.isclass(kind):
            missing += [kind.__name__] * (not kind.__doc__)
            for name, member in vars(kind).items():
                if not name.startswith("_") and callable(member) and not member.__doc__:
                    missing.append(f"{kind.__name__}.{name}")
        elif callable(kind) and not kind.__doc__:
            missing.append(kind.__name__)
    assert missing == []
