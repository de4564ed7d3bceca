"""`%%ranks`: a notebook cell that runs on every rank. Used by all lessons; shown in Lesson 1.

    %load_ext minidist

    %%ranks -n 4
    x = torch.ones(1)

The ranks are kept from cell to cell, each with a namespace of its own. `r = %ranks` gives the
pool itself: `r(fn)` calls a function on every rank, `r.get("x", rank=1)` brings a value back.
"""

import inspect
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from minidist.rank import ranks as start_ranks
from minidist.runtime import Pool, forkserver
from minidist.runtime.cell import remember, run_cell


def load(shell: InteractiveShell) -> None:
    """Make the magic known, and let the forkserver import torch while the reader reads."""
    shell.register_magics(RanksMagic)
    forkserver.warm_up()


@magics_class
class RanksMagic(Magics):
    """Holds the notebook's pool of ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._pool: Pool | None = None
        self._options: dict[str, Any] = {"world_size": 4}

    @magic_arguments()
    @argument("-n", dest="world_size", type=int, help="how many ranks (4, or as many as there are)")
    @argument("--only", help="the ranks that run this cell: 0,2")
    @argument("--fresh", action="store_true", help="start new ranks, with empty namespaces")
    @argument("--nodes", type=int, help="spread the ranks over so many nodes, in name")
    @argument("--backend", help="auto, shm, gloo or nccl")
    @argument("--timeout", type=float, help="seconds that a rank waits for another")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Pool | None:
        """Run a cell on every rank; as a line, `r = %ranks`, give the pool of ranks itself."""
        arguments = vars(parse_argstring(self.ranks, line))
        only, fresh = arguments.pop("only"), arguments.pop("fresh")
        if cell is not None:
            # The magic is the cell's first line: errors shall name the line that the reader sees.
            source, name = "\n" + cell, self._cell_name()
            remember(source, name)
            compile(source, name, "exec")  # a SyntaxError is told here, once
        try:
            pool = self._pool_with(arguments, fresh)
            chosen = _numbers(only, pool.world_size)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if cell is None:
            return pool
        pool.on(chosen, run_cell, source, name)
        return None

    def _cell_name(self) -> str:
        """`Cell In[3]`, as IPython's own tracebacks say."""
        assert self.shell is not None
        frame = inspect.currentframe()
        while frame is not None:
            if label := self.shell.compile.format_code_name(frame.f_code.co_filename):
                return " ".join(label)
            frame = frame.f_back
        return "a cell"

    def _pool_with(self, options: dict[str, Any], fresh: bool) -> Pool:
        """The pool that is kept, or a new one if other options are asked for."""
        wanted = self._options | {name: v for name, v in options.items() if v is not None}
        if self._pool is None or fresh or wanted != self._options:
            pool = start_ranks(**wanted)
            if self._pool is not None:
                self._pool.close()
            self._pool, self._options = pool, wanted
        return self._pool


def _numbers(text: str | None, world_size: int) -> list[int]:
    """The ranks that `--only` names."""
    if text is None:
        return list(range(world_size))
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--only takes ranks such as 0,2, not {text!r}") from None
    for number in numbers:
        if number not in range(world_size):
            raise ValueError(f"--only {text}: there is no rank {number} among {world_size} ranks")
    return numbers
