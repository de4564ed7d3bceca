"""`python -m minidist bench`: our figures beside those of others, and how our targets stand.

A laptop's speed drifts, so a time alone says little. Here A, B, A, B, … are timed in turns, and
the *ratio* of each pair is what counts: its median, and its spread from the smallest to the
largest. A round in which other processes took part of the machine is taken again (`turns`).

A benchmark is a module of this room whose name stands in `NAMES`. It has

- a docstring, whose first line says what is compared: `bench --help` prints it;
- `run(rounds)`, which measures and returns a list of `Row`;
- `TARGETS`, a list of `Target`: ratios that some of the rows shall reach. How they stand is said at
  the end of a run; a target that is missed is no error.

Times come from `in_turns(subjects, rounds)`, where a subject is a function that returns seconds.
It also works on ranks, if all of them call it: then pass `root=`, the pid of the program.
`times.row(what, ours, theirs)` makes a `Row` of two of the subjects.
"""

import ast
import importlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minidist.instruments.bench.rows import Row, Target, show
from minidist.instruments.bench.turns import Times, in_turns

__all__ = ["NAMES", "Row", "Target", "Times", "about", "in_turns", "machine", "run"]

NAMES = ["launch", "collectives", "ddp", "pipeline", "tensor", "fsdp"]
NAMES += ["saving", "watching", "long_sequences", "experts", "tracing"]


def about(name: str) -> str:
    """The first line of a benchmark's docstring, for which nothing is imported."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run(names: list[str], rounds: int, record: Path | None = None) -> None:
    """Run benchmarks by name, print a table of each, and say how the targets stand. All that was
    measured goes into the file `record`, as JSON."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process")
    taken: dict[str, list[Row]] = {}
    targets: list[Target] = []
    for name in names:
        module = importlib.import_module(f"minidist.instruments.bench.{name}")
        taken[name] = module.run(rounds)
        targets += module.TARGETS
        show(f"{name}: {about(name)}", taken[name])
    rows = [row for found in taken.values() for row in found]
    print("\nhow the targets stand: times faster")
    print(*[target.line(rows) for target in targets], sep="\n")
    if record:
        found = {name: [asdict(row) for row in rows] for name, rows in taken.items()}
        everything = {"machine": machine(), "rounds": rounds, "benchmarks": found}
        everything["targets"] = {t.name: [t.stands(rows), *t.measured(rows)] for t in targets}
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
