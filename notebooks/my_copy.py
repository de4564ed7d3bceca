"""Copy the lessons into `my/`, where a learner may change them: `make lab` does it.

    python notebooks/my_copy.py [FOLDER]        (my by default)

What the learner changed is never overwritten; the rest follows the course. To know which is which,
the folder keeps a list of what was copied, `.copied.json`. By that list the checks, too, know a
learner's copy. What is solved there they write down beside it, in `.solved.json`: see
minidist/course/checks/solved.py.
"""

import hashlib
import json
import sys
from pathlib import Path

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import KERNEL_NAME, get_kernel_dict

HERE = Path(__file__).resolve().parent
LIST = ".copied.json"
WHAT = ["*.ipynb", "solutions/*.ipynb", "scripts/*.*", "ko/*.ipynb", "ko/*.md", "AGENTS.md"]
WHAT += ["museum/*.*", "museum/exhibits/*.py", "traces/*.*"]


def lessons() -> list[Path]:
    """What a learner needs of this folder: lessons, the Korean ones, solutions, the scripts that
    they run, the museum, ten traces, and a word for an AI assistant."""
    found = [path for what in WHAT for path in HERE.glob(what)]
    return sorted(path.relative_to(HERE) for path in found)


def contents(source: Path) -> bytes:
    """A file as the learner gets it. A notebook names the kernel that it will run in: JupyterLab
    would write that into it at once, and so every lesson that was opened would count as changed."""
    if source.suffix != ".ipynb":
        return source.read_bytes()
    notebook, kernel = json.loads(source.read_text()), get_kernel_dict()
    named = {key: kernel[key] for key in ("display_name", "language")}
    notebook["metadata"] = {
        "kernelspec": {"name": KERNEL_NAME, **named},
        "language_info": IPythonKernel.language_info,
    }
    # These are the bytes that JupyterLab saves, too.
    return (json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def copy_into(folder: Path) -> list[Path]:
    """Bring `folder` up to date. Returns the files that both the learner and the course changed."""
    folder.mkdir(parents=True, exist_ok=True)
    copied = json.loads((folder / LIST).read_text()) if (folder / LIST).exists() else {}
    now, kept = {}, []
    for name in lessons():
        new, target, before = contents(HERE / name), folder / name, copied.get(str(name))
        now[str(name)] = before
        if target.exists() and digest(target.read_bytes()) not in (before, digest(new)):
            if before != digest(new):
                kept.append(name)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(new)
        now[str(name)] = digest(new)
    for name in copied.keys() - now.keys():  # the course has given them another name
        target = folder / name
        if target.exists() and digest(target.read_bytes()) == copied[name]:
            target.unlink()
    (folder / LIST).write_text(json.dumps(now, indent=1))
    return kept


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "my")
    kept = copy_into(folder)
    print(f"Your copy of the lessons is in {folder.name}/: change it as you like.")
    for name in kept:
        print(f"  {name} is newer in the course. Yours is kept; the new one: notebooks/{name}")


if __name__ == "__main__":
    main()
