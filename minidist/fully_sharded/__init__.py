"""Fully sharded training: ZeRO, stage 3. No rank holds a whole model.

Of Ψ parameters in float32, trained with Adam on N ranks, a rank with ZeRO's stage 2 still holds 4Ψ
bytes, the parameters. Here it keeps its shard of everything, 16Ψ/N bytes. A part of the model, a
unit, is gathered only while it computes. So at most two units have full parameters: the one that
computes, and the next one. The price is a second all_gather: 3Ψ(N-1)/N elements a step are sent,
where data parallel training sends 2Ψ(N-1)/N.

To read, in this order: `naive` (the idea, a class that trains); then the four files through which
one training step goes: `unit_schedule` (forward), `backward_pass`, `flat_parameter` (gather, free)
and `flat_gradient` (reduce). How it begins: `units`, `unit_policies` (which modules are units) and
`build_unit`. What users call: `fully_sharded_data_parallel` and `in_place`, torch's two forms, with
`torch_arguments`. The edges: `graph_ends`, `shard_gradient`, `sharded_states`,
`sharded_optimizer_states`. Checkpoints on disk: `minidist.saving`.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel" (arXiv 2304.11277). Lesson: fully_sharded
"""

from minidist.fully_sharded.fully_sharded_data_parallel import FullyShardedDataParallel
from minidist.fully_sharded.in_place import fully_shard
from minidist.fully_sharded.naive import NaiveFullySharded
from minidist.fully_sharded.sharded_optimizer_states import load_optim_state_dict, optim_state_dict
from minidist.fully_sharded.unit_policies import by_class, by_size
from minidist.fully_sharded.units import FSDPModule

__all__ = [
    "FSDPModule",
    "FullyShardedDataParallel",
    "NaiveFullySharded",
    "by_class",
    "by_size",
    "fully_shard",
    "load_optim_state_dict",
    "optim_state_dict",
]
