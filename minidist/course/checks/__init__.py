"""Checks of the puzzles and exercises, a module for each lesson. Used by all lessons.

    from minidist.course.checks import rank as check

    check.shift(shift)      # in a notebook: shows a sentence, "Right: …" or "Not yet: …"

A check takes the answer, whatever that is, and returns a `Verdict`, which a Korean lesson shows in
Korean (see `course.language`). It looks at what an answer does, not at how: every right answer
passes. `verdict` holds what the checks share, `solved` what is solved.
"""

from minidist.course.checks.solved import league, progress
from minidist.course.checks.verdict import Verdict

__all__ = ["Verdict", "league", "progress"]
