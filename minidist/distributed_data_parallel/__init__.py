"""DistributedDataParallel: a replica on every rank, gradients averaged while they appear.

Every rank holds the whole model and takes its own share of the batch. After the backward pass all
ranks hold the mean of their gradients, so that replicas that were equal stay equal.

To read, in this order:

    naive      the idea: broadcast once, average each gradient
    buckets    gradients that travel together, as soon as all of a bucket are there
    reducer    the hooks that say so, while backward still computes
    ddp        the wrapper: what happens before and after a forward pass

A step is in the last three of these, and in `common.wrapper`. Hooks that send fewer bits are
torch's, and in `minidist.averaging`. For ranks with different numbers of batches, torch's class has
`join`. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv
2006.15704). Lesson: distributed_data_parallel.
"""

from minidist.distributed_data_parallel.buckets import Bucket
from minidist.distributed_data_parallel.ddp import DistributedDataParallel

__all__ = ["Bucket", "DistributedDataParallel"]
