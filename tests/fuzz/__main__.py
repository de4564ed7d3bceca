"""`python -m fuzz`: its arguments. The exit code is 1 if a trial differs from one process."""

import argparse
import sys

import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description="Draws models, strategies and loops, and trains each on ranks and alone.",
    )
    parser.add_argument("--minutes", type=float, default=10, help="for so long (10)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial (0)")
    parser.add_argument("--trials", type=int, help="so many at most")
    given = parser.parse_args()
    if given.minutes <= 0 or (given.trials is not None and given.trials < 1):
        parser.error("--minutes must be more than 0, and --trials 1 or more")
    sys.exit(bool(fuzz.run(given.minutes, given.first, given.trials)))


if __name__ == "__main__":
    main()
