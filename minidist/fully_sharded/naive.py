"""The idea in one class. Each rank keeps a shard, and gathers the others' while it computes.

It is slow, but it trains. Lesson: fully_sharded
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from minidist.zero.messages import all_gather, reduce_scatter


class NaiveFullySharded(nn.Module):
    """Each of N ranks keeps the N-th part of a module: one parameter `shard` (S,)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        flat = nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.module = [module.to("meta")]  # without values; in a list, so that it has no parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gather, compute, and forget. Autograd must not keep the full parameters for the backward
        pass: it saves where they were, and they are gathered again."""
        full, views, offset = _Gather.apply(self.shard), {}, 0
        for name, shape in self.shapes.items():
            views[name] = full[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()

        def save(t: torch.Tensor, place: int = full.untyped_storage().data_ptr()) -> Any:
            is_parameter = t.untyped_storage().data_ptr() == place  # not full: autograd keeps save
            return (t.shape, t.stride(), t.storage_offset()) if is_parameter else t

        def load(saved: Any) -> torch.Tensor:
            is_parameter = isinstance(saved, tuple)
            return _Gather.apply(self.shard).as_strided(*saved).detach() if is_parameter else saved

        with saved_tensors_hooks(save, load):
            return functional_call(self.module[0], views, x)


class _Gather(torch.autograd.Function):
    """Forward, an all_gather, (S,) to (N S,); backward, a reduce_scatter of the mean gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        full = shard.new_empty(len(shard) * dist.get_world_size())
        all_gather(full, dist.group.WORLD, shard)()  # type: ignore[arg-type]
        return full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = reduce_scatter(gradient, dist.group.WORLD)()  # type: ignore[arg-type]
        return total / dist.get_world_size()
