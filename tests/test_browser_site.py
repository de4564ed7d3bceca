"""The site and its lab in Chromium: what a reader sees, presses, and sends to somebody else.

`make browser` builds the site and runs this. Each page that is opened here must load nothing from
another host, and leave no error in the browser's console.
"""

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import SITE

ROOMS = ["planner", "schedules", "collectives", "mesh"]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
START, SLIDER = 8.0, 0.05  # seconds, at most: the best of several tries
SOON = 60_000  # milliseconds, on a busy machine
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()

pytestmark = [*chromium.MARKS, pytest.mark.timeout(600)]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert SITE.exists(), "make site"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    server.handle_error = lambda *_: None  # a page was left before it had everything
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """`visit("lab/index.html")` is that page. At the end of the test, all pages have been quiet."""
    faults, contexts = [], []

    def visit(path: str, *, quiet: bool = True, script: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport=DESK, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SOON)
        if quiet:
            page.on("console", lambda said: said.type == "error" and faults.append(said.text))
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("response", lambda got: got.status >= 400 and faults.append(got.url))
        page.on("request", lambda sent: own(sent.url) or faults.append(sent.url))
        if script:
            page.add_init_script(script)
        page.goto(path if "://" in path else address + path)
        return page

    def own(url: str) -> bool:
        return url.startswith((address, "data:", "blob:", "file:"))

    yield visit
    for context in contexts:
        context.close()
    assert not faults


def lab(visit: Callable[..., Any], state: str = "", **options: Any) -> Any:
    """The lab's page in this state, answered."""
    page = visit(f"lab/index.html{state}", **options)
    answered(page)
    return page


def answered(page: Any) -> None:
    page.wait_for_selector("#sentence:not(:empty)")
    page.wait_for_selector("#result:not([aria-busy])")


def go(page: Any, room: str) -> None:
    """To another room, by its link."""
    page.evaluate("document.querySelector('#sentence').textContent = ''")
    page.click(f"#to-{room}")
    answered(page)


def controls(page: Any) -> dict[str, Any]:
    """What the controls of a room say."""
    return page.eval_on_selector_all(
        "#controls :is(input, select)",
        "all => Object.fromEntries(all.map((each) => [each.id, [each.value, each.checked]]))",
    )


# ---- how fast -------------------------------------------------------------------------------

# From the moment when a slider moves to the moment when the answer is drawn.
MOVE = """async ([id, value]) => {
  const slider = document.getElementById(id);
  const sentence = document.querySelector("#sentence"); // which changes together with the result
  const drawn = new Promise((done) => {
    new MutationObserver(done).observe(sentence, { childList: true });
  });
  const start = performance.now();
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  await drawn;
  return (performance.now() - start) / 1000;
}"""


def test_the_lab_starts_and_a_slider_answers_in_time(visit: Callable[..., Any]) -> None:
    starts = []
    for _ in range(3):
        page = lab(visit)
        starts.append(page.evaluate("performance.now() / 1000"))
        if starts[-1] < START:
            break
    moves = {}
    for room, slider in zip(ROOMS, ["batch", "microbatches", "ranks", "gpus"], strict=True):
        go(page, room)
        moves[room] = [page.evaluate(MOVE, [slider, i % 4]) for i in range(12)]
        print(f"{room}: a slider answers in {1000 * min(moves[room]):.0f} ms at best")
    print(f"the lab started in {min(starts):.1f} s")
    assert min(starts) < START
    assert all(min(times) < SLIDER for times in moves.values())


# ---- states and links -----------------------------------------------------------------------


def test_a_found_layout_can_be_sent(visit: Callable[..., Any]) -> None:
    page = lab(visit, "#planner?world_size=64&batch=1024&tensor=8")
    before = controls(page)
    page.click("#search")
    page.wait_for_function("document.querySelector('#sentence').innerText.startsWith('Found')")
    page.wait_for_function("!location.hash.includes('tensor=8')")
    assert controls(page) != before

    other = lab(visit, page.evaluate("location.hash"))
    assert controls(other) == controls(page) and other.inner_text("#notice") == ""
    assert other.inner_text("#result") == page.inner_text("#result")


@pytest.mark.parametrize("room", ROOMS)
def test_a_moved_slider_stands_in_the_address(visit: Callable[..., Any], room: str) -> None:
    page = lab(visit, f"#{room}")
    slider = page.locator("#controls input[type=range]:visible").first
    name, start = slider.get_attribute("id"), slider.get_attribute("aria-valuetext")
    slider.focus()
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") != start
    page.wait_for_function(f"location.hash.includes('{name}=')")
    answered(page)
    other = lab(visit, page.evaluate("location.hash"))
    assert controls(other) == controls(page)
    for part in ("#sentence", "#result"):
        assert other.inner_text(part) == page.inner_text(part)


def test_nonsense_in_a_link_is_told_and_the_rest_holds(visit: Callable[..., Any]) -> None:
    page = lab(visit, "#schedules?ranks=banana&microbatches=16&colour=red&%=%")
    notice = page.inner_text("#notice")
    assert "banana" in notice and "colour" in notice
    assert page.get_attribute("#microbatches", "aria-valuetext").startswith("16")
    for room in ROOMS:  # also where the answer moves a control: it stays until the reader does so
        page = lab(visit, f"#{room}?ranks=2&step=14&gpus=8&gpu=127&colour=red")
        page.wait_for_timeout(500)
        assert "colour" in page.inner_text("#notice")
    page = lab(visit, "#kitchen?<b>=<script>alert(1)</script>")
    assert "kitchen" in page.inner_text("#notice") and page.inner_text("#sentence")


def test_a_layout_that_does_not_divide_is_a_sentence(visit: Callable[..., Any]) -> None:
    page = lab(visit, "#planner?world_size=8&tensor=128")
    assert "error" in page.get_attribute("#sentence", "class")
    assert re.fullmatch(r"\w[^{}]* [^{}]*", page.inner_text("#sentence"))
    assert page.inner_text("#result") == ""
    page.click("#start")
    page.wait_for_selector("#sentence:not(.error)")


# ---- where it cannot run --------------------------------------------------------------------


def test_without_webassembly_a_sentence(visit: Callable[..., Any]) -> None:
    page = visit("lab/index.html", script="delete globalThis.WebAssembly")
    assert "no WebAssembly" in page.inner_text("#notice")


def test_from_a_file_a_sentence(visit: Callable[..., Any]) -> None:
    page = visit((SITE / "lab/index.html").as_uri(), quiet=False)
    assert "only from a server" in page.inner_text("#notice")


def test_without_scripts_a_sentence(visit: Callable[..., Any]) -> None:
    page = visit("lab/index.html", java_script_enabled=False)
    assert "make site" in page.inner_text("#notice")


@pytest.mark.parametrize("missing", ["pyodide/pyodide.mjs", "pyodide/python_stdlib.zip", "lab.zip"])
def test_without_a_file_of_pythons_a_sentence(
    visit: Callable[..., Any], address: str, missing: str
) -> None:
    page = visit("index.html", quiet=False)
    page.context.route(f"**/{missing}", lambda route: route.fulfill(status=404))
    page.goto(f"{address}lab/index.html")
    page.wait_for_function("!/starting/.test(document.querySelector('#notice').innerText)")
    notice = page.inner_text("#notice")
    assert Path(missing).name in notice or "make site" in notice
    assert "\n" not in notice and not page.is_visible("#room")


# ---- keyboard, screen reader, phone, themes -------------------------------------------------


# Notes what has the focus; it must be seen there. Returns what it is, if it is not.
FOCUSED = """() => {
  globalThis.reached ??= new Set();
  const focused = document.activeElement;
  reached.add(focused);
  const { outlineStyle, outlineWidth } = getComputedStyle(focused);
  const seen = outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
  return focused === document.body || seen ? "" : focused.outerHTML.slice(0, 80);
}"""
MISSED = """() => [...document.querySelectorAll("a[href], button, input, select, summary")]
  .filter((each) => each.closest("#controls") || each.tabIndex >= 0)
  .filter((each) => each.checkVisibility() && !reached.has(each))
  .map((each) => each.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("room", ROOMS)
def test_the_keyboard_alone_reaches_everything(visit: Callable[..., Any], room: str) -> None:
    page = lab(visit, f"#{room}")
    for _ in range(page.locator("a, button, input, select, summary").count() + 9):
        page.keyboard.press("Tab")
        unseen = page.evaluate(FOCUSED)
        assert not unseen, f"{unseen} has the focus, and nothing shows it"
    assert page.evaluate(MISSED) == []


def test_a_screen_reader_has_words_for_everything(visit: Callable[..., Any]) -> None:
    page = lab(visit)
    assert page.get_attribute("#sentence", "aria-live") == "polite"
    pictures = 0
    for room in ROOMS:
        go(page, room)
        for control in page.locator("#controls :is(input, select)").all():
            assert control.evaluate(
                "each => [...each.labels].map((label) => label.textContent).join('')"
            )
        for button in page.locator("button:visible").all():
            assert button.inner_text() or button.get_attribute("aria-label")
        for picture in page.locator("#result svg:not([aria-hidden])").all():
            pictures += 1
            assert picture.get_attribute("role") == "img"
            assert len(picture.get_attribute("aria-label") or "") > 10
    assert pictures > len(ROOMS)


def judge(page: Any, where: str) -> list[str]:
    """What is wrong with a page in both themes, and on a phone."""
    wrong = []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_timeout(300)  # colours fade into each other
        told = page.evaluate(CONTRAST)
        assert told["judged"] > 10
        alike = {(hard["ink"], hard["ground"]): hard for hard in reversed(told["hard"])}
        for (ink, ground), hard in alike.items():
            colors = f"({ink}) on ({ground})"
            wrong.append(f"{where}, {theme}: {hard['ratio']:.2f}, {colors}: “{hard['text']}” …")
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(300)
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > PHONE["width"]:
        wrong.append(f"{where}: {wide} px wide")
    page.set_viewport_size(DESK)
    return wrong


def test_the_lab_can_be_read_in_both_themes_and_on_a_phone(visit: Callable[..., Any]) -> None:
    page, wrong = lab(visit), []
    for room in ROOMS:
        go(page, room)
        wrong += judge(page, room)
    assert not wrong, "\n".join(wrong)


def sample() -> list[str]:
    """The first page of each folder of the site, and every twentieth of all."""
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    pages = [page for page in pages if not page.startswith(("lab/", "_static/"))]
    firsts = {str(Path(page).parent): page for page in reversed(pages)}
    return sorted({"index.html", "search.html", *firsts.values(), *pages[::20]})


def test_the_site_can_be_read_in_both_themes_and_on_a_phone(visit: Callable[..., Any]) -> None:
    wrong = []
    assert len(sample()) > 10
    for path in sample():
        page = visit(path)
        wrong += judge(page, path)
        page.context.close()
    assert not wrong, "\n".join(wrong)
