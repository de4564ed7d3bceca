"""ZeRO, stages 1 and 2. Replicas need not all hold what only the optimizer reads.

With Adam in float32 a rank of DistributedDataParallel holds 16 bytes for each of Ψ parameters: 4 of
the parameter, 4 of its gradient, 8 of two optimizer states. Of N ranks each updates only its shard,
an N-th of the rows of every parameter, and sends the result to the others:

    stage 1, `ZeroRedundancyOptimizer`: the optimizer states of the shard, 4 + 4 + 8/N bytes;
    stage 2, `ShardedDataParallel`: and the gradients of the shard, 4 + (4 + 8)/N bytes.

Stage 2 reduces gradients to their owner, and gathers parameters from theirs: each rank sends
2Ψ(N-1)/N elements a step, as many as an all_reduce. Stage 1 after DistributedDataParallel, whose
all_reduce gives every rank all gradients, sends 3Ψ(N-1)/N; with a reduce_scatter instead, as the
paper has it, also 2Ψ.

To read, in this order:

    naive               the idea: one vector of parameters, cut into N shards
    shards              which rows of a parameter a rank has, and the two collectives
    sharded_optimizer   stage 1: a step
    sharded_ddp         stage 2: gradients go to their owner while backward still computes

Stage 2 is DistributedDataParallel with other buckets.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054), section 5. The pair of classes is FairScale's: OSS and ShardedDDP. Lesson: zero.
"""

from minidist.zero.sharded_ddp import ShardedDataParallel
from minidist.zero.sharded_optimizer import ZeroRedundancyOptimizer

__all__ = ["ShardedDataParallel", "ZeroRedundancyOptimizer"]
