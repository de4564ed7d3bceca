"""The system's Chromium, driven by Playwright, for the tests that only `make browser` runs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[1] / "build/site"  # which `make site` makes
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(not find_spec("playwright"), reason="pip install '.[browser]'"),
    pytest.mark.skipif(not BROWSER, reason="no chromium"),
]


@contextmanager
def chromium(environ: dict[str, str] | None = None) -> Iterator[Any]:
    """A browser of Playwright's. It has a sandbox of none: in a container, root may make none."""
    from playwright.sync_api import sync_playwright  # here: the file is read where it is not

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, env=environ)
        try:
            yield browser
        finally:
            browser.close()
