"""What a check is made of: the verdict, the sentence that a wrong answer gets, ranks to try it on.

What the checks of a lesson say stands in a text file beside them, in English and, of some lessons,
in Korean. A puzzle whose answer is a number stands there as a whole, and `puzzle` makes a check of
it:

    [idle_part]                # the name of the check
    asks = "Of the total time, for 8 ranks and 32 micro-batches."
    number = "7/39"            # the answer: a number, or a fraction of products such as "2*7/39"
    unit = "ms"                # if it has one
    right = "7 / (32 + 7)."    # said after "Right:"
    hints = ["where in the lesson to look", "the step", "the shape of the answer"]
    wrong."7/32" = "that is …" # what this number is instead
    when."a sum" = 2           # begin with this hint if what is wrong has these words

Other puzzles and the exercises are functions with the decorator `check`, and have `right` and
`hints` in the text file. Such a function raises `NotYet`, with a sentence that says what is wrong
with this answer; or it returns None, or what is to be said in place of `right`.

An exercise of the league has a score besides, the same on any machine and better if it is less:

    [far_away.league]
    what = "units of time"     # of the score
    library = 136.2            # what the library's own gets
    bound = 97.8               # and what nothing can beat

Its function returns the score.

Each wrong answer of a session gets the next hint. What is no try gets none, and does not count: no
answer, or a malformed one (`NoTry`), and the cell of an exercise as the lesson has it.
"""

import functools
import html
import math
import re
import signal
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minidist.course.checks import kept, solved
from minidist.course.language import spoken
from minidist.machine.runtime import RankError
from minidist.rank import launch

WAIT = 3.0  # seconds that a rank waits for another
DEADLINE = 6.0  # seconds that an answer may take, once

BOX = '<div style="border-left: 4px solid {}; padding-left: 8px">{}</div>'
Judge = Callable[..., str | float | None]


class NotYet(Exception):  # noqa: N818 (it is what a check says, not a fault)
    """The answer is wrong, for this reason."""


class NoTry(NotYet):
    """So is this one, but it is no try at the question: it gets no hint."""


class Verdict(NamedTuple):
    """Whether an answer is right, what to say about it, and a hint. A notebook shows both, in the
    learner's language: see `course.language`."""

    right: bool
    says: str
    hint: str = ""

    def __repr__(self) -> str:
        return "\n".join(spoken(each) for each in (self.says, self.hint) if each)

    def _repr_html_(self) -> str | None:
        """In colour, for a learner; what a lesson stores is the text."""
        if not solved.copy():
            return None
        lines = (html.escape(line) for line in repr(self).split("\n"))
        lines = (re.sub(r"`([^`]+)`", r"<code>\1</code>", line) for line in lines)
        head, *rest = (re.sub(r"^([^:]+:)", r"<b>\1</b>", line) for line in lines)
        shade = "#00805A" if self.right else "#B34700"
        return BOX.format(shade, "<br>".join([head, *rest]))


class Check:
    """Gives the verdict of `judge` on an answer, and counts the wrong ones of this process. `says`
    is what the text file has of it."""

    __name__: str

    def __init__(self, judge: Judge, says: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, judge)
        self.judge, self.says = judge, says
        self.hints: list[str] = says.get("hints", [])
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a new session."""
        self.wrong, self.is_solved, self.unwritten = 0, False, ""

    def __call__(self, answer: object) -> Verdict:
        try:
            if answer is None:
                raise NoTry("the answer is None. Put yours in its place.")
            found = self.judge(answer)
        except NotYet as reason:
            hint = "" if isinstance(reason, NoTry) else self._next_hint(answer, str(reason))
            return Verdict(False, f"Not yet: {reason}", hint)
        self.wrong, self.is_solved = 0, True
        score = found if isinstance(found, float) else None
        solved.remember(_lesson(self.__module__), self.__name__, score)
        kept.keep(self.__name__, answer)
        says = found if isinstance(found, str) else self.says["right"]
        if score is not None:
            goals = self.says["league"]
            library, bound = goals["library"], goals["bound"]
            scored = f"{says} Score: {score:,g} {goals['what']}."
            says = f"{scored} The library: {library:,g}. The bound: {bound:,g}."
        return Verdict(True, f"Right: {says}")

    def _next_hint(self, answer: object, reason: str) -> str:
        # Who has solved it needs no hint: other answers are tried to see what the check says.
        if not self.hints or self.is_solved or self._is_unwritten(answer):
            return ""
        fits = [hint for words, hint in self.says.get("when", {}).items() if words in reason]
        self.wrong = max([self.wrong + 1, *fits])
        number = min(self.wrong, len(self.hints))
        return f"Hint {number} of {len(self.hints)}: {self.hints[number - 1]}"

    def _is_unwritten(self, answer: object) -> bool:
        """Whether its cell is as the lesson has it: with `# Your lines here`. One may leave that
        comment and write below it; so only the first cell that has it counts, until it changes."""
        cell = kept.cell_of(answer)
        if "Your lines" not in cell:
            return False
        self.unwritten = self.unwritten or cell
        return cell == self.unwritten


def check(judge: Judge) -> Check:
    """The decorator of an exercise, or of a puzzle whose answer is not one number."""
    return Check(judge, _texts(_lesson(judge.__module__))[judge.__name__])


def puzzle(module: str, name: str) -> Check:
    """The check of a puzzle that stands in the text file as a whole: its answer is a number."""
    says = _texts(_lesson(module))[name]

    def judge(answer: object) -> None:
        wrong = {_value(other): hint for other, hint in says.get("wrong", {}).items()}
        number(answer, _value(says["number"]), says.get("unit", ""), wrong)

    judge.__module__, judge.__name__, judge.__doc__ = module, name, says["asks"]
    return Check(judge, says)


def _lesson(module: str) -> str:
    return module.rpartition(".")[2]


@functools.cache
def _texts(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def _value(text: str) -> float:
    """Of "480", "7/39" or "100*7/39"."""
    above, _, below = text.partition("/")
    product, divisor = (math.prod(map(float, each.split("*"))) for each in (above, below or "1"))
    return product / divisor


def number(
    answer: Any, right: float, unit: str = "", wrong: Mapping[float, str] | None = None
) -> None:
    """Refuse all but the number `right` (to a millionth). `wrong` has hints for other numbers,
    which may be rounded."""
    what = f"a number ({unit})" if unit else "a number"
    try:
        if isinstance(answer, str | bool):
            raise TypeError
        value = float(answer)
    except Exception:  # whatever an odd object raises
        raise NoTry(f"give {what}, not {shown(answer)}.") from None
    if math.isclose(value, right, rel_tol=1e-6, abs_tol=1e-12):
        return

    wrong = wrong or {}
    said = [hint for other, hint in wrong.items() if math.isclose(value, other, rel_tol=1e-6)]
    if not said and _is_rounded(value, right):
        raise NoTry(
            f"{value:,g} is close, but it is rounded: give the exact number, or an expression such "
            "as 1 / 3."
        )
    said += [hint for other, hint in wrong.items() if _is_rounded(value, other)]
    if said:
        raise NotYet(f"{value:,g} is not it: {said[0]}.")
    raise NotYet(f"it is not {value:,g} {unit}." if unit else f"it is not {value:,g}.")


def _is_rounded(value: float, exact: float) -> bool:
    """Whether it is the exact number, rounded or cut to 2 to 6 digits."""
    if exact <= 0:
        return False
    for digits in range(2, 7):
        unit = 10.0 ** (math.floor(math.log10(exact)) - digits + 1)
        near = math.floor(exact / unit), math.floor(exact / unit + 0.5 + 1e-9)
        if any(math.isclose(value, each * unit, rel_tol=1e-9) for each in near):
            return True
    return False


def shown(thing: object) -> str:
    """The thing in a few characters, for a sentence."""
    try:
        text = " ".join(repr(thing).split())
    except Exception:
        text = f"this {type(thing).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def function(answer: object) -> Callable[..., Any]:
    """Refuse what cannot be called."""
    if not callable(answer) or isinstance(answer, type):
        raise NoTry(f"give the function itself, not {shown(answer)}.")
    return answer


def same(found: Any, wanted: Any) -> bool:
    """Whether a tensor is the wanted one, in float64; or each of several is."""
    if not isinstance(wanted, torch.Tensor):
        return all(same(a, b) for a, b in zip(found, wanted, strict=True))
    alike = isinstance(found, torch.Tensor) and found.shape == wanted.shape
    return alike and found.dtype == wanted.dtype and found.allclose(wanted, 1e-9, 1e-12)


def ranks(world_size: int) -> str:
    """1 rank, 2 ranks."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def on_ranks(
    trial: Callable[..., Any], *args: Any, world_size: int, where: str = "", **options: Any
) -> list[Any]:
    """`trial(*args)` on so many ranks. `trial` calls the answer; if it fails, the answer did."""
    try:
        sized = dict(world_size=world_size, timeout=WAIT, **options)
        return launch(_in_time, DEADLINE, trial, args, **sized)
    except RankError as error:
        first, _, rest = str(error).partition("\n\n")
        line = rest.strip().partition("\n\n")[0].split("\n")[-1].strip()
        if "Pair is not connected" in first:  # gloo's words
            first = "a rank sends to itself, or receives from itself"
        said = textwrap.shorten(first, 240, placeholder=" …").rstrip(".")
        said = f"{said}, in the line `{line}`" if rest.startswith("  ") else said
        raise NotYet(f"on {ranks(world_size)}{where}: {said}.") from None
    except TypeError as error:  # it cannot be sent to the ranks
        raise NotYet(f"{error}.") from None


def require_right(
    trial: Callable[..., Any],
    *args: Any,
    world_size: int,
    where: str = "",
    of_rank: str = " ",
    **options: Any,
) -> list[Any]:
    """Refuse the answer if `trial`, on so many ranks, returns on one of them what is wrong: a
    sentence, or a tuple that begins with it. Else return what all of them return.

    The sentence has the rank as its subject; if it has one of its own, `of_rank` is ": " or ", ".
    If it is the whole sentence, `of_rank` is "". where: ", with 4 heads", if there is more to say.
    """
    results = on_ranks(trial, *args, world_size=world_size, where=where, **options)
    for rank, result in enumerate(results):
        if wrong := result[0] if isinstance(result, tuple) else result:
            on_rank = f"on {ranks(world_size)}{where}, rank {rank}{of_rank}{wrong}."
            raise NotYet(on_rank if of_rank else f"{wrong}.")
    return results


def _in_time(seconds: float, trial: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    def late(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return trial(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
