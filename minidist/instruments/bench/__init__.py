"""`python -m minidist bench`: our figures beside those of others, taken in one run.

A laptop's speed drifts, so a time alone says little. Here A, B, A, B, … are timed in turns, and
the *ratio* of each pair is what counts: its median, and its spread from the smallest to the
largest. A round in which other processes took part of the machine is thrown away (`quiet`).

A benchmark is a module of this room whose name stands in `NAMES`. It has

- a docstring, whose first line says what is compared: `bench --help` prints it;
- `run(rounds, picture)`, which measures, prints its tables (`show`), leaves a PNG at the path
  `picture` (`draw`, say) and returns its rows, a list of `Row`;
- `TARGETS`, if there are any: a list of `Target`, each with the ratios that some rows shall reach.
  How they stand is said at the end of a run; a target that is missed is no error.

Times come from `in_turns(subjects, rounds)`, where a subject is a function that returns seconds.
It also works on ranks, if all of them call it: then pass `root=`, the pid of the program. `alone`
takes times in blocks. `times.row(what, ours, theirs)` makes a `Row` of two of the subjects.
"""

import ast
import importlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from minidist.instruments.bench.rows import Noise, Row, Target, draw, show
from minidist.instruments.bench.turns import Times, alone, in_turns

__all__ = ["NAMES", "Noise", "Row", "Target", "Times", "alone", "draw", "in_turns", "run", "show"]

NAMES = ["launch", "collectives", "link", "ddp", "pipeline", "tensor", "zero", "fsdp", "averaging"]
NAMES += ["saving", "watching", "long_sequences", "experts", "tracing"]


def about(name: str) -> str:
    """The first line of a benchmark's docstring, for which nothing is imported."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run(names: list[str], rounds: int, folder: Path, record: Path | None = None) -> None:
    """Run benchmarks by name, leave a PNG of each in `folder`, and say how the targets stand. All
    that was measured goes into the file `record`, as JSON."""
    benchmarks = {
        name: importlib.import_module(f"minidist.instruments.bench.{name}") for name in names
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process")
    taken: dict[str, list[Row]] = {}
    for name, module in benchmarks.items():
        picture = folder / f"bench_{name}.png"
        taken[name] = module.run(rounds, picture) or []
        print(f"drawn: {picture}")
    rows = [row for found in taken.values() for row in found]
    targets = [t for module in benchmarks.values() for t in getattr(module, "TARGETS", [])]
    if targets:
        print("\nhow the targets stand: times faster")
        print(*[target.line(rows) for target in targets], sep="\n")
    if record:
        found = {name: [row.record() for row in rows] for name, rows in taken.items()}
        stand = [
            {"name": t.name, "stands": t.stands(rows), "cases": _cases(t, rows)} for t in targets
        ]
        everything = {"machine": machine(), "rounds": rounds, "benchmarks": found, "targets": stand}
        record.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {record}")


def machine() -> dict[str, Any]:
    """What the figures are from."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cases(target: Target, rows: list[Row]) -> list[dict[str, Any]]:
    pairs = zip(target.reach.items(), target.measured(rows), strict=True)
    return [
        {"what": what, "against": against, "reach": reach, "measured": measured}
        for ((what, against), reach), measured in pairs
    ]
