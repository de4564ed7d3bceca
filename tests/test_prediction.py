"""A guess beside what was measured: one sentence, and never in the way."""

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import minidist as md


def told(capsys: pytest.CaptureFixture[str], number: object, measured: object, **names: str) -> str:
    md.predict(number, **names).against(measured)
    return capsys.readouterr().out


# What a person would say. "2.3 times too low": 10 is 2.3 times 4.35.
SAYS = [
    (4, 4, "said 4, measured 4: exactly"),
    (4.2, 4.2, "said 4.2, measured 4.2: exactly"),
    (0.3, 0.1 + 0.2, "exactly"),
    (0, 0, "exactly"),
    (1_000_000, 1_000_001, "said 1,000,000, measured 1,000,001: within 1 %"),
    (99, 100, "within 1 %"),
    (98.9, 100, "within 5 %"),
    (4.2, 4, "said 4.2, measured 4: within 5 %"),
    (80, 100, "20 % too low"),
    (50, 100, "2 times too low"),
    (200, 100, "2 times too high"),
    (4.35, 10, "2.3 times too low"),
    (1, 12_500, "measured 12,500: 12,500 times too low"),
    (3, 0, "said 3, measured 0: 3 too high"),
    (0, 0.25, "said 0, measured 0.25: 0.25 too low"),
    (-1, 2, "said -1, measured 2: 3 too low"),
    (1 / 3, 0.25, "said 0.3333, measured 0.25: 33 % too high"),
    (1e-5, 2e-5, "said 1e-05, measured 2e-05: 2 times too low"),
    (Fraction(1, 4), 0.25, "said 0.25, measured 0.25: exactly"),
    (True, True, "said True, measured True: right"),
    (True, False, "said True, measured False: not so"),
    ("GPipe", "gpipe", "said GPipe, measured gpipe: right"),
    ("Zero bubble", "zero_bubble", "said Zero bubble, measured zero_bubble: right"),
    ("-", "AB", "not so"),
    ("two\nlines", "1f1b", "said two lines, measured 1f1b: not so"),
    # What only looks like a number, or is one that nothing is near to.
    ("4", 4, "said 4, measured 4: a word cannot be compared with a number"),
    (4, "gpipe", "a number cannot be compared with a word"),
    (True, 1, "said True, measured 1: True or False cannot be compared with a number"),
    (math.nan, 4.2, "said nan, measured 4.2: these cannot be compared"),
    (4.2, math.nan, "measured nan: these cannot be compared"),
    (4.2, math.inf, "measured inf: these cannot be compared"),
    # One element.
    (4, torch.tensor([4]), "said 4, measured 4: exactly"),
    (4.2, torch.tensor(4.2), "said 4.2, measured 4.2: exactly"),
    (4, np.int64(5), "said 4, measured 5: 20 % too low"),
    (True, np.bool_(True), "right"),
    (True, torch.tensor(True), "right"),
]


def test_one_sentence(capsys):
    for number, measured, wanted in SAYS:
        said = told(capsys, number, measured)
        assert said.startswith("You said ") and said.endswith(wanted + ".\n"), (said, wanted)
        assert said.count("\n") == 1


def test_what_was_guessed_and_its_unit_are_named(capsys):
    said = told(capsys, 4, 4.1, what="MB that rank 0 sends")
    assert said == "MB that rank 0 sends: you said 4, measured 4.1: within 5 %.\n"
    said = told(capsys, 4, 0, what="what rank 0 sends", unit="MB")
    assert said == "what rank 0 sends: you said 4 MB, measured 0 MB: 4 too high.\n"
    assert told(capsys, True, False, unit="MB") == "You said True, measured False: not so.\n"


def test_without_a_guess_nothing_is_shown(capsys):
    for measured in 4, math.nan, True, "gpipe", torch.tensor([1.0]):
        assert told(capsys, None, measured) == "", measured
        md.predict().against(measured)
        assert capsys.readouterr() == ("", "")


WRONG = [
    ([4], "list"),
    ((1, 2), "tuple"),
    ({}, "dict"),
    (1j, "complex"),
    (print, "builtin_function_or_method"),
    (torch.arange(3), "Tensor of shape (3,)"),
    (np.ones((2, 2)), "ndarray of shape (2, 2)"),
    (torch.empty(1, device="meta"), "Tensor of shape (1,)"),
]


def test_what_is_no_guess_is_told_and_stops_nothing(capsys):
    for wrong, kind in WRONG:
        guess = md.predict(wrong, "MB")
        assert capsys.readouterr().out == (
            f"A prediction is about one number, True or False, or one word: not {kind}. "
            "So this counts as no guess.\n"
        )
        guess.against(4)
        assert capsys.readouterr().out == ""


def test_a_lesson_that_measures_no_one_number_is_wrong_whoever_guesses():
    for wrong, kind in [*WRONG, (None, "None")]:
        for number in None, 4:
            with pytest.raises(TypeError) as error:
                md.predict(number).against(wrong)
            assert str(error.value).endswith(f"not {kind}.")


def test_ranks_guess_for_themselves_in_one_line_each(capfd):
    def of_this_rank():
        md.predict(2, "the rank").against(torch.distributed.get_rank())

    with md.ranks(2) as ranks:
        ranks(of_this_rank)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        "[rank 0] the rank: you said 2, measured 0: 2 too high.",
        "[rank 1] the rank: you said 2, measured 1: 2 times too high.",
    ]


@pytest.mark.soak
def test_it_waits_for_no_other_module():
    """It is the first thing of `minidist` that a cell uses: it loads no lesson and no picture."""
    code = "import sys, minidist as md; before = set(sys.modules); md.predict(4).against(4); "
    code += "print(sorted(m for m in set(sys.modules) - before if m[:8] == 'minidist'))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = "['minidist.course.language', 'minidist.course.prediction']"
    assert shown.stdout.splitlines()[1:] == [loaded], shown.stderr
