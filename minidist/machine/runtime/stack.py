"""Call stacks that can leave their process, in names that the reader knows.

A stack of a rank is mostly not the reader's: it begins in our worker and ends inside torch. What
helps is the line of the cell, and what that line called.
"""

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType

# Code that is not the reader's own: the standard library, installed packages, and minidist.
_RUNTIME = os.path.dirname(__file__)
_MINIDIST = os.path.dirname(os.path.dirname(os.path.realpath(_RUNTIME)))
_INSTALLED = [
    os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")
]
_LIBRARIES = tuple(path + os.sep for path in (_MINIDIST, *_INSTALLED))


def is_library(filename: str) -> bool:
    """Whether a file is not the reader's own."""
    if not os.path.isabs(filename):  # a cell, or stdin
        return filename.startswith("<frozen")
    return os.path.realpath(filename).startswith(_LIBRARIES)


@dataclass(frozen=True)
class Frame:
    """One line of a call stack."""

    filename: str
    lineno: int
    function: str

    @property
    def is_library(self) -> bool:
        return is_library(self.filename)

    def __str__(self) -> str:
        function = "" if self.function == "<module>" else f", in {self.function}"
        source = linecache.getline(self.filename, self.lineno).strip()
        return f"{label(self.filename)}, line {self.lineno}{function}" + (
            f"\n    {source}" if source else ""
        )


def label(filename: str) -> str:
    """The name a reader knows a file by: `Cell In[3]`, or a path from where they stand."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None:
            label = shell.compile.format_code_name(filename)
            if label is not None:
                return " ".join(label)
    if not os.path.isabs(filename):
        return filename
    real = os.path.realpath(filename)
    if real.startswith(_LIBRARIES):  # the same text wherever they are installed
        roots = [*_INSTALLED, os.path.dirname(_MINIDIST)]
        return next(real[len(root) + 1 :] for root in roots if real.startswith(root + os.sep))
    try:
        below = os.path.relpath(filename)
    except FileNotFoundError:  # the folder where they stand
        return filename
    return filename if below.startswith("..") else below


def relabel(text: str) -> str:
    """A text that names lines as Python does, `File "a.py", line 3`: now as a reader
    knows them."""
    return re.sub(r'File "(.+?)", line', lambda found: f"{label(found[1])}, line", text)


@dataclass(frozen=True)
class Stack:
    """A call stack, outermost frame first."""

    frames: tuple[Frame, ...]

    @classmethod
    def of(cls, source: FrameType | TracebackType | None) -> "Stack":
        """The stack of a running frame, or of an exception's traceback."""
        if isinstance(source, FrameType):
            lines: Iterable[tuple[FrameType, int]] = reversed(list(traceback.walk_stack(source)))
        else:
            lines = traceback.walk_tb(source)
        return cls(
            tuple(Frame(f.f_code.co_filename, lineno, f.f_code.co_name) for f, lineno in lines)
        )

    @property
    def own(self) -> tuple[Frame, ...]:
        """The reader's own lines; if there are none, the innermost line that is not ours."""
        frames = tuple(f for f in self.frames if not f.filename.startswith(_RUNTIME + os.sep))
        return tuple(f for f in frames if not f.is_library) or frames[-1:]

    @property
    def operation(self) -> str | None:
        """What the reader's innermost line called: `all_reduce`, say."""
        if not self.own:
            return None
        inner = self.frames[self.frames.index(self.own[-1]) + 1 :]
        names = [f.function for f in inner if f.function != "wrapper" and f.function[0] not in "_<"]
        return names[0] if names else None
