"""The learner's language: the sentences of checks and of predictions, in Korean.

A sentence is English in the code and in the text files of checks, and knows of no other language.
Where a learner reads it, `spoken` looks it up. The catalogue is the table `korean` of each text
file, and of `korean.toml`, which has what all lessons share: the f-string
f"it is not {value} {unit}." has the key "it is not {0} {1}.", and its Korean says where the values
go. A value that is a sentence itself is looked up as well. A number, code, or the text of an error
stays as it is, and so does what the checks of the other lessons say.

The language comes from outside, since the cells of a lesson are the same in all languages. It is
`MINIDIST_LANGUAGE`, `ko` or `en`, in the environment in which Jupyter starts; else it is Korean
where a notebook runs in a folder `ko`: the Korean lessons, and a learner's copy of them.

tests/test_language.py holds the catalogue complete.
"""

import functools
import os
import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def spoken(text: str) -> str:
    """An English sentence in the learner's language."""
    return in_korean(text) if _language() == "ko" else text


@functools.cache
def in_korean(text: str) -> str:
    """An English sentence in Korean; as it is, if the catalogue has none like it. Where several
    templates fit, it is the one that leaves the fewest English words."""
    fits = ((pattern.fullmatch(text), korean) for pattern, korean in _patterns())
    forms = [korean.format(*map(in_korean, found.groups())) for found, korean in fits if found]
    return min(forms, key=lambda form: len(re.findall("[A-Za-z]{2,}", form)), default=text)


def _language() -> str:
    try:
        return os.environ.get("MINIDIST_LANGUAGE") or Path.cwd().name
    except FileNotFoundError:  # the folder is gone
        return ""


@functools.cache
def catalogue() -> dict[str, str]:
    """The Korean form of each template."""
    files = [HERE / "korean.toml", *sorted(HERE.glob("checks/*.toml"))]
    tables = (tomllib.loads(file.read_text(encoding="utf-8")).get("korean", {}) for file in files)
    return {key: korean for table in tables for key, korean in table.items()}


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """The templates as patterns: first those that begin with a word, and the longest."""
    keys = sorted(catalogue(), key=lambda key: (key[0] == "{", -len(key)))
    patterns = (re.sub(r"\\\{\d\\\}", "(.+?)", re.escape(key)) for key in keys)
    return [(re.compile(p, re.DOTALL), catalogue()[k]) for p, k in zip(patterns, keys, strict=True)]
