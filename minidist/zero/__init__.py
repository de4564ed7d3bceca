"""Lesson 8: ZeRO, stages 1 and 2. Replicas need not all hold what only the optimizer reads.

With Adam in float32 a rank of lesson 4 holds 16 bytes for each of Ψ parameters: 4 of the parameter,
4 of its gradient, 8 of two optimizer states. Of N ranks each updates only its shard, Ψ/N of the
parameters, and sends the result to the others:

    stage 1, `ZeroRedundancyOptimizer`: the optimizer states of the shard, 4 + 4 + 8/N bytes;
    stage 2, `ShardedDataParallel`: and the gradients of the shard, 4 + (4 + 8)/N bytes.

To read, in this order: `partition` (who owns what), `messages` (the two collectives), `optimizer`,
`elementwise` (which optimizers may do so) and `states` (checkpoints); `reducer` and `module`, for
stage 2.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054), section 5. The pair of classes is FairScale's: OSS and ShardedDDP.
"""

from minidist.zero.module import ShardedDataParallel
from minidist.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ShardedDataParallel", "ZeroRedundancyOptimizer"]
