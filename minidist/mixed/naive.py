"""The idea, in twenty lines: what the lessons before have built, each along one axis of a mesh.

Features are cut first, so that the stages are made of cut layers. Gradients are averaged last, when
backward has ended. What the other files add: buckets, uneven replicas, their mean loss, clipping,
checkpoints, and errors that reach all ranks. Lesson: mixed_parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minidist.pipeline import Pipeline
from minidist.tensor_parallel import split


class NaiveMixedParallel:
    """A model such as `zoo.Transformer`, on a mesh of the axes data, pipeline and tensor."""

    def __init__(self, model: Any, mesh: DeviceMesh, microbatches: int) -> None:
        self.data = mesh.get_group("data")
        model = split(model, mesh.get_group("tensor"))  # this rank's features
        layers = model.sequential()  # of which it keeps those of its stage
        self.stage = Pipeline(layers, microbatches, process_group=mesh.get_group("pipeline"))

    def train_step(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Forward and backward for the rows of this replica: the mean gradient of all replicas."""
        loss: torch.Tensor = self.stage.train_step(inputs, targets, loss_fn)
        for parameter in self.stage.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.data)
            parameter.grad /= self.data.size()
        return loss
