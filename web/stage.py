"""Lays out the sources of the site, for Sphinx: python web/stage.py ROOT OUT

OUT gets the notebooks with their stored outputs, the pictures, the landing page, the README's part
on running it, and the pages of the library (api.py). No notebook is run or changed: what a page
needs more than its notebook, such as the line that says how to run it, stands in the copy.
"""

import ast
import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import api

HERE = Path(__file__).resolve().parent
TREE = "```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```"
ROMAN = "I II III IV V VI VII VIII".split()


# ---- the course's table of lessons ----------------------------------------------------------


class Lesson(NamedTuple):
    stem: str  # of its file: 01_rank
    title: str  # 1 · Rank
    says: str
    minutes: int
    short: bool  # a lesson of the short way


def read_parts(root: Path) -> dict[str, list[Lesson]]:
    """The lessons by parts, as the map draws them (img/start.py) and the start page names them."""
    tree = ast.parse((root / "img/start.py").read_text())
    (parts,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS"
    )
    rows = re.findall(r"^\|(.*)\| \[(.*?)\]\(\d\d_(\w+)\.ipynb\) \|", start_page(root), re.M)
    stems = {path.stem[3:]: path.stem for path in (root / "notebooks").glob("[0-9]*.ipynb")}
    said = {name: (title, "✦" in mark) for mark, title, name in rows}
    return {
        f"{number} · {part}": [
            Lesson(stems[name], said[name][0], says.replace("\n", " "), minutes, said[name][1])
            for name, says, minutes in lessons
        ]
        for number, (part, lessons) in zip(ROMAN, parts, strict=False)
    }


def start_page(root: Path) -> str:
    cells = json.loads((root / "notebooks/00_start.ipynb").read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


# ---- links ----------------------------------------------------------------------------------


def rewrite(text: str, path: Path, root: Path) -> str:
    """The links of a Markdown text of the file `path`, as the site has them."""
    up = "../" * (len(path.relative_to(root).parts) - 1)

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        file, mark, anchor = target.partition("#")
        to = (path.parent / file).resolve()
        if "://" in target or not file or root not in to.parents:
            return found[0]
        inside = to.relative_to(root)
        if inside.is_relative_to("web/lab"):  # no page of Sphinx's, so it would not know it
            return f'<a href="{up}{inside.relative_to("web")}{mark}{anchor}">{label}</a>'
        if inside == Path("README.md"):
            return f"[{label}]({up}run.md{mark}{anchor})"
        if inside.is_relative_to("minidist"):
            page = api.page(str(inside))
            return f"[{label}]({up}{page})" if page else label
        if to.is_dir() or inside.name in ("CONTRIBUTING.md", "LICENSE"):
            return label  # only a clone has it
        return found[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


# ---- notebooks ------------------------------------------------------------------------------


def stage_notebook(path: Path, root: Path, lessons: dict[str, Lesson]) -> str:
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewrite("".join(cell["source"]), path, root)
        for output in cell.get("outputs", []):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
    first = notebook["cells"][0]
    title, _, rest = first["source"].partition("\n")
    first["source"] = f"{title}\n\n{run_line(path, root, lessons.get(path.stem))}\n{rest}"
    return json.dumps(notebook, ensure_ascii=False, indent=1)


def run_line(path: Path, root: Path, lesson: Lesson | None) -> str:
    """How to run this notebook, how long it takes, and where its solutions and its twin are."""
    name = path.relative_to(root / "notebooks")
    up = "../" * len(name.parts)
    korean = name.parts[0] == "ko"
    said = [
        f"**실행하기**: `make lab` 다음에 `{name}` ([설치]({up}run.md#start-here))"
        if korean
        else f"**Run it**: `make lab`, then `{name}` ([how to install]({up}run.md#start-here))"
    ]
    if lesson and name.parts[0] != "solutions":
        said.append(f"{lesson.minutes}분" if korean else f"{lesson.minutes} minutes")
    top = up.removesuffix("../")  # of the notebooks
    twins = {
        f"solutions/{path.name}": "풀이" if korean else "Solutions",
        f"ko/{path.name}": "한국어",
        path.name: "English" if korean else "The lesson",
    }
    for twin, label in twins.items():
        if twin != str(name) and (root / "notebooks" / twin).exists():
            said.append(f"[{label}]({top}{twin})")
    return f":::{{container}} run-line\n{' · '.join(said)}\n:::\n"


# ---- pages ----------------------------------------------------------------------------------


def front(root: Path, parts: dict[str, list[Lesson]]) -> str:
    """The landing page. The README has its cell and its table of ways."""
    readme = (root / "README.md").read_text()
    cell = re.search(r"```python\n.*?```\n\n```\n.*?```", readme, re.S)
    ways = re.search(r"^\| you want \|.*?\n\n", readme, re.S | re.M)
    assert cell and ways, "the README begins with a cell, and has a table of ways"
    lessons = [lesson for each in parts.values() for lesson in each]
    slots = {
        "cell": cell[0],
        "lessons": len(lessons),
        "map": lesson_map(parts),
        "ways": linked(ways[0], [lesson.stem for lesson in lessons]),
    }
    text = re.sub(r"@(\w+)", lambda slot: str(slots[slot[1]]), (HERE / "front.md").read_text())
    return rewrite(text, root / "index.md", root)


def linked(table: str, stems: list[str]) -> str:
    """A table of ways, in which the numbers of lessons lead to them."""

    def lesson(number: re.Match[str]) -> str:
        return f"[{number[0]}](notebooks/{stems[int(number[0]) - 1]}.ipynb)"

    return re.sub(r"\| \d[\d, ]*\|(?= \d)", lambda row: re.sub(r"\d+", lesson, row[0]), table)


def lesson_map(parts: dict[str, list[Lesson]]) -> str:
    lines = ['<nav class="map" aria-label="All lessons, by parts">']
    for part, lessons in parts.items():
        hours = sum(lesson.minutes for lesson in lessons) / 60
        lines.append(f"<section><h3>{part} <small>{hours:.1f} h</small></h3><ul>")
        for lesson in lessons:
            star = '&nbsp;<span title="the short way">✦</span>' * lesson.short
            title = re.sub("(?<=[a-z])(?=[A-Z])", "<wbr>", lesson.title)  # DistributedDataParallel
            lines.append(
                f'<li><a href="notebooks/{lesson.stem}.html"><b>{title}{star}</b> '
                f"{html.escape(lesson.says)} <small>{lesson.minutes} min</small></a></li>"
            )
        lines.append("</ul></section>")
    return "```{raw} html\n" + "\n".join([*lines, "</nav>"]) + "\n```"


def run_page(root: Path) -> str:
    """The README from "Start here" on, without its lessons: they stand on the landing page."""
    _, mark, text = (root / "README.md").read_text().partition("## Start here")
    before, table, after = re.split("(?m)^(## Lessons$)", text)
    assert mark and table, "the README has these headings: Start here, Lessons"
    text = rewrite(mark + before + after[after.index("## ") :], root / "README.md", root)
    return f"# Run it yourself\n\n{repository()}{text}"


def repository() -> str:
    """Where the repository is: on the site nothing else says it, and the workflow knows."""
    if not (name := os.environ.get("GITHUB_REPOSITORY")):
        return ""
    return f"The repository: <{os.environ['GITHUB_SERVER_URL']}/{name}>\n\n"


def trees(root: Path, parts: dict[str, list[Lesson]]) -> Iterator[str]:
    """What the list at the left of each page shows, in order."""
    korean = sorted((root / "notebooks/ko").glob("*.*"))
    yield TREE.format("Begin", "notebooks/00_start\nrun")
    for part, lessons in parts.items():
        yield TREE.format(part, "\n".join(f"notebooks/{lesson.stem}" for lesson in lessons))
    beside = "notebooks/museum/museum\nnotebooks/traces/ten_traces\nnotebooks/solutions/index"
    yield TREE.format("Beside the lessons", beside)
    yield TREE.format("한국어", "\n".join(f"notebooks/ko/{path.stem}" for path in korean))
    yield TREE.format("The library", "api/index")


def solutions(root: Path) -> str:
    stems = [path.stem for path in sorted((root / "notebooks/solutions").glob("*.ipynb"))]
    return "# Solutions\n\n```{toctree}\n:titlesonly:\n\n" + "\n".join(stems) + "\n```\n"


# ---- all of it ------------------------------------------------------------------------------


def main(root: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    parts = read_parts(root)
    lessons = {lesson.stem: lesson for each in parts.values() for lesson in each}
    pages = {
        "index.md": "\n\n".join([front(root, parts), *trees(root, parts)]),
        "run.md": run_page(root),
        "notebooks/solutions/index.md": solutions(root),
        **api.pages(root),
    }
    for path in (root / "notebooks").rglob("*.ipynb"):
        if ".ipynb_checkpoints" not in path.parts:
            pages[str(path.relative_to(root))] = stage_notebook(path, root, lessons)
    for path in (root / "notebooks/ko").glob("*.md"):
        pages[str(path.relative_to(root))] = rewrite(path.read_text(), path, root)
    for name, text in pages.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    files = shutil.ignore_patterns("*.ipynb", "*.md", "__pycache__", ".ipynb_checkpoints")
    shutil.copytree(root / "notebooks", out / "notebooks", ignore=files, dirs_exist_ok=True)
    shutil.copytree(root / "img", out / "img", ignore=shutil.ignore_patterns("*.py", "__pycache__"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
