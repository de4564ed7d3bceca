"""The measurements that the course speaks of, a planner of memory and time, and random trials.

python -m minidist bench launch collectives
python -m minidist plan --params 7.5e9 --world-size 64
python -m minidist fuzz --minutes 10
"""

import argparse
import sys
from pathlib import Path

import minidist as md
from minidist import bench, fuzz, planner
from minidist.planner.report import report, speeds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m minidist",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _bench(commands.add_parser("bench", help="our figures beside torch's, taken in turns"))
    _plan(commands.add_parser("plan", help="bytes a rank and seconds a step, before you run"))
    _fuzz(commands.add_parser("fuzz", help="random trainings, each held against one process"))
    arguments = parser.parse_args()
    arguments.run(arguments)


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.description = """Times ours and others' in one run. Says at the end how each target stands.
Rounds in which other processes took part of the machine are thrown away and counted."""
    sub.epilog = "\n".join(["benchmarks:"] + [f"  {n:12} {bench.about(n)}" for n in bench.NAMES])
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.add_argument("names", nargs="*", default=bench.NAMES, help="benchmarks (all of them)")
    sub.add_argument("--rounds", type=int, default=7, help="how often each is timed (7)")
    sub.add_argument("--out", type=Path, default=Path("."), help="the folder for pictures (.)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")

    def run(arguments: argparse.Namespace) -> None:
        unknown = set(arguments.names) - set(bench.NAMES)
        if unknown:
            sub.error(
                f"there is no benchmark {', '.join(unknown)}; there are {', '.join(bench.NAMES)}"
            )
        if arguments.rounds < 1:
            sub.error("--rounds must be 1 or more")
        if not arguments.out.is_dir():
            sub.error(f"--out {arguments.out}: no such folder")
        if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
            sub.error(f"--json {arguments.json}: no file can be written there")
        bench.run(arguments.names, arguments.rounds, arguments.out, arguments.json)

    sub.set_defaults(run=run)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--params", type=float, help="of the model, such as 7.5e9")
    sub.add_argument("--world-size", type=int, default=1, help="ranks (1)")
    sub.add_argument("--memory", type=float, default=80, help="GB that a rank has (80)")
    sub.add_argument("--optimizer", default="adam", choices=planner.OPTIMIZERS)
    sub.add_argument("--precision", default="mixed", choices=planner.PRECISIONS)
    sub.add_argument("--tokens", type=float, help="a rank and step: also plan the time, as here")
    shape = sub.add_argument_group("a transformer, with its activations")
    for name in "layers", "width", "heads":
        shape.add_argument(f"--{name}", type=int)
    shape.add_argument("--length", type=int, default=2048, help="tokens of a sequence (2048)")
    shape.add_argument("--batch", type=int, default=1, help="sequences a rank (1)")
    shape.add_argument("--recompute", default="nothing", choices=planner.RECOMPUTE)

    def run(arguments: argparse.Namespace) -> None:
        try:
            print(_answer(arguments))
        except ValueError as error:
            sub.error(str(error))

    sub.set_defaults(run=run)


def _fuzz(sub: argparse.ArgumentParser) -> None:
    sub.description = (
        "Draws models, strategies, options and loops, and trains each on ranks and alone."
    )
    sub.add_argument("--minutes", type=float, default=10, help="for so long (10)")
    sub.add_argument("--first", type=int, default=0, help="the number of the first trial (0)")
    sub.add_argument("--trials", type=int, help="so many at most")

    def run(arguments: argparse.Namespace) -> None:
        if arguments.minutes <= 0 or (arguments.trials is not None and arguments.trials < 1):
            sub.error("--minutes must be more than 0, and --trials 1 or more")
        sys.exit(bool(fuzz.run(arguments.minutes, arguments.first, arguments.trials)))

    sub.set_defaults(run=run)


def _answer(given: argparse.Namespace) -> str:
    if not given.memory > 0:
        raise ValueError(f"nothing fits in {given.memory:g} GB: say how much --memory a rank has")
    parameters, activations = given.params, 0.0
    if any((given.layers, given.width, given.heads)):
        if not all((given.layers, given.width, given.heads)):
            raise ValueError("a transformer needs --layers, --width and --heads")
        model = planner.Transformer(given.layers, given.width, given.heads, given.length)
        activations = model.activations(given.batch, recompute=given.recompute)
        parameters = model.parameters if parameters is None else parameters
    if parameters is None:
        raise ValueError("how large is the model? Say --params, or --layers, --width and --heads")
    options = {"optimizer": given.optimizer, "precision": given.precision}
    options["activations"] = activations
    said = [report(parameters, given.world_size, given.memory * 1e9, **options)]
    if given.tokens is not None:
        with md.ranks(2) as ranks:
            machine = planner.calibrate(ranks)
        said.append(speeds(parameters, given.world_size, given.tokens, machine, given.precision))
    return "\n\n".join(said)


if __name__ == "__main__":
    main()
