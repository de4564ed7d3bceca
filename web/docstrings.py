"""Docstrings as Markdown.

They are written to be read in a terminal. Three of their habits are not Markdown, and are made so:
an argument begins a line by its name and a colon; indented lines are code, or a table in plain
words; and a lesson is meant by its name.
"""

import ast
import re
from collections.abc import Collection, Mapping

LESSONS = re.compile(r"\b[Ll]essons?: [a-z_,\s]+")


def markdown(
    text: str,
    arguments: Collection[str] = (),
    lessons: Mapping[str, str] = {},
    names: Mapping[str, str] = {},
) -> str:
    """A docstring as Markdown.

    arguments: what it may say in lines that begin by a name. lessons: {name: what to put there}.
    names: the same of code between backticks.
    """
    blocks = []
    for code, lines in _blocks(text):
        block = "\n".join(lines)
        if code:
            blocks.append(_fenced(block))
            continue
        block = LESSONS.sub(lambda found: _replaced(r"\w+", found[0], lessons), block)
        blocks.append(_replaced(r"`[\w.]+`", _listed(block, arguments), names))
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
    return re.sub(pattern, lambda found: known.get(found[0].strip("`"), found[0]), text)
