"""web/stage.py lays out the pages of the site, and web/links.py finds links that lead nowhere.

Neither needs Sphinx. `make site` builds the pages; the lab has tests of its own.
"""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))[1:]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "web"))
    return runpy.run_path(str(ROOT / "web/stage.py"))


@pytest.mark.parametrize(
    ("path", "text", "page"),
    [
        ("notebooks/15_zero.ipynb", "[zero](../minidist/zero)", "[zero](../api/zero.md)"),
        ("notebooks/ko/00_start.ipynb", "[a](../../README.md#b)", "[a](../../run.md#b)"),
        ("README.md", "[MIT](LICENSE), [1](notebooks/01_rank.ipynb)", None),
        (
            "notebooks/09_pipeline_schedules.ipynb",
            "[`the lab`](../web/lab/index.html#schedules?ranks=8)",
            '<a href="../lab/index.html#schedules?ranks=8">`the lab`</a>',
        ),
    ],
)
def test_links_lead_to_pages_of_the_site(
    stage: dict[str, Any], path: str, text: str, page: str | None
) -> None:
    page = page or text.replace("[MIT](LICENSE)", "MIT")
    assert stage["rewrite"](text, ROOT / path, ROOT) == page


def test_every_page_is_listed_and_says_how_to_run_it(stage: dict[str, Any], tmp_path: Path) -> None:
    stage["main"](ROOT, tmp_path)
    front = (tmp_path / "index.md").read_text()
    assert re.findall(r'<a href="notebooks/(\w+)\.html">', front) == LESSONS
    assert front.count("✦</span>") == 10
    trees = re.findall(r"^```\{toctree\}\n(.*?)\n```", front, re.S | re.M)
    listed = [line for tree in trees for line in tree.split("\n\n")[1].split()]
    assert [name for name in listed if name[10:] in LESSONS] == [f"notebooks/{n}" for n in LESSONS]
    assert all([*tmp_path.glob(f"{name}.*")] for name in listed)
    lesson = (tmp_path / "notebooks/09_pipeline_schedules.ipynb").read_text()
    for way in "`make lab`", "../run.md#start-here", "75 minutes", "(solutions/09_", "(ko/09_":
        assert way in lesson, way
    korean = (tmp_path / "notebooks/ko/09_pipeline_schedules.ipynb").read_text()
    assert "[English](../09_pipeline_schedules.ipynb)" in korean
    run = (tmp_path / "run.md").read_text()
    assert "## In your own code" in run and "## Other ways in" in run and "01_rank" not in run


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    faults: Callable[[Path], tuple[list[str], int]]
    faults = runpy.run_path(str(ROOT / "web/links.py"))["faults"]
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for site in right, wrong:
        (site / "lab").mkdir(parents=True)
        (site / "lab/index.html").write_text("<a href='../index.html#here'></a>")
    (right / "index.html").write_text(
        "<p id=here><a href='lab/#mesh?ranks=8'></a><a href='https://a.example'></a>"
    )
    assert faults(right) == ([], 2)
    (wrong / "index.html").write_text(
        "<a href='gone.html'></a><a href='#here'></a><a href='../right/index.html'></a>"
        "<script src='https://a.example/a.js'></script>"
    )
    found, _ = faults(wrong)
    assert len(found) == 5 and all("index.html: " in fault for fault in found), found
