"""Which lessons have changed since the last commit on main. By day these are tested with all of
their answers and with their solution, the others with one right and one wrong answer; at night all.

`python tests/changed.py` prints the solutions of those that have changed.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    """What git says, or nothing if it does not know."""
    found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def files() -> set[str] | None:
    """The files that differ from the last commit on main: the first parent of what is checked out,
    or where a branch has left main. None if git does not know it, as in an archive."""
    left = git("merge-base", "HEAD", "origin/main")
    base = left if left != git("rev-parse", "HEAD") else ""
    if not (base := base or git("rev-parse", "--verify", "HEAD^1")):
        return None
    new = git("ls-files", "--others", "--exclude-standard")
    return {*git("diff", "--name-only", base).splitlines(), *new.splitlines()}


def parts(readme: str) -> dict[str, list[str]]:
    """The files and folders of each lesson: its notebook, its solution, its checks, the answers to
    them, and the rooms that the README's table names beside it."""
    found = {}
    for name, rooms in re.findall(r"^\| \d+ \| \[(\w+)\]\(\S+\) \| (.*?) \|", readme, re.MULTILINE):
        lesson = name.partition("_")[2]
        found[lesson] = [f"notebooks/{name}.ipynb", f"notebooks/solutions/{name}.ipynb"]
        found[lesson] += [f"minidist/course/checks/{lesson}{end}" for end in (".py", ".toml")]
        found[lesson] += [f"tests/answers/{lesson}.py"]
        found[lesson] += re.findall(r"\]\((minidist/\S+)\)", rooms)
    return found


def among(changed: set[str], wanted: list[str]) -> bool:
    """Whether one of the wanted files, or one in a wanted folder, has changed."""
    return any(file == part or file.startswith(f"{part}/") for file in changed for part in wanted)


def lessons() -> set[str]:
    """The lessons that have changed; all of them if nobody knows."""
    of, changed = parts((ROOT / "README.md").read_text()), files()
    return {lesson for lesson in of if changed is None or among(changed, of[lesson])}


if __name__ == "__main__":
    for path in sorted(ROOT.glob("notebooks/solutions/*.ipynb")):
        if path.stem.partition("_")[2] in lessons():
            print(path.relative_to(ROOT))
