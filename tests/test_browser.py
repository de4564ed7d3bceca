"""Lesson 1 in a real browser, as a learner sees it: opened, run from start to end, plots looked at.

`make browser` runs it; `make test` does not. It needs Chromium and its driver (Debian: apt install
chromium chromium-driver). The lesson's outputs are taken away first: what is seen is new.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from programs import Family, eventually

ROOT = Path(__file__).resolve().parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
LESSON = "01_rank.ipynb"
PLOT, MARKDOWN = ".jp-OutputArea-output img", ".jp-MarkdownOutput img"
SHOW = "arguments[0].scrollIntoView({block: 'center'})"
SOON, LESSON_ENDS = 120, 600  # seconds, on a busy machine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(SOON + LESSON_ENDS),
    pytest.mark.skipif(not find_spec("selenium"), reason="pip install '.[browser]'"),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium, or no chromedriver"),
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
        options = [f"--ServerApp.root_dir={folder}", f"--ServerApp.port={self.port}"]
        options += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", "--no-browser"]
        options += ["--allow-root", f"--LabApp.workspaces_dir={self.tmp}", "--LabApp.news_url="]
        self.log = (folder / "lab.log").open("w")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**self.environ(), **own, "MINIDIST_TIMING": "soft"},
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
    from selenium import webdriver  # here: the file is read where selenium is not

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{word}")
    environ = {k: v for k, v in lab.environ().items() if "proxy" not in k.lower()}
    service = webdriver.ChromeService(executable_path=DRIVER, env=environ)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def seen(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def click(page: Any, selector: str, words: str = "") -> None:
    """Click what has the words, once it is there."""
    from selenium.common.exceptions import WebDriverException

    deadline = time.monotonic() + SOON
    while True:
        for element in seen(page, selector):
            try:
                if words in element.text:
                    return element.click()
            except WebDriverException:  # drawn anew meanwhile, or covered
                pass
        assert time.monotonic() < deadline, f"nothing to click: {selector} {words}"
        time.sleep(0.2)


def width_in_sight(page: Any, picture: Any) -> int:
    """How wide a picture is, in its own pixels, when a reader scrolls to it; 0 if it is broken."""
    page.execute_script(SHOW, picture)
    return page.execute_script("return arguments[0].naturalWidth", picture)


def test_lesson_1_runs_in_a_browser_and_shows_its_plots(lab: Lab, page: Any) -> None:
    cells = [cell for cell in lab.read()["cells"] if cell["cell_type"] == "code"]
    stored = json.loads((ROOT / "notebooks" / LESSON).read_text())["cells"]
    plots = sum("image/png" in str(cell.get("outputs")) for cell in stored)
    assert plots > 0
    page.get(f"http://127.0.0.1:{lab.port}/lab/tree/my/{LESSON}")

    def menu(name: str, command: str) -> None:
        click(page, ".lm-MenuBar-itemLabel", name)
        click(page, f".lm-Menu-item[data-command='{command}']")

    assert eventually(lambda: len(seen(page, ".jp-CodeCell")) == len(cells), SOON)
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

    assert eventually(lambda: len(seen(page, PLOT)) == plots, SOON)
    for picture in [*seen(page, MARKDOWN), *seen(page, PLOT)]:
        assert eventually(lambda picture=picture: width_in_sight(page, picture) > 300, SOON)
    page.execute_script(SHOW, seen(page, PLOT)[0])
    time.sleep(1)
    page.save_screenshot(os.environ.get("SHOT") or str(lab.tmp / "lesson.png"))
