"""Starting, feeding, watching and ending the processes that ranks run in.

This room knows nothing of `torch.distributed`. It keeps a pool of processes, hands each the
same function, brings back results, output and errors, and leaves nothing behind. What makes a
process a *rank* (its number, its rendezvous, its process group) is in `minidist/rank.py`.

A program starts one forkserver. That forks a supervisor for each pool, and that forks the ranks.
A call goes from `pool` by `processes` to a rank's `worker`, and back.

    pool.py        what the notebook holds: call the ranks, say what went wrong
    processes.py   the notebook's ends of the ranks' pipes: start, feed, watch, end
    forkserver.py  how a process is started in milliseconds
    supervisor.py  the ranks' parent: it forks them, and ends them without fail
    worker.py      what runs inside a rank
    cell.py        a notebook cell, as a rank runs it
    figures.py     what a rank draws
    pickling.py    what calls and results are as bytes
    output.py      the ranks' lines, pictures and questions, in the same order at every run
    stack.py       the reader's own lines in a rank's call stack
    report.py      who failed first, and where the others were

How they end: each of these processes waits for the end of a pipe or socket that the program or the
one above it holds. So when the program ends, however it does, the supervisor reads the end of its
line, kills its ranks with all that they have started, and removes their folder; and the forkserver
ends, too.
"""

from minidist.machine.runtime.pool import Pool
from minidist.machine.runtime.report import RankError

__all__ = ["Pool", "RankError"]
