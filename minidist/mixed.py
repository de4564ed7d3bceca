"""Lesson 7: mixed parallelism. Data, pipeline and tensor parallelism at once, on a mesh of ranks.

Every rank has a place (d, p, t) in a mesh, and shares a group with the others along each axis:

    axis        of the model it has      what travels along it
    data        the same part            gradients, once a step
    pipeline    other layers             activations and their gradients, once a micro-batch
    tensor      other features           sums of activations, four a block and a micro-batch

So the ranks along `tensor` belong closest together, and those along `data` may be far apart. All
this is put together from the lessons before: features are cut first (lesson 6), then the cut layers
are shared out as stages (lesson 5), and the gradients of each stage are averaged in the buckets of
lesson 4. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (arXiv 2104.04473), section 3.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_

from minidist.common import agree
from minidist.common.guard import Guard
from minidist.common.norm import norm_over_ranks
from minidist.common.replicas import (
    broadcast_state,
    require_group,
    require_same_model,
)
from minidist.common.wrapper import Wrapper
from minidist.distributed_data_parallel.buckets import Bucket, assign
from minidist.measure import TrafficCounter
from minidist.pipeline import Pipeline, Schedule
from minidist.pipeline.opening import Loss
from minidist.rank import device
from minidist.tensor_parallel import (
    full_state_dict,
    grad_norm,
    load_full_state_dict,
    parallelize,
    vocab_parallel_cross_entropy,
)
from minidist.tensor_parallel.layer import gather_shards, shard

__all__ = ["AXES", "MixedParallel", "mesh", "traffic_by_axis"]

AXES = "data", "pipeline", "tensor"
BUCKET = 25 * 2**20  # bytes, as in lesson 4


def mesh(
    data: int = 1, pipeline: int = 1, tensor: int = 1, order: Sequence[str] = AXES
) -> DeviceMesh:
    """All ranks as a mesh with these three axes, by torch's `init_device_mesh`. Lesson 7.

        mesh = md.mixed.mesh(data=2, pipeline=2, tensor=2)     # on 8 ranks

    order: from the outermost axis to the innermost, along which ranks are neighbours: with the one
        above, ranks 0 and 1 share the layers of one stage, and a node of four holds one replica.

    Every rank calls this. Raises ValueError, on every rank, if the sizes do not fit the number of
    ranks, or are not the same on all; RuntimeError without a process group.
    """
    group = require_group(None, "mixed.mesh")
    sizes = dict(data=data, pipeline=pipeline, tensor=tensor)
    ranks, problem = dist.get_world_size(group), None
    if sorted(order) != sorted(AXES):
        problem = ValueError(f"order names {', '.join(AXES)}, each once, not {', '.join(order)}")
    elif min(sizes.values()) < 1 or prod(sizes.values()) != ranks:
        told = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        problem = ValueError(
            f"a mesh of {told} is for {prod(sizes.values())} ranks, and there are {ranks}"
        )
    agree.raise_on_every_rank(group, problem)
    agree.require_same(group, sizes | dict(order=tuple(order)))
    return init_device_mesh(
        device().type, tuple(sizes[axis] for axis in order), mesh_dim_names=tuple(order)
    )


class MixedParallel(Wrapper):
    """Trains `module`, a `zoo.Transformer` or a model like it, on a mesh of ranks. Lesson 7.

        model = md.mixed.MixedParallel(model, md.mixed.mesh(2, 2, 2), microbatches=4)
        optimizer = torch.optim.Adam(model.parameters())        # of this rank's shards
        loss = model.train_step(inputs, targets, model.cross_entropy)
        model.clip_grad_norm_(1.0)
        optimizer.step()

    Every rank makes the whole model and takes rank 0's parameters. `module` is then cut, in place:
    it keeps this rank's features of this rank's layers, under their original names.

    mesh: from `mesh`, or any DeviceMesh of all ranks whose axes are data, pipeline and tensor.
    microbatches, schedule, balance, recompute: those of `Pipeline`, for each replica. Layers are
        those of `module.sequential()`. ("zero_bubble" gains little with more than one tensor rank:
        the backward of a column layer cannot be cut in two, and runs twice, with its message.)
    sequence_parallel: see `tensor_parallel.parallelize`. Less travels along the pipeline, too.

    Tied embedding and head stay so, in all replicas and stages.

    Raises RuntimeError without a process group; on every rank, TypeError if the module is not such
    a model, and ValueError if the mesh is not of all ranks, the model cannot be cut so, or the
    ranks disagree about any of this.
    """

    pipeline: Pipeline

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        *,
        sequence_parallel: bool = False,
        recompute: bool = False,
    ) -> None:
        world = require_group(None, "MixedParallel")
        agree.raise_on_every_rank(world, _problem(module, mesh))
        names: Any = mesh.mesh_dim_names
        settings = dict(microbatches=microbatches, schedule=schedule, balance=balance)
        settings |= dict(sequence_parallel=sequence_parallel, recompute=recompute)
        agree.require_same(world, settings | dict(mesh=(names, mesh.mesh.tolist())))
        require_same_model(module, world)
        broadcast_state([*module.parameters(), *module.buffers()], world)

        super().__init__(module)
        self.mesh, self._names = mesh, list(module.state_dict())
        self._data, self._pipeline, self._tensor = (mesh.get_group(axis) for axis in AXES)
        self._by_place = mesh.mesh.permute([names.index(axis) for axis in AXES])  # (d, p, t)
        model: Any = module
        self._words = model.head.out_features
        if self._tensor.size() > 1:
            agree.raise_on_every_rank(world, self._split(sequence_parallel))
        pipeline = Pipeline(
            model.sequential(), microbatches, schedule, balance, self._pipeline, recompute
        )
        _keep_only(module, set(pipeline.module.modules()))
        # Not a submodule: its layers are those of `module`, by other names.
        object.__setattr__(self, "pipeline", pipeline)
        # A hook of lesson 4 would fire at every micro-batch, before the gradient is complete, and
        # before the two ends of a tie are added up: the buckets leave at the end of the step.
        trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        buckets = assign(trained, BUCKET) if self._data.size() > 1 else []
        self._buckets = [
            Bucket(number, parameters, number == len(buckets) - 1, self._data)
            for number, parameters in enumerate(buckets)
        ]
        self._guard = Guard(module, "MixedParallel")

    def _split(self, sequence_parallel: bool) -> ValueError | None:
        try:
            parallelize(self.module, self._tensor, sequence_parallel=sequence_parallel)
        except ValueError as problem:
            return problem
        return None

    def train_step(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: Loss
    ) -> torch.Tensor:
        """Forward and backward for one batch: adds to each parameter's `.grad`, and returns the
        loss, the mean over the whole batch of all replicas, on every rank. Every rank calls this.

        inputs, targets, loss_fn: as in `Pipeline.train_step`, of this rank's replica: ranks that
            differ along `pipeline` and `tensor` only pass the same. Replicas may have different
            numbers of rows; each counts by its rows.
        loss_fn: gets outputs of this rank's words if `tensor` is more than 1; `cross_entropy` is
            one for that.

        Raises on every rank what `Pipeline.train_step` does, and ValueError if ranks along `tensor`
        pass different batches; RuntimeError if a parameter was added, replaced or unfrozen since
        the model was wrapped. A layer must fail on all ranks along `tensor`, or the others wait for
        it until their group's timeout.
        """
        self._guard.require_unchanged()
        weight = self._weight(inputs, targets)
        loss, problem = torch.zeros(()), None
        try:
            loss = self.pipeline.train_step(inputs, targets, lambda y, t: loss_fn(y, t) * weight)
        except Exception as error:
            problem = error
        told = torch.tensor(
            [loss.item(), problem is not None], dtype=torch.float64, device=device()
        )
        dist.all_reduce(told, group=self._data)
        if told[1]:
            agree.pass_on(self._data, problem)
        self._average()
        return told[0] / self._data.size()

    def _weight(self, inputs: Any, targets: Any) -> float:
        """How much this replica's loss counts: its rows, over the mean of all replicas."""
        rows = len(inputs) if isinstance(inputs, torch.Tensor) and inputs.ndim else 0
        mine = [rows, _digest(inputs), _digest(targets)]
        told = torch.tensor(mine, dtype=torch.float64, device=device())
        everyone = [torch.empty_like(told) for _ in range(self._by_place.numel())]
        dist.all_gather(everyone, told)
        placed = torch.stack(everyone).cpu()[self._by_place]  # (d, p, t, 3)
        first, last = placed[:, 0, :, :2], placed[:, -1, :, 2]
        if (first != first[:, :1]).any() or (last != last[:, :1]).any():
            raise ValueError("ranks along the tensor axis were given different batches")
        by_replica = first[:, 0, 0]
        return (by_replica[self.mesh.get_local_rank("data")] / by_replica.mean()).item()

    def _average(self) -> None:
        """Give every replica the mean of the gradients."""
        works = []
        for bucket in self._buckets:
            for slot in range(len(bucket.parameters())):
                bucket.hold(slot, 1 / self._data.size())
            works.append(dist.all_reduce(bucket.buffer(), group=self._data, async_op=True))
        for work in works:
            assert work is not None  # which it is for ranks outside the group only
            work.wait()

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all words, of outputs that are split by words. For `train_step`."""
        return vocab_parallel_cross_entropy(outputs, targets, self._tensor)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs for the inputs, whole, on every rank of the replica, without gradients. Every
        rank of the replica calls this with the same inputs."""
        own = self.pipeline(inputs)  # (B, T, V_r)
        ranks = self._tensor.size()
        if ranks == 1:
            return own
        widths = [len(shard(self._words, rank, ranks)) for rank in range(ranks)]
        return torch.cat(gather_shards(own, own.ndim - 1, widths, self._tensor), -1)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of the whole model, is at most `max_norm`;
        what it was is returned. Every rank calls this.

        Shards are summed over `tensor`, and stages over `pipeline`. What is replicated counts once,
        and so does what two stages share. Along `data` all gradients are the same.
        """
        own = grad_norm(self.module, norm_type, self.pipeline.counted_elsewhere)
        total = norm_over_ranks(own.to(device(), torch.float64), norm_type, self._pipeline)
        clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the whole model, on the CPU of every rank. Every rank calls this.
        (`state_dict()` is that of this rank's shards.)"""
        return agree.whole_state(self._pipeline, full_state_dict(self.module), self._names)

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards, from a `state_dict` of the whole model. Raises RuntimeError, as
        `load_state_dict` does, if names or shapes are others."""
        elsewhere = set(self._names) - set(self.module.state_dict())
        own = {name: value for name, value in state.items() if name not in elsewhere}
        load_full_state_dict(self.module, own)


def traffic_by_axis(
    traffic: TrafficCounter, mesh: DeviceMesh
) -> dict[str, dict[str, tuple[int, int]]]:
    """What this rank has sent along each axis, and its collectives: {operation: (calls, bytes)},
    as `TrafficCounter` counts them. Lesson 7."""
    groups = {axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in AXES}
    return {axis: traffic.by_group.get(ranks, {}) for axis, ranks in groups.items()}


def _problem(module: Any, mesh: DeviceMesh) -> Exception | None:
    names = mesh.mesh_dim_names or ()
    if sorted(names) != sorted(AXES):
        return ValueError(f"the axes of the mesh must be {', '.join(AXES)}, not {', '.join(names)}")
    if mesh.size() != dist.get_world_size():
        return ValueError(f"a mesh of {mesh.size()} ranks is not of all {dist.get_world_size()}")
    if isinstance(module, Wrapper) or not hasattr(module, "sequential"):
        found = type(module).__name__
        return TypeError(f"MixedParallel takes a zoo.Transformer or a model like it, not {found}")
    return None


def _digest(x: Any) -> float:
    """A number that tells batches from each other."""
    if not isinstance(x, torch.Tensor):
        return 0.0
    flat = x.detach().flatten().double().nan_to_num()
    return (flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)).item()


def _keep_only(module: nn.Module, kept: set[nn.Module]) -> None:
    """Take out of a module what is not in `kept`."""
    for name, child in list(module._modules.items()):
        if child is None or child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            del module._modules[name]
        else:
            _keep_only(child, kept)
