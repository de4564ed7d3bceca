"""Run the notebooks in place, so that their stored outputs are what `make test` will see.

    python notebooks/execute.py [NOTEBOOK ...]        (all of them by default; or: make notebooks)

This is the only way in which outputs are made: every notebook runs from top to bottom in a fresh
kernel, in its own folder, under the same conditions as nbval's. A notebook with a failing cell is
left as it was. A lesson that has a Korean form (`notebooks/ko`) hands its outputs on to that.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from translate import follow

HERE = Path(__file__).resolve().parent
CELL_TIMEOUT = 120  # seconds, as in `make test`

# What a notebook's metadata holds, whatever editor saved it.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def execute(path: Path) -> None:
    """Run one notebook and write it back, clean; an error leaves the file alone."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # no warnings about its own sockets
        resources={"metadata": {"path": str(path.parent)}},
    ).execute(env=kernel_environment())
    clean(notebook)
    nbformat.write(notebook, path)
    korean = HERE / "ko" / path.name
    if path.parent == HERE and korean.exists():
        follow(korean)


def kernel_environment() -> dict[str, str]:
    """Pytest sets this variable, and under it ipykernel leaves file descriptors 1 and 2 alone:
    text that bypasses sys.stdout shows here neither more nor less than under nbval."""
    return {**os.environ, "PYTEST_CURRENT_TEST": "notebooks/execute.py"}


def clean(notebook: NotebookNode) -> None:
    """Drop what differs between machines and runs, and keep what the reader needs."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                alt = output.metadata.get("image/png", {}).get("alt")
                output.metadata = nbformat.from_dict({"image/png": {"alt": alt}} if alt else {})
            if output.output_type == "error":
                output.traceback = [shorten_paths(line) for line in output.traceback]


def shorten_paths(text: str) -> str:
    """Show a file of a traceback from the repository or the environment on, not from `/`.

    Only tracebacks are treated so: nbval does not compare them. A path in any other output
    belongs to one machine, and tests/test_notebooks.py refuses it.
    """
    places = str(HERE.parent), sys.prefix, sys.base_prefix
    for place in sorted(places, key=len, reverse=True):  # one may lie in another, as .venv does
        text = text.replace(f"{place}/", "")
        home = str(Path.home())
        if place.startswith(f"{home}/"):  # IPython writes ~ for the home folder
            text = text.replace(f"~{place.removeprefix(home)}/", "")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Run notebooks in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="all notebooks by default")
    folders = HERE, HERE / "solutions", HERE / "museum", HERE / "traces"
    everything = [path for folder in folders for path in sorted(folder.glob("*.ipynb"))]
    paths = [path.resolve() for path in parser.parse_args().notebooks] or everything
    if any(path.parent == HERE / "ko" for path in paths):
        parser.error("a Korean lesson has the outputs of the English one: run that")
    failed = 0
    for path in paths:
        name = os.path.relpath(path)
        start = time.perf_counter()
        try:
            execute(path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            print(f"{name}: FAILED, left as it was\n{error}", file=sys.stderr, flush=True)
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{len(paths) - failed} of {len(paths)} notebooks executed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
