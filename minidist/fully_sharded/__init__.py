"""Fully sharded training: ZeRO, stage 3. No rank holds a whole model.

Of Ψ parameters in float32, trained with Adam on N ranks, a rank with ZeRO's stage 2 still holds 4Ψ
bytes, the parameters. Here it keeps its shard of everything, 16Ψ/N bytes. A part of the model, a
unit, is gathered only while it computes. So few units have full parameters: the one that computes,
those around it, and the next one. The price is a second all_gather: 3Ψ(N-1)/N elements a step are
sent, where data parallel training sends 2Ψ(N-1)/N.

To read, in this order: `naive` (the idea, a class that trains); then the three files through
which one training step goes: `fsdp_module` (what users call), `state` (when a unit is gathered and
freed, forward and backward), `param_group` (a unit, and what is sent of it).
How it begins: `fully_shard`, torch's form, which makes a unit in place;
`fully_sharded_data_parallel`, torch's older form, a wrapper that makes them by a policy. States of
models and optimizers are DTensors, of which torch's own functions and `minidist.saving` make
checkpoints.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel" (arXiv 2304.11277). Lesson: fully_sharded
"""

from minidist.fully_sharded.fsdp_module import FSDPModule
from minidist.fully_sharded.fully_shard import fully_shard
from minidist.fully_sharded.fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    by_class,
    by_size,
)
from minidist.fully_sharded.naive import NaiveFullySharded

__all__ = [
    "FSDPModule",
    "FullyShardedDataParallel",
    "NaiveFullySharded",
    "by_class",
    "by_size",
    "fully_shard",
]
