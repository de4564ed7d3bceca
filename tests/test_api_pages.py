"""web/api.py writes the pages of the library from its sources: what they say is held against the
library as Python imports it."""

import ast
import importlib
import inspect
import pydoc
import re
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

import minidist as md

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "web"))
    return importlib.import_module("api")


def test_each_public_name_stands_once_with_what_it_takes(api: ModuleType) -> None:
    pages = "\n".join(text for path, text in api.pages(ROOT).items() if path.count("/") == 1)
    entry = r"^`{4,5}\{py:(data|class|function)\} ([\w.]+)(.*)"
    entries = {name: (kind, call) for kind, name, call in re.findall(entry, pages, re.M)}
    assert len(entries) == len(re.findall(entry, pages, re.M)) > 250
    found = {}
    for name, (kind, call) in entries.items():
        first, _, rest = name.partition(".")
        found[name] = value = attrgetter(rest)(md) if first == "md" else pydoc.locate(name)
        if kind != "data" and call:
            takes = api.parameters(ast.parse(f"def f{call}: ...").body[0])
            assert sorted(takes) == sorted(inspect.signature(value).parameters), name
    twice = [id(found[name]) for name, (kind, _) in entries.items() if kind != "data"]
    assert len(twice) == len(set(twice)), "a name stands in two rooms"
    for name in md.__all__:
        value = getattr(md, name)
        public = value.__dict__.get("__all__", ()) if isinstance(value, ModuleType) else ()
        assert f"md.{name}" in entries or isinstance(value, ModuleType), name
        for inner in public:
            what = getattr(value, inner)
            assert isinstance(what, ModuleType) or any(what is each for each in found.values())


@pytest.mark.parametrize(
    ("text", "page"),
    [
        (
            "size: bytes of it.\n    Or none. of: (*, C).",
            "- **size**: bytes of it.\n    Or none. **of**: (\\*, C).",
        ),
        (
            "As here:\n\n    md.ranks(4)\n\n    r(f)",
            "As here:\n\n```python\nmd.ranks(4)\n\nr(f)\n```",
        ),
        (
            "    a file   what `b` says,\n               and more",
            "- **a file**: what *B* says, and more",
        ),
        ("Lesson:\nzero. It is *one*, too.", "Lesson:\n[15](15.ipynb). It is *one*, too."),
    ],
)
def test_docstrings_become_markdown(api: ModuleType, text: str, page: str) -> None:
    lessons, names = {"zero": "[15](15.ipynb)"}, {"`b`": "*B*"}
    assert api.markdown(text, ["size", "of"], lessons, names) == page


def test_a_link_into_the_library_has_its_page(api: ModuleType) -> None:
    pages = api.pages(ROOT)
    for path in "minidist", "minidist/README.md", "minidist/rank.py", "minidist/pipeline/naive.py":
        assert api.page(path) in pages, path
    assert api.page("minidist/instruments/planner") == "api/planner.md"
