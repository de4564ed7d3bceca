"""A parameter server: one rank holds the weights, the others train, and no rank waits for a
collective.

A trainer sends its gradient to the server, which steps, and gets the new weights back. Calls go by
`torch.distributed.rpc`: a rank calls a function on another one by its name. So trainers need not
do the same at the same time, and one of them can be slow.

- Synchronous: the server waits for all gradients, and steps by their mean. That is data parallel
  training, equal to one process.
- Asynchronous: it steps by each gradient as it comes. Nobody waits, and a gradient was computed
  with weights that others have changed since. How many updates lie between is its *staleness*.
- Stale synchronous parallel: as asynchronous, but who is more than `bound` steps ahead of the
  slowest trainer waits for it.

Dean et al., "Large Scale Distributed Deep Networks" (DistBelief, NIPS 2012), section 4; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013). Large
systems share out the weights over several servers: Li et al., "Scaling Distributed Machine Learning
with the Parameter Server" (OSDI 2014).

To read: `server` (the idea: what it holds, and when a trainer may go on), `training` (both sides
of it), `rpc_session` (ranks that call each other, by name). Lesson: parameter_server.
"""

from minidist.parameter_server.rpc_session import name_of, rpc_session
from minidist.parameter_server.training import Served, ServedOptimizer, train

__all__ = ["Served", "ServedOptimizer", "name_of", "rpc_session", "train"]
