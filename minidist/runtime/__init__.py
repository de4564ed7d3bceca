"""Starting, feeding, watching and ending the processes that ranks run in.

This room knows nothing of `torch.distributed`. It keeps a pool of processes, hands each the
same function, brings back results, output and errors, and leaves nothing behind. What makes a
process a *rank* (its number, its rendezvous, its process group) is Lesson 1: `minidist/rank.py`.

    forkserver.py  how a process is started in milliseconds
    worker.py      what runs inside it
    cell.py        a notebook cell, as a rank runs it
    pool.py        the side of the notebook: start, call, watch, end
    output.py      the ranks' lines, in the same order at every run
    stack.py       the reader's own lines in a rank's call stack
    report.py      who failed first, and where the others were
"""

from minidist.runtime.pool import Pool
from minidist.runtime.report import RankError

__all__ = ["Pool", "RankError"]
