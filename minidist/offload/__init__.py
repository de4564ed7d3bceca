"""ZeRO-Offload. What only the optimizer reads need not be on the device.

With Adam in float32 a device holds 16 bytes for each of Ψ parameters. `OffloadedOptimizer` leaves
there the parameters, and of the gradients what backward makes; its states, and the step itself, are
the host's, which has more memory and a processor of its own:

    device:  4 of the parameter, and the gradients, 4, or a layer's at a time
    host:    4 of its own copy of the parameter, 4 of the gradient, 8 of two optimizer states
    between: 4 of the gradient and 4 of the parameter on their way down, 4 of the new one back up

In 16 bits the device has 2 + 2, and the host has all in float32. (The paper sends no parameter
down. Ours does: a clamp, a broadcast or a checkpoint may change it between two steps.)
Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv 2101.06840).
Lesson: offload.

To read, in this order:

    naive    the idea: a step on copies of the parameters
    stream   the same, with copies beside what the device computes, and in 16 bits
    budget   where there is only one memory: a device of so many bytes, and what is not on it
"""

from minidist.offload.budget import (
    Budget,
    Crossings,
    HostLink,
    OutOfMemory,
    on_host,
    put_on_host,
)
from minidist.offload.stream import OffloadedOptimizer

__all__ = [
    "Budget",
    "Crossings",
    "HostLink",
    "OffloadedOptimizer",
    "OutOfMemory",
    "on_host",
    "put_on_host",
]
