"""`python -m minidist compare`: its options, a bar while it runs, and what it writes."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import minidist as md
from minidist.instruments.bench import machine
from minidist.instruments.compare.comparison import choose, run
from minidist.instruments.compare.results import Row, draw, record, table
from minidist.instruments.compare.systems import systems
from minidist.instruments.compare.task import DATA

Progress = Callable[[str, Row | None], None]


def add(sub: argparse.ArgumentParser) -> None:
    """The options."""
    sub.description = """Trains a small transformer on torch's help pages in every way that minidist
knows, and holds each against one process: weights in float64; memory, bytes, time and loss in
float32 with Adam."""
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = "systems:\n" + "\n".join(
        f"  {'peer  ' if system.peer else '      '}{system.name}" for system in systems()
    )
    sub.add_argument("--world-size", type=int, default=4, help="how many ranks (4)")
    sub.add_argument("--only", nargs="+", metavar="NAME", help="these systems; see below")
    sub.add_argument("--peers", action="store_true", help="and those of others that are installed")
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
    sub.add_argument("--backend", default="auto", help="auto, shm, gloo or nccl (auto)")
    sub.add_argument(
        "--link",
        type=float,
        nargs="+",
        metavar="NUMBER",
        help="emulate a network: gigabits a second, and microseconds of latency",
    )
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
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: no file can be written there")
    if given.link and len(given.link) > 2:
        raise ValueError("--link takes gigabits a second, and microseconds of latency")
    chosen = choose(given.only, given.peers)
    with bar(len(chosen)) as progress:
        rows = run(
            given.world_size,
            only=[system.name for system in chosen],
            data=given.data,
            model=given.model,
            steps=given.steps,
            backend=given.backend,
            link=md.Link(*given.link) if given.link else None,
            progress=progress,
        )
    print(table(rows))
    if given.json:
        options = {name: getattr(given, name) for name in ("world_size", "data", "steps", "link")}
        on = {name: each for name, each in machine().items() if name != "platform"}
        found = {"machine": on, **options, "rows": record(rows)}
        given.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {given.json}")
    if any(not row.problem for row in rows):
        figure = draw(rows)
        figure.savefig(given.out)
        print(f"drawn: {given.out}")


@contextmanager
def bar(count: int) -> Iterator[Progress]:
    """A bar of so many systems; or, without tqdm, a line for each."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda name, row: None if row else print(f"{name} …", flush=True)
        return
    with tqdm(total=count, unit="system") as shown:

        def progress(name: str, row: Row | None) -> None:
            shown.set_description(name)
            if row:
                shown.update()

        yield progress
