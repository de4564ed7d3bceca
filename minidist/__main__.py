"""The measurements that the course speaks of, all ways to train side by side, a planner of memory
and time, and a doctor for training scripts.

python -m minidist bench launch collectives
python -m minidist compare --world-size 4
python -m minidist plan --model llama-3-8b --gpu h100 --world-size 8 --tensor 2
python -m minidist doctor --world-size 2 script.py
"""

import argparse
from pathlib import Path

from minidist.instruments import bench, doctor
from minidist.instruments.compare import command as compare
from minidist.instruments.planner import plan_command as plan


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m minidist",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _bench(commands.add_parser("bench", help="our figures beside torch's, taken in turns"))
    compare.add(commands.add_parser("compare", help="one training in many ways, side by side"))
    plan.add(commands.add_parser("plan", help="bytes a rank and seconds a step, before you run"))
    doctor.add(commands.add_parser("doctor", help="does a script train as one process would?"))
    arguments = parser.parse_args()
    arguments.run(arguments)


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.description = """Times ours and others' in one run. Says at the end how each target stands.
Rounds in which other processes took part of the machine are taken again."""
    sub.epilog = "\n".join(["benchmarks:"] + [f"  {n:12} {bench.about(n)}" for n in bench.NAMES])
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.add_argument("names", nargs="*", default=bench.NAMES, help="benchmarks (all of them)")
    sub.add_argument("--rounds", type=int, default=7, help="how often each is timed (7)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")

    def run(arguments: argparse.Namespace) -> None:
        unknown = set(arguments.names) - set(bench.NAMES)
        if unknown:
            sub.error(
                f"there is no benchmark {', '.join(unknown)}; there are {', '.join(bench.NAMES)}"
            )
        if arguments.rounds < 1:
            sub.error("--rounds must be 1 or more")
        if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
            sub.error(f"--json {arguments.json}: no file can be written there")
        bench.run(arguments.names, arguments.rounds, arguments.json)

    sub.set_defaults(run=run)


if __name__ == "__main__":
    main()
