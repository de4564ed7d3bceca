"""A model on a mesh: its features cut, its layers shared out, its replicas kept equal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minidist import experts
from minidist import tensor_parallel as features
from minidist.common import agree
from minidist.common.groups import require_group
from minidist.common.norm import clip_grad_norm_
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.tensors_in import tensors_of
from minidist.common.wrapper import Wrapper, copy_sharing
from minidist.context_parallel import Cut, attention_by, ring_attention
from minidist.distributed_data_parallel.buckets import BUCKET_CAP_MB, Buckets, assign
from minidist.mixed.mesh_axes import AXES, replicas, sharing_rows
from minidist.pipeline import Pipeline, Schedule
from minidist.rank import device
from minidist.tensor_parallel.layers import gather_shards
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

    torchtitan cuts stages first, then in each the features; recomputation goes around the layers,
    data parallelism around all. Here features come first: so the two ends of a tie are one shard
    when `Pipeline` finds them, and a plan names parts of `module`. `recompute` is around `shard`.

    mesh: from `mesh`, or any DeviceMesh of all ranks whose axes are data, pipeline and tensor, and
        perhaps context and experts. Ranks along context share the tokens of each row, by a zigzag
        `Cut`. The first layer then gets a tuple: tokens (B, T_r), and their positions (B, T_r).
        Ranks along experts have other rows, as those along data, and other experts of each
        `md.experts.MoE`, whose `aux` is divided by the micro-batches.
    plan, sequence_parallel: as `tensor_parallel.parallelize_module` takes them. No plan is for a
        `zoo.Transformer`, and for a mesh without tensor parallelism.
    microbatches, schedule, balance, recompute: those of `Pipeline`, for each replica. The layers
        are those of `module`, an nn.Sequential, or those of `module.sequential()`.
    shard: what shards a stage along `data` and `context`, instead of averaging its gradients:
        called as shard(stage, device_mesh=mesh["data"]), or with all such axes as one, for instance
        `md.FullyShardedDataParallel`, or a `functools.partial` of it. No parameter can be in two
        stages then. Along `experts` it is to leave them alone, as a function that calls
        `md.fully_shard` with `ignored_params=set(md.experts.parameters(stage))` does.

    Along `data` (`context`, `experts`) gradients are averaged once a step, so an optimizer may
    shard its states there: a `md.ZeroRedundancyOptimizer` with
    `process_group=mesh.get_group("data")` (ZeRO, stage 1), for all but experts. After a step all
    replicas have the buffers of the first, such as the running means of batch norm.

    Limits: nobody compares the batches of ranks that must be given the same. What a layer raises on
    one rank ends the ranks of `md.ranks` or torchrun: the others wait for it. Along `context`, only
    attention by `F.scaled_dot_product_attention` is that of all tokens, in a ring. No plan cuts an
    expert: along `tensor` each rank has the same ones, and a plan names attention alone. Replace,
    compile and hook layers before. An optimizer sees this rank's shards, so it must look at one
    element at a time: not Adafactor, Muon or LBFGS. In float16 take a `md.ShardedGradScaler`.

    Raises RuntimeError without a process group; ValueError, on every rank, if the mesh is not of
    all ranks, the model cannot be cut so, or the ranks disagree about any of this.
    """

    mesh: DeviceMesh
    pipeline: Pipeline

    def __init__(
        self,
        module: Any,
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
        names = mesh.mesh_dim_names or ()
        settings = dict(mesh=(names, mesh.mesh.tolist()), microbatches=microbatches)
        settings |= dict(schedule=schedule, balance=balance, recompute=recompute)
        agree.require_same(world, settings | dict(sequence_parallel=sequence_parallel))
        needed = sorted({*names} - {"context", "experts"})
        if needed != sorted(AXES) or mesh.size() != dist.get_world_size():
            found = f"{', '.join(names) or 'no names'}; {mesh.size()} ranks"
            raise ValueError(f"the mesh has {found}: take {', '.join(AXES)}, and all ranks")
        require_same_model(module, world)
        broadcast_state([*module.parameters(), *module.buffers()], world)

        super().__init__(module)
        self.mesh, self._names, self._device = mesh, list(module.state_dict()), device()
        averaging = replicas(mesh)
        self._data, self._context = averaging.get_group(), None
        self._pipeline, self._tensor = (mesh.get_group(axis) for axis in AXES[1:])
        self._parts = self._tensor.size() if sequence_parallel else 1  # of the tokens of a rank
        if "context" in names:
            self._context = mesh.get_group("context")
        if "experts" in names and self._parts > 1:
            raise ValueError("experts and sequence_parallel, which cuts tokens: leave one out")
        if self._tensor.size() > 1:
            features.split(module, self._tensor, plan, sequence_parallel=sequence_parallel)
        layers = module if isinstance(module, nn.Sequential) else module.sequential()
        last: Any = layers[-1]
        # Of how many words each rank along tensor gives the logits, if none gives all.
        parted = isinstance(last, features.ColumnParallelLinear)
        self._words = [len(last.indices(r)) for r in range(self._tensor.size())] if parted else []
        in_layers = {*layers.parameters(), *layers.buffers()}
        wrap = shard and (lambda s: shard(self._share_experts(s), device_mesh=averaging))
        cut = Pipeline(layers, microbatches, schedule, balance, self._pipeline, recompute, wrap)
        own = cut.module if shard else self._share_experts(cut.module)
        self._experts = set(experts.parameters(own)) if "experts" in names else set()
        for layer in own.modules():
            if isinstance(layer, experts.MoE):
                layer.aux /= microbatches
        _keep(module, {*own.modules()}, in_layers - {*own.parameters(), *own.buffers()})
        # Not a submodule: its layers are those of `module`, by other names.
        object.__setattr__(self, "pipeline", cut)
        self._sharded = [unit for unit in cut.wrapped if hasattr(unit, "fsdp_group")]
        self._buckets = Buckets([], self._data)

    def _share_experts(self, stage: nn.Module) -> nn.Module:
        """Those of a stage, if it has any, shared by the ranks of its pipeline and tensor place."""
        if "experts" in (self.mesh.mesh_dim_names or ()) and experts.parameters(stage):
            experts.parallelize(stage, sharing_rows(self.mesh))
        return stage

    def train(self, mode: bool = True) -> "MixedParallel":
        """As nn.Module has it, for layers that the model's `sequential()` has made, too."""
        for stage in self.pipeline.wrapped:
            stage.train(mode)
        super().train(mode)
        return self

    def train_step(self, inputs: Any, targets: Any, loss_fn: Callable[..., Any]) -> torch.Tensor:
        """Forward and backward for one batch: adds to each parameter's `.grad`, and returns the
        loss, the mean over the whole batch of all replicas, on every rank. Every rank calls this.

        inputs, targets: as in `Pipeline.train_step`, of this rank's replica: ranks that differ
            along `pipeline`, `context` and `tensor` only pass the same. Each replica counts by its
            rows. With `context` both are (B, T), and -100, no other number, is no target.
        loss_fn: as there. It gets this rank's words of the logits, as `cross_entropy` takes them.

        """
        rows = next((len(x) for x in tensors_of(targets) if x.ndim), 1)
        of_all = torch.tensor(rows, device=self._device)
        dist.all_reduce(of_all, group=self._data)
        replicas = self._data.size()
        weight = rows * replicas / of_all.item()
        loss = self._train(inputs, targets, lambda y, t: loss_fn(y, t) * weight)
        trained = [p for p in self.parameters() if p.requires_grad and p not in self._experts]
        trained = [] if self._sharded else trained
        mine = [loss.item(), 1, *(p.grad is not None for p in trained)]
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums, group=self._data)
        if replicas > 1:
            self._average(trained, used=sums[2:])
        if buffers := list(self.module.buffers()):  # now: a replica may evaluate alone
            broadcast_state(buffers, self._data)
        return sums[0] / sums[1]

    def _train(self, inputs: Any, targets: Any, loss_fn: Callable[..., Any]) -> torch.Tensor:
        if self._context is None:
            return self.pipeline.train_step(inputs, targets, loss_fn)
        rank, ranks = dist.get_rank(self._context), self._context.size()
        if targets.shape != inputs.shape:
            raise ValueError(f"inputs are {tuple(inputs.shape)}, targets {tuple(targets.shape)}")

        def part(outputs: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
            """Of the mean over whole rows, times the ranks: the mean over them is taken later."""
            own, of_rows = ((targets != -100).sum() for targets in pair)
            return loss_fn(outputs, pair[0]) * ranks * own / of_rows if own else outputs[:0].sum()

        with self._tokens_cut(inputs) as (cut, own):
            return self.pipeline.train_step(own, (cut.take(targets, rank), targets), part)

    @contextmanager
    def _tokens_cut(self, inputs: torch.Tensor) -> Iterator[tuple[Cut, Any]]:
        """How rows are cut, and what the first layer gets of them. Within the block attention is
        that of all their tokens."""
        rank, ranks = dist.get_rank(self._context), dist.get_world_size(self._context)
        length = inputs.shape[1]
        cut = Cut.of("zigzag", length, ranks)
        if any(not len(own) or len(own) % self._parts for own in cut.positions):
            raise ValueError(f"{length} tokens cannot be cut over {ranks} x {self._parts} ranks")
        positions = cut.positions[rank].to(inputs.device).expand(len(inputs), -1)
        with attention_by(partial(ring_attention, cut=cut, group=self._context)):
            yield cut, (cut.take(inputs, rank), positions)

    def _average(self, trained: list[nn.Parameter], used: torch.Tensor) -> None:
        """By DDP's buckets, but at the end: its hooks would fire at every micro-batch, before the
        two ends of a tie are added up. used: on how many replicas a parameter has a gradient."""
        self._buckets.arrange(assign(trained, BUCKET_CAP_MB * 2**20))
        self._buckets.reset()
        for parameter in trained:
            self._buckets.add(parameter)
        self._buckets.wait()
        self._buckets.give(compress(trained, used))

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens, of logits that may be split by vocabulary. For `train_step`."""
        if not self._words:
            return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return features.vocab_parallel_cross_entropy(outputs, targets, self._tensor)

    def forward(self, inputs: Any) -> torch.Tensor:
        """The outputs for the inputs, whole, on every rank of the replica, without gradients. Every
        rank of the replica calls this with the same inputs."""
        if self._context is None:
            own: torch.Tensor = self.pipeline(inputs)  # (B, T, V_r)
        else:
            with self._tokens_cut(inputs) as (cut, tokens):
                own = self.pipeline(tokens)
            own = cut.join(gather_shards(own, 1, list(map(len, cut.positions)), self._context))
        if not self._words:
            return own
        return torch.cat(gather_shards(own, own.ndim - 1, self._words, self._tensor), -1)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm, that of the whole model, is at most `max_norm`;
        what it was is returned. Every rank calls this. What is replicated counts once, and so does
        what two stages share. Along `data` all gradients are the same, or shards; along `experts`
        each rank has other experts."""
        twice = self.pipeline.counted_elsewhere | counted_elsewhere(self.module, self._tensor)
        groups = [self._data] * bool(self._sharded or self._experts)
        groups += [self._pipeline, self._tensor]
        twice |= experts.counted_elsewhere(self.module) if self._experts else set()
        options: Any = dict(groups=groups, device=self._device, elsewhere=twice)
        return clip_grad_norm_(self.parameters(), max_norm, norm_type, **options)

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the whole model, on the CPU of every rank. Every rank calls this.
        (`state_dict()` is that of this rank's shards.)"""
        own = features.full_state_dict(self.module)
        return agree.whole_state(self._pipeline, own, self._names)

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards, from a `state_dict` of the whole model. Raises RuntimeError, as
        `load_state_dict` does, if names or shapes are others."""
        elsewhere = set(self._names) - set(self.module.state_dict())
        own = {name: value for name, value in state.items() if name not in elsewhere}
        features.load_full_state_dict(self.module, own)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixedParallel":
        groups = self._data, self._pipeline, self._tensor, self._context
        return copy_sharing(self, memo, self.mesh, *groups)


def _keep(module: nn.Module, kept: set[nn.Module], elsewhere: set[torch.Tensor]) -> None:
    """Take out of a module what is not this rank's: the modules that are not in `kept` and have
    none of these within them, and of those that hold layers the tensors that are `elsewhere`."""
    for holder in [each for each in module.modules() if each not in kept]:
        for name, child in list(holder._modules.items()):
            if child is not None and kept.isdisjoint(child.modules()):
                del holder._modules[name]
        for table in holder._parameters, holder._buffers:
            for name in [name for name, tensor in table.items() if tensor in elsewhere]:
                del table[name]
