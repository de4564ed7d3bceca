"""Checks each link of a built site: python web/links.py build/site

A link leads to a file of the site, and to a place in it where it names one. Pages, their scripts,
styles and pictures load nothing from another host.
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script", "img", "iframe", "source", "video", "audio", "embed", "object"}


class Page(HTMLParser):
    """The links of a page, what it loads, and the places that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.places |= {has[name] for name in ("id", "name") if name in has}
        for name in ("href", "src", "data"):
            if name in has:
                styles = tag == "link" and has.get("rel") in ("stylesheet", "icon", "preload")
                (self.loads if tag in LOADS or styles else self.links).append(has[name])


read = cache(Page)


def faults(site: Path) -> tuple[list[str], int]:
    """What is wrong with the links of a site, and how many links it has."""
    found, count = [], 0
    for path in sorted(site.rglob("*.html")):
        page, here = read(path), path.relative_to(site)
        for link in page.loads:
            if urlsplit(link).netloc:
                found.append(f"{here}: loads {link}")
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            if not to.is_relative_to(site) or not to.is_file():
                found.append(f"{here}: {link} leads nowhere")
            elif parts.fragment and to.suffix == ".html" and to.parent.name != "lab":
                if unquote(parts.fragment) not in read(to).places:  # the lab reads its address
                    found.append(f"{here}: {link} names no place there")
    return found, count


if __name__ == "__main__":
    wrong, links = faults(Path(sys.argv[1]).resolve())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{links:,} links, {len(wrong)} broken")
    sys.exit(bool(wrong))
