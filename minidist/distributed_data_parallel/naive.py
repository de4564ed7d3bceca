"""The idea, in twenty lines: replicas that begin equal, and take the mean of their gradients.

    model = NaiveDDP(model)                         # then train as on one process:
    loss_fn(model(my_share), my_targets).backward()
    optimizer.step()

Each gradient is averaged in a message of its own, while backward waits for it. What the other files
add: few and large messages, which travel while backward goes on.
Lesson: distributed_data_parallel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """A replica of `module` on every rank. Each `.grad` is the mean over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)  # the replicas begin equal
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(average)  # and stay so

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def average(parameter: torch.Tensor) -> None:
    """Autograd calls this as soon as a gradient is complete, in the same order on every rank."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
