"""The idea, in thirty lines: each rank updates its own shard of the parameters, and no other.

    optimizer = NaiveZero(model.parameters(), torch.optim.Adam, lr=1e-3)
    loss_fn(model(my_share), my_targets).backward()     # the bare model, the same on every rank
    optimizer.step()

All parameters are one long vector of N equal shards. A reduce_scatter gives each rank its shard of
the mean gradient, the optimizer updates its shard of the parameters, and an all_gather collects the
shards of all ranks. So the optimizer's states are those of one shard: 8/N bytes a parameter with
Adam, not 8. What the other files add: no second copy of the parameters, messages that leave while
backward goes on (stage 2), groups of options and checkpoints. Lesson: zero.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveZero:
    """An optimizer of `optimizer_class` for this rank's shard of the parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        self.parameters, self.ranks = list(parameters), dist.get_world_size()
        whole = self.flat(p.detach() for p in self.parameters)
        self.shard = nn.Parameter(whole.chunk(self.ranks)[dist.get_rank()].clone())  # (S,)
        self.optimizer: Any = optimizer_class([self.shard], **options)

    def flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """One vector (N S,), with zeros at the end."""
        vector = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(vector, (0, -len(vector) % self.ranks))

    def step(self) -> None:
        """Every parameter needs a gradient, which is used up."""
        gradient = self.flat(p.grad for p in self.parameters if p.grad is not None)
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_single(self.shard.grad, gradient / self.ranks)
        self.optimizer.step()
        whole = torch.empty_like(gradient)
        dist.all_gather_single(whole, self.shard.detach())
        start = 0
        for parameter in self.parameters:
            parameter.grad = None
            values = whole[start : start + parameter.numel()]
            parameter.data.copy_(values.view(parameter.shape))
            start += parameter.numel()
