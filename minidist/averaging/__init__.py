"""Fewer bytes than all gradients of every step, which DistributedDataParallel sends.

Replicas can train on their own, and take the mean of their parameters now and then: each rank takes
steps with its own optimizer, and only after a *period* of steps the replicas meet. That is fewer
bytes by the factor of the period. Between two meetings the replicas drift apart, and that has its
price. Or each gradient is sent in fewer bits, by a communication hook of DistributedDataParallel;
what these cannot say goes into the next one.

To read, in this order:

    naive                 the idea: local SGD, and DiLoCo, as two short loops
    flat_mean             parameters travel in one message; how far replicas are apart
    averaging_optimizer   the wrapper around any optimizer
    local_sgd             local SGD, and post-local SGD
    diloco                the mean is a gradient, for a second optimizer
    low_bit_hooks         gradients of 8 bits, and of 1

The lesson has gossip and streaming DiLoCo in cells of its own. Gradients of low rank are torch's
`powerSGD_hook`, which works with our DistributedDataParallel. Lesson: beyond_gradients.
"""

from minidist.averaging.averaging_optimizer import AveragingOptimizer
from minidist.averaging.diloco import DiLoCo, nesterov
from minidist.averaging.flat_mean import average, drift
from minidist.averaging.local_sgd import LocalSGD
from minidist.averaging.low_bit_hooks import LowBitState, int8_hook, one_bit_hook

__all__ = [
    "AveragingOptimizer",
    "DiLoCo",
    "LocalSGD",
    "LowBitState",
    "average",
    "drift",
    "int8_hook",
    "nesterov",
    "one_bit_hook",
]
