"""Docstrings as Markdown.

They are written to be read in an editor. Three of their habits are not Markdown, and are made so:
an argument begins a line by its name and a colon; indented lines are code, or words in columns; and
a lesson is meant by its name.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby

NAMED = r"`[\w.]+`"
LESSONS = re.compile(r"\b[Ll]essons?:\s[a-z_,\s]+")


def markdown(
    text: str,
    arguments: Collection[str] = (),
    lessons: Mapping[str, str] = {},
    names: Mapping[str, str] = {},
) -> str:
    """A docstring as Markdown.

    arguments: what it may say in lines that begin by a name. lessons: {name: what to put there}.
    names: the same of code, with its backticks.
    """
    blocks = []
    for code, block in _blocks(text):
        if code:
            blocks.append(_items(_rows(block), names) or _fenced(block))
            continue
        block = re.sub(r"\(\*(?=[,)])", r"(\\*", block)  # of a shape: (*, C)
        block = LESSONS.sub(lambda found: _replaced(r"\w+", found[0], lessons), block)
        blocks.append(_replaced(NAMED, _listed(block, arguments), names))
    return "\n\n".join(blocks)


def _blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Paragraphs, and the code between them: indented lines that follow an empty one."""
    paragraphs = re.split(r"\n\n+", text.strip("\n"))
    for code, found in groupby(paragraphs, lambda paragraph: paragraph.startswith("    ")):
        for block in ["\n\n".join(found)] if code else found:
            yield code, block


def _rows(code: str) -> list[tuple[str, str]]:
    """The rows of words in two columns, each of one line or more. Other code has none."""
    rows: list[tuple[str, str]] = []
    for line in code.rstrip().splitlines():
        if row := re.fullmatch(r"    (\S+(?: \S+)*) {2,}([^#\s]+(?: \S+)*)", line):
            rows.append((row[1], row[2]))
        elif rows and (more := re.fullmatch(r" {8,}(\S+(?: \S+)*)", line)):
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {more[1]}"
        else:
            return []
    return rows


def _items(rows: list[tuple[str, str]], names: Mapping[str, str]) -> str:
    return "\n".join(
        f"- {names.get(f'`{word}`', f'**{word}**')}: {_replaced(NAMED, text, names)}"
        for word, text in rows
    )


def _fenced(code: str) -> str:
    code = re.sub(r"^    ", "", code.rstrip(), flags=re.M)
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    return f"```{language}\n{code}\n```"


def _listed(block: str, arguments: Collection[str]) -> str:
    """A line that begins by an argument becomes an item; an argument within a line, bold."""
    if not arguments:
        return block
    name = "|".join(arguments)
    said = re.compile(rf"(^ *|(?<=[.;] ))((?:{name})(?:, (?:{name}))*):(?=\s)", re.M)
    block = said.sub(r"\1**\2**:", block)
    return re.sub(rf"^(?=\*\*(?:{name})\b[^*]*\*\*:)", "- ", block, flags=re.M)


def _replaced(pattern: str, text: str, known: Mapping[str, str]) -> str:
    return re.sub(pattern, lambda found: known.get(found[0], found[0]), text)
