"""`python -m minidist bench launch collectives`: the measurements that the course speaks of."""

import argparse
from pathlib import Path

from minidist import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minidist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("bench", help="our figures beside torch's, taken in turns")
    sub.add_argument("names", nargs="*", default=bench.NAMES, help=", ".join(bench.NAMES))
    sub.add_argument("--rounds", type=int, default=7, help="how often each is timed (7)")
    sub.add_argument("--out", type=Path, default=Path("."), help="the folder for pictures (.)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(bench.NAMES)
    if unknown:
        sub.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(bench.NAMES)}")
    if arguments.rounds < 1:
        sub.error("--rounds must be 1 or more")
    if not arguments.out.is_dir():
        sub.error(f"--out {arguments.out}: no such folder")
    bench.run(arguments.names, arguments.rounds, arguments.out)


if __name__ == "__main__":
    main()
