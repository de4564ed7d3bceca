"""Packs what the lab computes with into one file: python web/bundle.py build/site/lab/lab.zip

That is `web/lab/answers`, and the modules of minidist that it imports. A browser has no torch, so
here, too, there is none while they are imported: what cannot do without fails now.
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def sources() -> dict[str, Path]:
    """The files of the lab's Python, by their names in the zip."""
    sys.path.insert(0, str(ROOT))
    sys.modules["torch"] = None  # type: ignore[assignment]  # to import it is an ImportError

    from web.lab import answers

    folder = Path(answers.__file__).parent
    found = {f"answers/{path.name}": path for path in sorted(folder.glob("*.py"))}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "minidist" and module.__file__:
            path = Path(module.__file__)
            found[str(path.relative_to(ROOT))] = path
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name, path in sources().items():
            out.write(path, name)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
