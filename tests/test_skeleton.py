"""The project around the code: one pinned environment, the import order, the installed package."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def run(*command: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )


# ---- pyproject.toml, constraints.txt and environment.yml agree ----------------------------


def pins() -> dict[str, str]:
    """constraints.txt as {name: version}; every line is an exact version."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==" and "+" not in pin.version, line
            found[canonicalize_name(requirement.name)] = pin.version
    return found


def declared() -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *EXTRAS["course"], *EXTRAS["test"]]
    return [Requirement(line) for line in lines]


MORE = [Requirement(line) for extra in ("tools", "site", "browser") for line in EXTRAS[extra]]


def test_each_dependency_is_pinned_within_its_bounds() -> None:
    for requirement in [*declared(), *MORE]:
        pin = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), requirement


@pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] != (3, 11),
    reason="constraints.txt lists what Linux and Python 3.11 install",
)
def test_everything_installed_is_pinned() -> None:
    """What a dependency brings along is pinned too, so no two installations differ.

    Except for torch's CUDA libraries: a CPU build has none, and torch pins its own.
    """
    cuda = re.compile("nvidia|cuda|triton")
    there = [*declared(), *filter(installed, MORE)]
    assert {name for name in closure(there) if not cuda.match(name)} <= pins().keys()


def test_a_pin_admits_the_first_python_that_we_do() -> None:
    """Else pip tries older versions of all the rest, for longer than we waited (19 minutes). Debian
    12 has Python 3.11.2."""
    first = PROJECT["requires-python"].removeprefix(">=")
    there = importlib.metadata.distributions()
    needs = {canonicalize_name(d.name): d.metadata.get("Requires-Python") for d in there}
    pinned = {name: needs[name] or "" for name in needs.keys() & pins().keys()}
    assert len(pinned) > 100
    assert not {n: need for n, need in pinned.items() if first not in SpecifierSet(need)}


def installed(requirement: Requirement) -> bool:
    return any(importlib.metadata.distributions(name=requirement.name))


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of these distributions and of all that they need, as installed here."""
    seen: set[tuple[str, str]] = set()
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            node = (canonicalize_name(requirement.name), extra)
            if node not in seen:
                seen.add(node)
                lines = importlib.metadata.requires(requirement.name) or []
                todo += [need for line in lines if applies(need := Requirement(line), extra)]
    return {name for name, _ in seen}


def applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_conda_takes_python_from_conda_forge_and_the_rest_from_pyproject() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, by_pip = conda["dependencies"]
    name, _, version = python.partition("=")
    assert name == "python" and version in SpecifierSet(PROJECT["requires-python"])
    assert pip == "pip"
    assert by_pip == {"pip": ["-c constraints.txt", "-e .[course,test]"]}
    assert conda["channels"] == ["conda-forge", "nodefaults"]
    assert set(EXTRAS) == {"course", "test", "tools", "site", "browser"}


# ---- the import order is the syllabus -----------------------------------------------------


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sysconfig.get_path("scripts")) / "lint-imports"
    return run(tool, "--no-logo", "--no-cache", cwd=project)


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("rank", "def late():\n    import minidist.collectives", "minidist.rank -> minidist.coll"),
        ("stray", "", "minidist.stray"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, line: str, told: str) -> None:
    """`make lint` asks of the order itself."""
    copy_project(tmp_path)
    with (tmp_path / "minidist" / f"{module}.py").open("a") as appended:
        appended.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1 and told in result.stdout, result.stdout + result.stderr


# ---- the installed package ----------------------------------------------------------------


def copy_project(to: Path) -> None:
    """What the package is built from; a copy, because a build writes into its folder."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    shutil.copytree(
        ROOT / "minidist", to / "minidist", ignore=shutil.ignore_patterns("__pycache__")
    )


# Imports minidist as if only the distributions behind its own dependencies were installed.
IMPORT_ALONE = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
import minidist
print(minidist.__file__)
"""


def test_a_plain_install_gives_a_working_import(tmp_path: Path) -> None:
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    copy_project(source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    built = run(*pip, "--target", site, source, cwd=elsewhere)
    assert built.returncode == 0, built.stderr

    written = {path.relative_to(ROOT) for path in (ROOT / "minidist").rglob("*.py")}
    installed = {path.relative_to(site) for path in (site / "minidist").rglob("*.py")}
    assert installed == written
    texts = {path.relative_to(ROOT) for path in (ROOT / "minidist").rglob("*.toml")}
    assert all((site / name).is_file() for name in (*texts, "minidist/py.typed"))

    needed = closure([Requirement(line) for line in PROJECT["dependencies"]])
    absent = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module != "minidist" and needed.isdisjoint(map(canonicalize_name, owners))
    ]
    assert {"IPython", "matplotlib", "sklearn"} <= set(absent)
    imported = run(sys.executable, "-c", IMPORT_ALONE, *absent, cwd=elsewhere, PYTHONPATH=str(site))
    assert imported.stdout.strip() == str(site / "minidist" / "__init__.py"), imported.stderr


# ---- the README ---------------------------------------------------------------------------


def test_the_readme_examples_print_what_they_say(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (cell, shown), (script, printed) = re.findall(
        r"```python\n(.*?)```\n\n```\n(\S+ .*?)```", readme, re.DOTALL
    )[:2]
    example = tmp_path / "example.py"
    example.write_text(script)
    cells = map(nbformat.v4.new_code_cell, ("%load_ext minidist", cell, f"%run {example}"))
    notebook = nbformat.v4.new_notebook(cells=[*cells])  # one kernel: torch is imported once
    NotebookClient(notebook, timeout=60, kernel_name="python3", coalesce_streams=True).execute()
    said = [output.text for cell in notebook.cells[1:] for output in cell.outputs]
    assert said == [shown, printed]
    alone = run(sys.executable, example, cwd=tmp_path)  # by plain python
    assert alone.stdout == printed, alone.stderr
