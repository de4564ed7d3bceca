"""The idea, in forty lines: what the lessons before have built, each along one axis of a mesh.

Features are cut first, so that the stages are made of cut layers. Gradients are averaged last, when
backward has ended. One number is of the whole model: the norm of its gradients. What the other
files add: FSDP, context, experts, uneven replicas, their mean loss, and checkpoints.
Lesson: mixed_parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minidist.distributed_data_parallel.buckets import assign
from minidist.pipeline import Pipeline
from minidist.tensor_parallel import split
from minidist.tensor_parallel.model import counted_elsewhere


class NaiveMixedParallel:
    """A model such as `zoo.Transformer`, on a mesh of the axes data, pipeline and tensor."""

    def __init__(self, model: Any, mesh: DeviceMesh, microbatches: int) -> None:
        axes = "data", "pipeline", "tensor"
        self.data, self.pipeline, self.tensor = (mesh.get_group(axis) for axis in axes)
        split(model, self.tensor)  # it keeps this rank's features, and then the layers of its stage
        self.stage = Pipeline(model.sequential(), microbatches, process_group=self.pipeline)
        self.buckets = assign(list(self.stage.parameters()), cap=25 * 2**20)

    def train_step(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Forward and backward for the rows of this replica: the mean gradient of all replicas."""
        loss: torch.Tensor = self.stage.train_step(inputs, targets, loss_fn)
        for bucket in self.buckets:  # one message for many parameters
            gradients: list[Any] = [parameter.grad for parameter in bucket]
            together = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(together, group=self.data)
            means = (together / self.data.size()).split([len(g.flatten()) for g in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; what it was is returned."""
        # Each counts once: not what an earlier stage has, or what all ranks along tensor have.
        again = self.stage.counted_elsewhere | counted_elsewhere(self.stage, self.tensor)
        gradients: dict[Any, Any] = {p: p.grad for p in self.stage.parameters()}
        total = torch.zeros((), dtype=torch.float64)
        for parameter, gradient in gradients.items():
            total += gradient.square().sum() * (parameter not in again)
        for group in self.tensor, self.pipeline:  # along data all have the same
            dist.all_reduce(total, group=group)
        for gradient in gradients.values():
            gradient *= (max_norm / (total.sqrt() + 1e-6)).clamp(max=1)  # as torch has it
        return total.sqrt()
