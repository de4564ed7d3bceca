"""The idea in one class. Each rank keeps a shard, and gathers the others' while it computes.

It is slow, but it trains. Lesson: fully_sharded
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from minidist.zero.shards import all_gather, reduce_scatter


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
        pass: it saves where they were. When it first asks for one, they are gathered again."""
        full, again = _Gather.apply(self.shard), list[torch.Tensor]()
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), full[: sum(sizes)].split(sizes), strict=True)
        views = {name: part.view(shape) for (name, shape), part in parts}

        def save(t: torch.Tensor, place: int = full.untyped_storage().data_ptr()) -> Any:
            is_parameter = t.untyped_storage().data_ptr() == place  # not full: autograd keeps save
            return (t.shape, t.stride(), t.storage_offset()) if is_parameter else t

        def load(saved: Any) -> torch.Tensor:
            if isinstance(saved, tuple) and not again:
                again.append(_Gather.apply(self.shard).detach())
            return again[0].as_strided(*saved) if isinstance(saved, tuple) else saved

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
        return reduce_scatter(gradient, dist.group.WORLD)() / dist.get_world_size()  # type: ignore[arg-type]
