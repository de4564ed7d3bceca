"""Docstrings as Markdown.

They are written to be read in an editor. Three of their habits are not Markdown, and are made so:
an argument begins a line by its name and a colon; indented lines are code, or words in columns; and
a lesson is meant by its name.
"""

import ast
import re
from collections.abc import Collection, Mapping

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
    for code, lines in _blocks(text):
        block = "\n".join(lines)
        if code:
            rows = _rows(block)
            blocks.append(_items(rows, names) if rows else _fenced(block))
            continue
        block = re.sub(r"\*(?=[,)])", r"\\*", block)  # of a shape: (*, C)
        block = LESSONS.sub(lambda found: _replaced(r"\w+", found[0], lessons), block)
        blocks.append(_replaced(NAMED, _listed(block, arguments), names))
    return "\n\n".join(blocks)


def _blocks(text: str) -> list[tuple[bool, list[str]]]:
    """Paragraphs, and the code between them: indented lines that follow an empty one."""
    blocks: list[tuple[bool, list[str]]] = []
    begins = True
    for line in text.splitlines():
        code = line.startswith("    ")
        if not line:
            begins = True
            if blocks and blocks[-1][0]:
                blocks[-1][1].append("")
        elif begins and not (code and blocks and blocks[-1][0]):
            blocks.append((code, [line]))
            begins = False
        else:
            blocks[-1][1].append(line)
            begins = False
    return blocks


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
    name = "|".join(map(re.escape, arguments))
    said = re.compile(rf"(^|(?<=[.;] ))((?:{name})(?:, (?:{name}))*): ", re.M)
    return said.sub(lambda found: f"{'- ' * _begins(block, found)}**{found[2]}**: ", block)


def _begins(block: str, found: re.Match[str]) -> bool:
    return found.start() == 0 or block[found.start() - 1] == "\n"


def _replaced(pattern: str, text: str, known: Mapping[str, str]) -> str:
    return re.sub(pattern, lambda found: known.get(found[0], found[0]), text)
