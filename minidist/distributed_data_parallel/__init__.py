"""DistributedDataParallel: a replica on every rank, gradients averaged while they appear.

Every rank holds the whole model and takes its own share of the batch. After the backward pass all
ranks hold the mean of their gradients, so that replicas that were equal stay equal.

To read, in this order:

    naive      the idea: broadcast once, average each gradient
    buckets    gradients that travel together
    reducer    they leave while backward still computes
    ddp        the wrapper: what happens before and after a forward pass

A step is in the last three of these, and in `common.wrapper`. The edges: `join` (ranks with
different numbers of batches), `hooks` (gradients of 16 bits). And with lesson beyond_gradients:
`low_bit_hooks` (of 8 bits and of 1), `power_sgd` (of low rank).
Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv
2006.15704). Lesson: distributed_data_parallel.
"""

from minidist.distributed_data_parallel.buckets import Bucket
from minidist.distributed_data_parallel.ddp import DistributedDataParallel
from minidist.distributed_data_parallel.hooks import bf16_compress_hook
from minidist.distributed_data_parallel.low_bit_hooks import LowBitState, int8_hook, one_bit_hook
from minidist.distributed_data_parallel.power_sgd import PowerSGDState, power_sgd_hook

__all__ = [
    "Bucket",
    "DistributedDataParallel",
    "LowBitState",
    "PowerSGDState",
    "bf16_compress_hook",
    "int8_hook",
    "one_bit_hook",
    "power_sgd_hook",
]
