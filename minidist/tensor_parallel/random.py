"""Random numbers that differ between ranks, and others that do not (lesson: sequence_parallel).

Dropout of a replicated tensor must drop the same on every rank, or the replicas part. Dropout of a
sharded tensor must not: every part of it would lose the same places.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minidist.tensor_parallel.operators import Group


@contextmanager
def fork_rng(group: Group = None) -> Iterator[None]:
    """Within this block each rank of the group draws random numbers of its own.

        torch.manual_seed(0)                    # the same on every rank
        x = F.dropout(x)                        # replicated: drops the same on every rank
        with fork_rng():
            y = F.dropout(y)                    # sharded: every rank drops its own

    The block's seed is drawn from torch's generator, and the rank is added. So it is another block
    each time, a run can be repeated, there is nothing to store in a checkpoint, and afterwards the
    generators of the ranks are in step, however much each has drawn. They must be so before.
    Lesson: sequence_parallel.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + dist.get_rank(group))
        yield
