"""Accepted exercises are kept as files that can be imported, and a trainer is made of them."""

import linecache
import shutil
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.course import trainer
from minidist.course.checks import kept, solved

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def copy(tmp_path, monkeypatch):
    """A learner's copy, with the solutions in it."""
    (tmp_path / solved.COPIED).write_text("{}")
    shutil.copytree(ROOT / "notebooks/solutions", tmp_path / "solutions")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def notebook(monkeypatch):
    """Runs cells as a kernel does: they share names, and each is a file for linecache alone."""
    names: dict = {"__name__": "__main__"}

    def run(cell: str) -> dict:
        file = f"<cell {len(linecache.cache)}>"
        linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
        exec(compile(cell, file, "exec"), names)
        return names

    return run


def cells_of(lesson: str) -> list[str]:
    (path,) = ROOT.glob(f"notebooks/solutions/??_{lesson}.ipynb")
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return ["\n".join(line for line in cell.split("\n") if line[:1] != "%") for cell in cells]


@pytest.mark.parametrize("check", kept.PARTS)
def test_what_a_check_accepts_in_a_notebook_is_kept_and_imports(check, notebook) -> None:
    for cell in cells_of(kept.PARTS[check]):
        head, _, call = cell.partition(f"check.{check}(")
        names = notebook("\n".join(x for x in head.split("\n") if x[:6] != "check."))
        if call:
            kept.keep(check, names[call.partition(")")[0]])
            break
    part = trainer.part(check)
    assert part.whose == "yours"
    assert callable(part.along())


def test_a_part_has_what_it_uses_of_other_cells_and_nothing_more(notebook) -> None:
    notebook("from functools import partial\nimport torch.distributed as dist\nimport os, sys")
    notebook("class Base:\n    def step(self):\n        pass\n\nraise_it = [] and 1 / 0\nlimit = 4")
    names = notebook("def helper(x):\n    return partial(max, limit)(x)\n\nprint(limit)")
    names = notebook("class Mine(Base):\n    def __init__(self):\n        self.x = helper(dist)")
    source = kept.source_of(names["Mine"])
    for needed in "class Base", "def helper", "import torch.distributed as dist", "limit = 4":
        assert needed in source
    for other in "import os", "print", "raise_it":
        assert other not in source
    compile(source, "part", "exec")


def test_a_file_that_is_of_no_use_is_named_and_the_solution_taken(copy, notebook) -> None:
    save = notebook("import os\ndef save(state, path):\n    os.replace(state, path)")["save"]
    kept.keep("save", save)
    file = copy / kept.FOLDER / "save.py"
    accepted = file.read_text()
    assert trainer.part("save").whose == "yours"
    head, _, body = accepted.partition("\n")
    broken = "import nowhere\n"
    for text, said in (
        (accepted.replace("replace", "rename"), "edited since its check accepted it"),
        (f"# {head.split()[1]} 0123456789ab\n{body}", "accepted by an older check"),
        (f"# {kept.digest(broken)} {head.split()[2]}\n{broken}", "does not import: ModuleNotFound"),
        ("", "edited since"),
    ):
        file.write_text(text)
        part = trainer.part("save")
        assert part.whose.startswith(f"the solution's: {said}"), part.whose
        assert callable(part.along())
    file.unlink()
    assert trainer.part("save").whose == "the solution's: not solved yet"


def test_what_cannot_be_written_down_stops_no_check(copy, notebook) -> None:
    (copy / kept.FOLDER).mkdir()
    for answer in partial(max, 1), object(), notebook("def f(x):\n    return x")["f"].__get__(1):
        kept.keep("save", answer)
    kept.keep("save", eval("lambda state, path: None", {"__name__": "__main__"}))
    assert trainer.part("save").whose.startswith("the solution's: ")


def test_only_a_copy_keeps_and_only_parts_are_kept(copy, notebook) -> None:
    def exercise():
        pass

    kept.keep("scan", exercise)
    (copy / solved.COPIED).unlink()
    kept.keep("save", exercise)
    assert not (copy / kept.FOLDER).exists()
    assert "not your copy" in repr(trainer.parts())


def test_a_part_takes_its_group_for_the_world() -> None:
    with md.ranks(4) as r:
        for rank, found in enumerate(r(along_both, trainer.part("halving_doubling"))):
            d, t = divmod(rank, 2)
            assert found == [2 * t + 2, 4 * d + 1, (t, 2), (1 - t) + 2 * d, 1 + 2 * d]


def along_both(part) -> list:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: list = []
    for axis in "data", "tensor":
        x = torch.full((4,), float(dist.get_rank()))
        part.along(mesh.get_group(axis))(x)
        found.append(int(x[0]))
    world = trainer.World(mesh.get_group("tensor"))
    found.append((world.get_rank(), world.get_world_size()))
    x, y = torch.tensor(float(dist.get_rank())), torch.zeros(())
    sending = world.isend(x, 1 - world.get_rank())
    world.recv(y, src=1 - world.get_rank())
    sending.wait()
    world.broadcast(x, 1)
    return [*found, int(y), int(x)]
