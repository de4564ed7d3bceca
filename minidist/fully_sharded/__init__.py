"""Lesson 9: fully sharded training. ZeRO, stage 3: no rank holds a whole model.

Of Ψ parameters in float32, trained with Adam on N ranks, a rank of lesson 8 still holds 4Ψ bytes,
the parameters. Here it keeps its shard of everything, 16Ψ/N bytes, and a unit of the model is whole
only while it computes: the shards, and the unit that computes, and the one that comes next. The
price is a second all_gather: 3Ψ(N-1)/N elements a step are sent, where lessons 4 and 8 send 2Ψ.

To read, in this order: `flat` (one tensor and its shards) and its `gradient`, `unit` (seen by
modules, and by autograd), `schedule` (what is gathered and freed when), `wrap` (which modules are
units), `build` (from a module to its units), `module` (the wrapper); then `options` (torch's),
`states` and `checkpoint`.
Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel" (arXiv 2304.11277).
"""

from minidist.fully_sharded.module import FullyShardedDataParallel
from minidist.fully_sharded.wrap import by_class, by_size

__all__ = ["FullyShardedDataParallel", "by_class", "by_size"]
