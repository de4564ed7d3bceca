"""A reader's guess before a measurement, and how far off it was. Used by all lessons."""

import math
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any

from minidist.course.language import spoken

Answer = bool | int | float | str


@dataclass(frozen=True)
class Prediction:
    """What a reader expects of a measurement; a `number` of None is no guess."""

    number: Answer | None
    what: str = ""
    unit: str = ""

    def against(self, measured: Any) -> None:
        """Print in one sentence how far off the guess was; nothing if there was none.

        measured: a number, True or False, or a word, also as a tensor or an array of one element.
            Anything else is a TypeError, even without a guess: so a lesson's tests find it.
        """
        found = _answer(measured)
        if self.number is None:
            return
        said, seen = (_shown(answer, self.unit) for answer in (self.number, found))
        about = f"{self.what}: you" if self.what else "You"
        verdict = _verdict(self.number, found)
        print(spoken(f"{about} said {said}, measured {seen}: {verdict}."))


def predict(number: Any = None, what: str = "", unit: str = "") -> Prediction:
    """A guess: a number, True or False, or a word; None if you do not want to guess.

        sent = md.predict(4, "MB that rank 0 sends")
        ...                  # a measurement
        sent.against(4.1)    # MB that rank 0 sends: you said 4, measured 4.1: within 5 %.

    It never stops a notebook: what cannot be a guess is told, and counts as None.
    """
    try:
        return Prediction(None if number is None else _answer(number), what, unit)
    except TypeError as error:
        print(spoken(str(error)), spoken("So this counts as no guess."))
        return Prediction(None, what, unit)


def _answer(value: Any) -> Answer:
    """`value` as plain Python."""
    plain = value
    if hasattr(value, "item"):  # a tensor, an array, or a number of numpy
        try:
            plain = value.item()
        except (RuntimeError, TypeError, ValueError):  # it holds several
            pass
    if isinstance(plain, str):
        return " ".join(plain.split())
    if isinstance(plain, bool):
        return plain
    if isinstance(plain, Real):
        return plain if isinstance(plain, int) else float(plain)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    kind = "None" if value is None else f"{type(value).__name__}{shape}"
    raise TypeError(f"A prediction is about one number, True or False, or one word: not {kind}.")


def _kind(answer: Answer) -> str:
    if isinstance(answer, str):
        return "a word"
    return "True or False" if isinstance(answer, bool) else "a number"


def _shown(answer: Answer, unit: str) -> str:
    if isinstance(answer, bool | str):
        return str(answer)
    size = abs(answer)
    if size < 1e15 and answer == int(answer):
        text = f"{int(answer):,}"
    else:
        text = f"{answer:,.0f}" if 1000 <= size < 1e15 else f"{answer:.4g}"
    return f"{text} {unit}".rstrip()


def _verdict(said: Answer, seen: Answer) -> str:
    """How far `said` is from `seen`, in words."""
    if _kind(said) != _kind(seen):
        return f"{_kind(said)} cannot be compared with {_kind(seen)}"
    if isinstance(said, str) and isinstance(seen, str):
        # Words as people type them: Zero bubble is zero_bubble, and "A, B" is AB.
        said, seen = (re.sub(r"[\W_]", "", word.casefold()) for word in (said, seen))
        return "right" if said == seen else "not so"
    if isinstance(said, bool):
        return "right" if said == seen else "not so"
    said, seen = float(said), float(seen)
    if said == seen:
        return "exactly"
    if not (math.isfinite(said) and math.isfinite(seen)):
        return "these cannot be compared"
    # A float has its rounding, a count has none.
    if math.isclose(said, seen, rel_tol=1e-6) and not (said.is_integer() and seen.is_integer()):
        return "exactly"
    if min(said, seen) <= 0:  # no ratio would say it
        off = _shown(abs(said - seen), "")
    else:
        ratio, part = max(said, seen) / min(said, seen), abs(said - seen) / seen
        for percent in 1, 5:
            if part <= percent / 100 + 1e-9:
                return f"within {percent} %"
        off = f"{ratio:.2g} times" if ratio < 100 else f"{ratio:,.0f} times"
        off = f"{100 * part:.0f} %" if ratio < 2 else off
    return f"{off} too low" if said < seen else f"{off} too high"
