"""`python -m minidist compare`: its options, and what it writes."""

import argparse
import json
import runpy
from pathlib import Path

from minidist.instruments.bench import machine
from minidist.instruments.compare.comparison import SYSTEMS, run
from minidist.instruments.compare.results import draw, table
from minidist.instruments.compare.task import DATA


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.description = """Trains a small transformer on torch's help pages by each strategy of
minidist and of torch, and holds each against one process: weights in float64; memory, bytes, time
and loss in float32 with Adam."""
    sub.add_argument("--world-size", type=int, default=4, help="how many ranks (4)")
    names = ", ".join(system.name for system in SYSTEMS)
    sub.add_argument("--only", nargs="+", metavar="NAME", help=f"some of: {names}")
    sub.add_argument("--data", default="text", choices=DATA, help="what to train on (text)")
    sub.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a function that makes a model of your own: bytes (B, 64) to logits (B, 64, 256) for "
        "the text, images (B, 64) to logits (B, 10) for the digits. Batch norm and dropout act on "
        "the rows that a rank has, so they make a difference. For tensor parallelism it has a "
        "`tensor_plan`, for a pipeline it is an nn.Sequential, or its sequential() gives one",
    )
    sub.add_argument("--steps", type=int, default=10, help="how many are timed (10)")
    sub.add_argument("--out", type=Path, default=Path("compare.png"), help="(compare.png)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")

    def begin(given: argparse.Namespace) -> None:
        try:
            main(given)
        except ValueError as error:
            sub.error(str(error))

    sub.set_defaults(run=begin)


def main(given: argparse.Namespace) -> None:
    """Compare, and write what is found. Raises ValueError for options that make no sense."""
    for path in filter(None, [given.out, given.json]):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no such folder")
    path, _, function = (given.model or "").rpartition(":")
    options = {name: getattr(given, name) for name in ("world_size", "only", "data", "steps")}
    rows = run(
        **options,
        model=runpy.run_path(path)[function] if path else None,
        begins=lambda name: print(f"{name} …", flush=True),
    )
    print(table(rows))
    if given.json:
        on = {name: each for name, each in machine().items() if name != "platform"}
        found = {"machine": on, **options, "rows": [vars(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {given.json}")
    if any(not row.problem for row in rows):
        draw(rows).savefig(given.out)
        print(f"drawn: {given.out}")
