"""A model on a mesh: its features cut, its layers shared out, its replicas kept equal."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minidist.common import agree
from minidist.common.groups import require_group
from minidist.common.norm import clip_grad_norm_
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.single import all_gather_single
from minidist.common.tensors_in import tensors_of
from minidist.common.wrapper import Found, Wrapper, copy_sharing
from minidist.mixed.kept_layers import keep_only, require_in_layers, require_layers
from minidist.mixed.mean_gradients import MeanGradients
from minidist.mixed.mesh_axes import AXES, require_all_ranks
from minidist.pipeline import Pipeline, Schedule
from minidist.pipeline.batch import Loss
from minidist.rank import device
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    full_state_dict,
    load_full_state_dict,
    split,
    vocab_parallel_cross_entropy,
)
from minidist.tensor_parallel.layers import gather_shards, indices_of
from minidist.tensor_parallel.model import counted_elsewhere


class MixedParallel(Wrapper):
    """Trains `module`, a sequence of layers, on a mesh of ranks. Lesson: mixed_parallelism.

        mesh = md.mixed.mesh(2, 2, 2)
        model = md.mixed.MixedParallel(model, mesh, microbatches=4)
        optimizer = torch.optim.Adam(model.parameters())        # of this rank's shards
        loss = model.train_step(inputs, targets, model.cross_entropy)
        model.clip_grad_norm_(1.0)
        optimizer.step()

    Every rank makes the whole model and takes rank 0's parameters. `module` is then cut, in place:
    it keeps this rank's features of this rank's layers, under their original names.

    mesh: from `mesh`, or any DeviceMesh of all ranks whose axes are data, pipeline and tensor.
    plan: how the layers are split along `tensor`, as `tensor_parallel.parallelize_module` takes it,
        by the names that modules have in `module`. None is for a `zoo.Transformer`, and for a mesh
        without tensor parallelism. Grouped queries may be in one layer.
    microbatches, schedule, balance, recompute: those of `Pipeline`, for each replica. The layers
        are those of `module`, an nn.Sequential, or those of `module.sequential()`. ("zero_bubble"
        gains little with more than one tensor rank: the backward of a column layer cannot be cut in
        two, and runs twice, with its message.)
    shard: what shards a stage along `data`, instead of averaging its gradients: called as
        shard(stage, device_mesh=mesh["data"]), for instance `md.FullyShardedDataParallel`, or a
        `functools.partial` of it. Its units are gathered for every micro-batch, unless
        `reshard_after_forward=False`. No parameter can be in two stages then, and no schedule can
        go back in two parts, as "zero_bubble" does.
    sequence_parallel: see `tensor_parallel.parallelize_module`. Less travels along the pipeline,
        too.

    Tied embedding and head stay so, in all replicas and stages. Along `data` gradients are averaged
    once a step, so an optimizer may shard its states there: a `md.ZeroRedundancyOptimizer` with
    `process_group=mesh.get_group("data")` (ZeRO, stage 1). After a step all replicas have the
    buffers of the first, such as the running means of batch norm.

    An optimizer sees this rank's shards. So it must look at one element at a time: Adafactor, Muon
    and LBFGS would train otherwise than in one process, and without an error. In float16 take a
    `md.ShardedGradScaler`: torch's would leave out steps on single ranks.

    `copy.deepcopy` gives a model on the same mesh, with a copy of this rank's shards. `torch.save`
    raises TypeError: save `full_state_dict()`.

    Raises RuntimeError without a process group; on every rank, TypeError if the module is not such
    a model, and ValueError if the mesh is not of all ranks, the model cannot be cut so, or the
    ranks disagree about any of this.
    """

    mesh: DeviceMesh
    pipeline: Pipeline

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        plan: Mapping[str, Any] | None = None,
        *,
        shard: Callable[..., nn.Module] | None = None,
        sequence_parallel: bool = False,
        recompute: bool = False,
    ) -> None:
        world = require_group(None, "MixedParallel")
        with agree.together(world):
            require_all_ranks(mesh)
            require_layers(module)
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
        if self._tensor.size() > 1:
            with agree.together(world):
                split(module, self._tensor, plan, sequence_parallel=sequence_parallel)
        model: Any = module
        layers = model if isinstance(model, nn.Sequential) else model.sequential()
        last: Any = layers[-1]
        # The words of which a rank gives the logits of its own.
        parted = isinstance(last, ColumnParallelLinear)
        self._vocabulary = last.out_features if parted else 0
        in_layers = {*layers.parameters(), *layers.buffers()}
        if shard is not None:
            require_in_layers(module, layers)
        pipeline = Pipeline(
            layers,
            microbatches,
            schedule,
            balance,
            self._pipeline,
            recompute,
            wrap=None if shard is None else partial(shard, device_mesh=mesh["data"]),
        )
        self._sharded: list[Any] = pipeline.wrapped if shard else []
        for stage in self._sharded:
            if not hasattr(stage, "fsdp_group"):
                raise TypeError(
                    "shard is for what shards a stage's parameters, such as "
                    f"FullyShardedDataParallel, not {type(stage).__name__}. For optimizer states "
                    "alone, in shards along data, make a ZeroRedundancyOptimizer"
                )
        own = pipeline.module
        elsewhere = in_layers - {*own.parameters(), *own.buffers()}
        keep_only(module, set(own.modules()), elsewhere)
        # Not a submodule: its layers are those of `module`, by other names.
        object.__setattr__(self, "pipeline", pipeline)
        self._mean = None if self._sharded else MeanGradients(module, self._data)
        self._found = Found(module, {*own.modules()}, "MixedParallel")

    @property
    def microbatches(self) -> int:
        """Those of the pipeline."""
        return self.pipeline.microbatches

    def train(self, mode: bool = True) -> "MixedParallel":
        """As nn.Module has it, for layers that the model's `sequential()` has made, too."""
        for stage in self.pipeline.wrapped:
            stage.train(mode)
        super().train(mode)
        return self

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss) -> torch.Tensor:
        """Forward and backward for one batch: adds to each parameter's `.grad`, and returns the
        loss, the mean over the whole batch of all replicas, on every rank. Every rank calls this.

        inputs, targets, loss_fn: as in `Pipeline.train_step`, of this rank's replica: ranks that
            differ along `pipeline` and `tensor` only pass the same. Replicas may have different
            numbers of rows; each counts by its rows.
        loss_fn: gets the logits of this rank's tokens if `tensor` is more than 1;
            `cross_entropy` is one for that.

        Raises on every rank what `Pipeline.train_step` does, and ValueError if ranks along `tensor`
        pass different batches; RuntimeError if a parameter was added, replaced or unfrozen, or a
        layer replaced, since the model was wrapped. A layer must fail on all ranks along `tensor`,
        and with `shard` a layer or loss_fn in all replicas, or the others wait for it until their
        group's timeout.
        """
        weight = self._weight(inputs, targets)
        loss, problem = torch.zeros(()), None
        try:
            loss = self.pipeline.train_step(inputs, targets, lambda y, t: loss_fn(y, t) * weight)
        except Exception as error:
            problem = error
        replicas = self._data.size()
        unused = self._mean is not None and self._mean.some_unused()
        # 1 for a replica without some gradient; for one that failed, more than all of these.
        went = replicas + 1 if problem is not None else int(unused)
        sums = torch.tensor([loss.item(), went], dtype=torch.float64, device=device())
        dist.all_reduce(sums, group=self._data)
        if sums[1] > replicas:
            agree.pass_on(problem, self._data)
        if self._mean is not None:
            self._mean.take(some_unused=bool(sums[1] > 0))
        # Now, not before the next pass as elsewhere: a replica may evaluate without the others.
        broadcast_state(self.module.buffers(), self._data)
        return sums[0] / replicas

    def _weight(self, inputs: Any, targets: Any) -> float:
        """How much this replica's loss counts: its rows, over the mean of all replicas. Raises on
        every rank if the parameters or layers of one have changed."""
        problem = None
        try:
            self._found.require_unchanged(self.module, trains=True)
        except RuntimeError as error:
            problem = error
        rows = next((len(x) for x in tensors_of(inputs) if x.ndim), 0)
        mine = [rows, _digest(inputs), _digest(targets), problem is not None]
        own = torch.tensor(mine, dtype=torch.float64, device=device())
        everyone = own.new_empty(len(mine) * self._by_place.numel())
        all_gather_single(everyone, own, None).wait()
        placed = everyone.cpu().view(-1, len(mine))[self._by_place]  # (d, p, t, 4)
        if placed[..., 3].any():
            agree.raise_on_every_rank(problem, require_group(None, "MixedParallel"))
        first, last = placed[:, 0, :, :2], placed[:, -1, :, 2]
        if (first != first[:, :1]).any() or (last != last[:, :1]).any():
            raise ValueError("ranks along the tensor axis were given different batches")
        by_replica = first[:, 0, 0]
        return (by_replica[self.mesh.get_local_rank("data")] / by_replica.mean()).item()

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens, of logits that may be split by vocabulary. For `train_step`."""
        if not self._vocabulary:
            return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return vocab_parallel_cross_entropy(outputs, targets, self._tensor)

    def forward(self, inputs: Any) -> torch.Tensor:
        """The outputs for the inputs, whole, on every rank of the replica, without gradients. Every
        rank of the replica calls this with the same inputs. Raises RuntimeError on all of them if a
        layer of one was replaced, or a hook put on what only holds layers."""
        with agree.together(self._pipeline, self._tensor):
            self._found.require_unchanged(self.module)
        own = self.pipeline(inputs)  # (B, T, V_r)
        if not self._vocabulary:
            return own
        ranks = self._tensor.size()
        widths = [len(indices_of(self._vocabulary, rank, ranks)) for rank in range(ranks)]
        return torch.cat(gather_shards(own, own.ndim - 1, widths, self._tensor), -1)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of the whole model, is at most `max_norm`;
        what it was is returned. Every rank calls this. torch's function would take the norm
        of one rank's gradients.

        Shards are summed over `tensor`, and stages over `pipeline`. What is replicated counts once,
        and so does what two stages share. Along `data` all gradients are the same, or shards.
        """
        replicated = counted_elsewhere(self.module, self._tensor)
        return clip_grad_norm_(
            self.parameters(),
            max_norm,
            norm_type,
            groups=[self._data] * bool(self._sharded) + [self._pipeline, self._tensor],
            device=device(),
            elsewhere=self.pipeline.counted_elsewhere | replicated,
        )

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the whole model, on the CPU of every rank. Every rank calls this.
        (`state_dict()` is that of this rank's shards.)"""
        with self.pipeline.whole_stages():
            own = full_state_dict(self.module)
            return agree.whole_state(self._pipeline, own, self._names)

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards, from a `state_dict` of the whole model. Raises RuntimeError, as
        `load_state_dict` does, if names or shapes are others."""
        with self.pipeline.whole_stages():
            elsewhere = set(self._names) - set(self.module.state_dict())
            own = {name: value for name, value in state.items() if name not in elsewhere}
            load_full_state_dict(self.module, own)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixedParallel":
        return copy_sharing(self, memo, self.mesh, self._data, self._pipeline, self._tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a MixedParallel cannot be saved: it has one rank's shards of the model. "
            "Save its full_state_dict()"
        )


def _digest(batch: Any) -> float:
    """A number that tells batches from each other."""
    total = 0.0
    for number, x in enumerate(tensors_of(batch), 1):
        flat = x.detach().flatten().double().nan_to_num()
        steps = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
        total += number * (flat @ steps).item()
    return total
