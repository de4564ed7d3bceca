"""Lesson 1 in a real browser, as a learner sees it: opened, run from start to end, plots looked at.

`make browser` runs it; `make test` does not. It needs Chromium (Debian: apt install chromium). The
lesson's outputs are taken away first: what is seen is new.
"""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from programs import Family, eventually

ROOT = Path(__file__).resolve().parents[1]
LESSON = "01_rank.ipynb"
PLOT, MARKDOWN = ".jp-OutputArea-output img", ".jp-MarkdownOutput img"
# Where each name in the file browser stands, and whether it is cut off.
NAMES = """names => names.map(
    n => [n.getBoundingClientRect().y, n.innerText, n.scrollWidth > n.clientWidth])"""
SOON, LESSON_ENDS = 120, 600  # seconds, on a busy machine

pytestmark = [
    *chromium.MARKS,
    pytest.mark.timeout(SOON + LESSON_ENDS),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc"),
]


class Lab(Family):
    """JupyterLab on a learner's copy of the course, whose lesson has no outputs yet."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        runpy.run_path(str(ROOT / "notebooks/my_copy.py"))["copy_into"](folder / "my")
        shutil.copytree(ROOT / "img", folder / "img")  # which the lessons show
        self.lesson = folder / "my" / LESSON
        notebook = self.read()
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
        self.lesson.write_text(json.dumps(notebook))

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        own = {f"JUPYTER_{what}_DIR": str(self.tmp / what) for what in ("CONFIG", "RUNTIME")}
        own["JUPYTER_CONFIG_PATH"] = "notebooks/jupyter"  # as in the Makefile
        options = [f"--ServerApp.root_dir={folder}", f"--ServerApp.port={self.port}"]
        options += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", "--no-browser"]
        options += ["--allow-root", f"--LabApp.workspaces_dir={self.tmp}"]
        self.log = (folder / "lab.log").open("w")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**self.environ(), **own, "MINIDIST_TIMING": "soft"},
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def read(self) -> Any:
        return json.loads(self.lesson.read_text())

    def listens(self) -> bool:
        with socket.socket() as here:
            return here.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """As Ctrl + C, twice: no kernel and no rank stays."""
        self.server.terminate()
        gone = self.gone_within(30)
        self.end()
        self.server.wait()
        self.log.close()
        assert gone and not self.listens()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    try:
        assert eventually(lab.listens, SOON), (tmp_path / "lab.log").read_text()
        yield lab
    finally:
        lab.close()


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    with chromium.chromium(lab.environ()) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(1000 * SOON)
        yield page


def width_in_sight(picture: Any) -> int:
    """How wide a picture is, in its own pixels, when a reader scrolls to it; 0 if it is broken."""
    picture.scroll_into_view_if_needed()
    return picture.evaluate("image => image.naturalWidth")


def listed(folder: Path) -> list[str]:
    """Lessons, other files, folders."""
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    last = {path: (path.is_dir(), path.suffix != ".ipynb", path.name) for path in there}
    return [path.name for path in sorted(there, key=lambda path: last[path])]


def test_lesson_1_runs_in_a_browser_and_shows_its_plots(lab: Lab, page: Any) -> None:
    cells = [cell for cell in lab.read()["cells"] if cell["cell_type"] == "code"]
    stored = json.loads((ROOT / "notebooks" / LESSON).read_text())["cells"]
    plots = sum("image/png" in str(cell.get("outputs")) for cell in stored)
    assert plots > 0
    page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/my/{LESSON}")

    def menu(name: str, command: str) -> None:
        page.locator(".lm-MenuBar-itemLabel", has_text=name).first.click()
        page.locator(f".lm-Menu-item[data-command='{command}']").click()

    assert eventually(lambda: page.locator(".jp-CodeCell").count() == len(cells), SOON)
    # Before the kernel is there, "Run all" does nothing, and says nothing.
    page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for()
    assert page.locator(".jp-mod-dirty").count() == 0  # nobody has touched it
    assert page.locator(".Toastify__toast").count() == 0
    shown = page.locator(".jp-DirListing-itemText").evaluate_all(NAMES)
    assert [name for _, name, _ in sorted(shown)] == listed(lab.lesson.parent)
    assert [name for _, name, is_cut in shown if is_cut] == []
    menu("Run", "runmenu:run-all")

    def ended() -> bool:
        """Saved, with every cell run. (What a browser draws may lack what is out of sight.)"""
        menu("File", "docmanager:save")
        time.sleep(2)
        counts = [c["execution_count"] for c in lab.read()["cells"] if c["cell_type"] == "code"]
        return None not in counts

    assert eventually(ended, LESSON_ENDS)
    for cell in lab.read()["cells"]:
        if cell["cell_type"] == "code":
            raised = any(output["output_type"] == "error" for output in cell["outputs"])
            assert raised == ("raises-exception" in cell["metadata"].get("tags", [])), cell

    assert eventually(lambda: page.locator(PLOT).count() == plots, SOON)
    for picture in [*page.locator(MARKDOWN).all(), *page.locator(PLOT).all()]:
        assert eventually(lambda picture=picture: width_in_sight(picture) > 300, SOON)
    page.locator(PLOT).first.scroll_into_view_if_needed()
    page.screenshot(path=os.environ.get("SHOT") or str(lab.tmp / "lesson.png"))
