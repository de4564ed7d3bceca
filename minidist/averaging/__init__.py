"""Fewer bytes than all gradients of every step, which DistributedDataParallel sends.

Replicas can train on their own, and take the mean of their parameters now and then: each rank takes
steps with its own optimizer, and only after a *period* of steps the replicas meet. That is fewer
bytes by the factor of the period. Between two meetings the replicas drift apart, and that has its
price. Or each gradient is sent in fewer bits, by a communication hook of DistributedDataParallel;
what these cannot say goes into the next one.

To read: `flat_mean` (parameters travel in one message; how far replicas are apart), `optimizers`
(local SGD; and DiLoCo, where the mean is a gradient for a second optimizer), `low_bit_hooks`
(gradients of 8 bits, and of 1), `trial` (replicas that train on a task, and what they learn and
send). The lesson has both ideas in cells of ten lines, and gossip. Gradients of low rank are
torch's `powerSGD_hook`, which works with our DistributedDataParallel. Lesson: beyond_gradients.
"""

from minidist.averaging.flat_mean import average, drift
from minidist.averaging.low_bit_hooks import LowBitState, int8_hook, one_bit_hook
from minidist.averaging.optimizers import DiLoCo, LocalSGD, nesterov
from minidist.averaging.trial import Task, one_process, replicas

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "LowBitState",
    "Task",
    "average",
    "drift",
    "int8_hook",
    "nesterov",
    "one_bit_hook",
    "one_process",
    "replicas",
]
