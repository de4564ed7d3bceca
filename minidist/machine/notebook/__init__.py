"""`%%ranks`: a notebook cell that runs on every rank. Used by all lessons; Lesson: rank.

    %load_ext minidist

    %%ranks -n 4
    x = torch.ones(1)

The ranks are kept from cell to cell, each with a namespace of its own. `r = %ranks` gives the
pool itself: `r(fn)` calls a function on every rank, `r.get("x", rank=1)` brings a value back.
`%ranks` alone shows which ranks are in a call (`table.py`). `%%ranks --debug 1` lets rank 1 stop at
`breakpoint()` (`debug.py`).
"""

import inspect
import linecache
import os
import re
import symtable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from minidist.instruments.measure.soft import Soften
from minidist.instruments.plot.alt import describe
from minidist.machine.notebook.debug import debug_cell
from minidist.machine.notebook.table import table
from minidist.machine.runtime import Pool, RankError, forkserver
from minidist.machine.runtime.cell import remember, run_cell
from minidist.rank import ranks as start_ranks


def load(shell: InteractiveShell) -> None:
    """Make the magic known, and let the forkserver import torch while the reader reads."""
    shell.register_magics(RanksMagic)
    if shell.display_formatter is not None:
        bundles = shell.display_formatter.mimebundle_formatter
        bundles.for_type_by_name("matplotlib.figure", "Figure", _alternative_text)
    if os.environ.get("MINIDIST_TIMING") == "soft":
        shell.ast_transformers.append(Soften())
    forkserver.warm_up()


def _alternative_text(figure: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What IPython adds to a figure: no other form of it, and words for its picture."""
    return {}, {"image/png": {"alt": describe(figure)}}


@magics_class
class RanksMagic(Magics):
    """Holds the notebook's pool of ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._pool: Pool | None = None
        self._options: dict[str, Any] = {"world_size": 4}
        # Which cell gave the ranks a name, and in which era of the pool.
        self._definitions: dict[str, tuple[str, object]] = {}
        self._first: tuple[str, object] = ("", None)  # the first cell that did, in this era

    @magic_arguments()
    @argument("-n", dest="world_size", type=int, help="how many ranks (4, or as many as there are)")
    @argument("--only", help="the ranks that run this cell: 0,2")
    @argument("--debug", help="the rank that stops at breakpoint() and at an error: 1")
    @argument("--fresh", action="store_true", help="start new ranks, with empty namespaces")
    @argument("--nodes", type=int, help="spread the ranks over so many nodes, in name")
    @argument("--backend", help="auto, shm, gloo or nccl")
    @argument("--timeout", type=float, help="seconds that a rank waits for another (30)")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Pool | None:
        """Run a cell on every rank. `r = %ranks` gives the pool of ranks itself, and `%ranks` alone
        shows what each rank does.

        -n, --nodes, --backend and --timeout hold for later cells too, until a cell gives others.
        """
        arguments = vars(parse_argstring(self.ranks, line))
        only, debug, fresh = (arguments.pop(each) for each in ("only", "debug", "fresh"))
        name, alone = self._cell()
        if cell is None:
            if only or debug:
                raise UsageError("--only and --debug are for %%ranks, at the head of a cell")
            if alone and not line:
                print(table(self._pool))
                return None
        else:
            # The magic is the cell's first line: so errors name the line that the reader sees.
            source = "\n" + cell
            remember(source, name)
            _check_syntax(source, name)  # here, once, and not on every rank
        try:
            pool = self._pool_with(arguments, fresh)
            chosen = list(range(pool.world_size))
            if only is not None:
                chosen = _numbers("--only", only, chosen)
            debugged = [] if debug is None else _numbers("--debug", debug, chosen)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if cell is None:
            if alone:
                print(table(pool))
            return None if alone else pool
        try:
            if debugged:
                pool.on(chosen, debug_cell, source, name, debugged)
            else:
                pool.on(chosen, run_cell, source, name)
        except RankError as error:
            if advice := self._advice(error, pool):
                message = "\n\n".join([str(error), *advice])
                raise RankError(message, error.rank, error.tracebacks) from error.__cause__
            raise
        finally:
            if names := _names(source, name):
                self._definitions |= dict.fromkeys(names, (name, pool.era))
                if self._first[1] is not pool.era:
                    self._first = (name, pool.era)
        return None

    def _advice(self, error: RankError, pool: Pool) -> list[str]:
        """What the reader can do about it, where that is known."""
        said, advice = str(error), []
        cell, era = self._first
        if "\nThe ranks were ended" in said and cell and era is pool.era:
            advice.append(f"Run {cell} again, and the cells after it whose names you need.")
        seconds = self._options.get("timeout")
        if seconds and re.match(rf".*(within|waited) {seconds:g} s\b", said):
            advice.append(
                f"--timeout {seconds:g} holds for later cells too: --timeout 30 takes it back."
            )
        if unknown := re.match(r".* raised NameError: name '(\w+)' is not defined\n", said):
            advice += self._about(unknown[1], pool)
        return advice

    def _about(self, name: str, pool: Pool) -> list[str]:
        """What helps against a name that the ranks do not know."""
        cell, era = self._definitions.get(name, ("", pool.era))
        if era is not pool.era:
            return [
                f"{cell} defined {name!r} on earlier ranks, which are gone: run that cell again."
            ]
        assert self.shell is not None
        if not cell and name in self.shell.user_ns:
            return [
                f"The notebook has {name!r}, and ranks do not see its names: define it in a "
                f"%%ranks cell, or give it to a function, `r = %ranks; r(function, {name})`."
            ]
        return []

    def _cell(self) -> tuple[str, bool]:
        """`Cell In[3]`, as IPython's own tracebacks say, and whether its line that runs now is a
        magic and no more: `%ranks`, not `r = %ranks`."""
        assert self.shell is not None
        frame = inspect.currentframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if label := self.shell.compile.format_code_name(file):
                line = linecache.getline(file, frame.f_lineno)
                return " ".join(label), line.strip().startswith("get_ipython()")
            frame = frame.f_back
        return "a cell", False

    def _pool_with(self, options: dict[str, Any], fresh: bool) -> Pool:
        """The pool that is kept, or a new one if other options are asked for."""
        wanted = self._options | {name: v for name, v in options.items() if v is not None}
        closed = self._pool not in Pool.opened
        if self._pool is None or closed or fresh or wanted != self._options:
            pool = start_ranks(**wanted)
            if self._pool is not None:
                self._pool.close()
            self._pool, self._options = pool, wanted
        return self._pool


def _check_syntax(source: str, name: str) -> None:
    try:
        compile(source, name, "exec")
    except SyntaxError as error:
        line = error.text or ""
        if re.match(r"\s*([\w.,\s]+=\s*)?[%!?]|.*\?\s*$", line):
            error.msg += (
                ". A %%ranks cell is plain Python: what begins with % or !, or asks by ?, belongs "
                "in a cell of its own"
            )
        raise


def _names(source: str, name: str) -> list[str]:
    """The names that a cell gives to something."""
    symbols = symtable.symtable(source, name, "exec").get_symbols()
    return [s.get_name() for s in symbols if s.is_assigned() or s.is_imported()]


def _numbers(option: str, text: str, chosen: list[int]) -> list[int]:
    """The ranks that an option names, among those that run the cell."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes ranks such as 0,2, not {text!r}") from None
    for number in numbers:
        if number not in chosen:
            ranks = ", ".join(map(str, chosen))
            raise ValueError(f"{option} {text}: rank {number} is none of {ranks}")
    return numbers
