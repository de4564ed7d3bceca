"""`Pipeline`: a rank's stages, and a training step through all of them.

Lessons: layer_splitting, pipeline_schedules
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from minidist.collectives.peers import Peers, wait_for
from minidist.common import agree
from minidist.common.groups import is_rehearsal, require_group
from minidist.common.norm import clip_grad_norm_
from minidist.common.replicas import broadcast_state, require_same_model
from minidist.common.tensors_in import tensors_of
from minidist.common.wrapper import Wrapper, copy_sharing
from minidist.instruments.measure import record
from minidist.pipeline.cut import fill, find_ties, require_known, schedule_and_balance
from minidist.pipeline.executor import (
    Executor,
    Loss,
    added_up,
    empty_like,
    merge_microbatches,
    spec_of,
    split_into_microbatches,
)
from minidist.pipeline.instructions import Schedule, Span
from minidist.pipeline.schedules import forward_only
from minidist.pipeline.stage import Stage
from minidist.rank import device


class Pipeline(Wrapper):
    """Trains `module`, an nn.Sequential, its layers spread over the ranks of a group.

        model = md.Pipeline(model, microbatches=8)
        optimizer = torch.optim.Adam(model.parameters())     # of this rank's layers
        loss = model.train_step(inputs, targets, loss_fn)    # forward and backward
        optimizer.step()

    Every rank makes the whole module, takes rank 0's parameters and buffers, and keeps the layers
    of its own stages; the others are freed when nobody else holds the module. Stage s lives on rank
    s modulo the number of ranks. `module` is the part that is kept, under its original names.

    microbatches: into how many parts a batch is cut, by rows, as evenly as can be.
    schedule: "naive", "gpipe", "1f1b", "interleaved", "zero_bubble", or a Schedule of your own.
    balance: how many layers each stage takes; None spreads the parameters evenly. Its length is
        the number of stages: the number of ranks, or for "interleaved" a multiple (None: twice).
    process_group: the ranks that take part; None is the default group.
    recompute: keep a stage's inputs only, and compute its activations again for backward; in the
        last stage the loss too, so loss_fn is called twice for each micro-batch. As in
        `checkpoint_wrapper`, a buffer that forward both reads and moves, as spectral norm does, is
        another one the second time, without an error.
    wrap: a strategy along another axis of a mesh, such as FullyShardedDataParallel or `fully_shard`
        (torch's own, and its DDP, raise TypeError). It is given the layers of each stage, and what
        it returns is run in their place. Then no parameter can be in two stages, and no schedule
        can go back in two parts, as "zero_bubble" does.
    param_init_fn: gives memory and values to a module on the device "meta"; None calls its
        `to_empty` and `reset_parameters()`.

    A model that no rank could hold is made on the device "meta": each rank then fills its own
    stages only. The stages are filled in their order, each with the random state that the one
    before has left, so the values are those that one process would draw by rank 0's seed. (A layer
    in stages of several ranks draws on each.) All ranks go on with the random state that the last
    stage has left: seed them afterwards, if their random numbers are to differ.

    A layer takes what the one before it gives, as in any nn.Sequential: a tensor, or tensors in
    tuples, lists and dicts; tensors of whole numbers and masks get no gradient. What is no tensor
    must be the same in all micro-batches. With batches of a new shape stages say once what they
    give each other. After that a step sends, besides activations and gradients, 16 bytes from rank
    to rank before it, and at its end the loss.

    A parameter that layers of several ranks share, as a tied embedding and head do, is kept by
    each, and gets the sum of their gradients; a buffer that they share is each rank's own. Batch
    norm takes its means over a micro-batch, not over the batch, and moves its running means once
    for each.

    `copy.deepcopy` gives a pipeline of the same ranks, each with a copy of its own layers.

    Limits
    - torch's `nn.utils.clip_grad_norm_` takes the norm of one rank's gradients, another one on each
      rank: call `clip_grad_norm_` of this class.
    - An optimizer sees this rank's layers: one that looks at all parameters at once, as LBFGS does,
      would train otherwise than in one process. In float16 take a `md.ShardedGradScaler`.
    - A layer gets no keyword arguments: what several layers need, such as a mask, they pass on.
    - A number that changes in each step is a tensor (rows,): any other value makes a new kind of
      batch, and all kinds are remembered.
    - A stage cannot begin with a layer that overwrites its input.
    - With `wrap`, what fails on one replica is waited for by the others, until their timeout. So is
      an evaluation of fewer rows than micro-batches.
    - Unfreezing a layer later raises ValueError where a stage had given nothing that is trained.
      A layer that is replaced later is not trained, nor what has made the inputs: `md.watch` finds
      this.

    Lesson: layer_splitting. Raises RuntimeError without a process group; on every rank, TypeError
    if the module is no nn.Sequential, or has a forward, hooks, parameters or buffers of its own,
    and ValueError if it cannot be cut so, the schedule cannot take so many micro-batches, or the
    ranks disagree about any of this.
    """

    process_group: dist.ProcessGroup
    schedule: Schedule
    balance: list[int]
    trace: list[Span]  # what this rank did in the last step, and when (on a GPU: when queued)
    wrapped: list[nn.Module]
    counted_elsewhere: set[nn.Parameter]  # shared ones that count on another rank in norms

    def __init__(
        self,
        module: nn.Sequential,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:
        group = require_group(process_group, "Pipeline")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        with agree.together(group):
            plan, counts = schedule_and_balance(module, microbatches, schedule, balance, ranks)
            if wrap is not None and plan.splits_backward:
                raise ValueError(
                    f"schedule {plan.name} goes back in two parts, and a strategy around a stage "
                    "waits for the whole backward pass: take another schedule, such as 1f1b"
                )
        settings = dict(microbatches=microbatches, balance=counts, schedule=plan)
        agree.require_same(group, settings | dict(recompute=recompute))
        require_same_model(module, group)
        tensors = [*module.parameters(), *module.buffers()]
        filled = [tensor for tensor in tensors if not tensor.is_meta]
        broadcast_state(filled, group)
        alone = is_rehearsal(group)  # what has no memory needs none
        self._device = torch.device("meta") if alone else device(module)

        layers = list(module._modules.items())  # by name: a layer that comes twice has two
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        ties = find_ties([m for _, m in layers], [plan.rank_of(stage) for stage in stage_of])
        if wrap is not None and any(parameter.requires_grad for parameter in ties):
            raise ValueError(
                "a parameter that several stages share cannot be in a strategy of each"
            )
        parts = {stage: nn.Sequential() for stage in range(rank, plan.stages, ranks)}
        own = nn.Sequential()
        for (name, layer), stage in zip(layers, stage_of, strict=True):
            if stage in parts:
                parts[stage].add_module(name, layer)
                own.add_module(name, layer)
        self._peers = Peers(group)
        if len(filled) < len(tensors) and not alone:
            ties = fill(parts, plan, ties, self._peers, self._device, param_init_fn)
        super().__init__(own)
        self.process_group, self.schedule, self.balance = group, plan, counts
        self.trace = []
        self._stages = {
            stage: Stage(part if wrap is None else wrap(part), recompute)
            for stage, part in parts.items()
        }
        self.wrapped = [stage.module for stage in self._stages.values()]
        with agree.together(group):
            for each in self.wrapped:
                require_known(each)
        # The stages whose parameters a strategy shards.
        self._sharded: list[Any] = [x for x in self.wrapped if hasattr(x, "fsdp_group")]
        self._names = list(module.state_dict())
        self._shared = {p for p, those in ties.items() if rank in those}
        self._ties = {p: ties[p] for p in self._shared if p.requires_grad}
        self.counted_elsewhere = {p for p, (first, *_) in self._ties.items() if first != rank}
        self._kinds: dict[Any, int] = {}  # of batches, on the first rank
        self._specs: defaultdict[int, dict[tuple[int, int], Any]] = defaultdict(dict)  # by kind

    @property
    def microbatches(self) -> int:
        """Into how many parts a batch is cut. It cannot be set: the schedule is made for them."""
        return self.schedule.microbatches

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss) -> torch.Tensor:
        """Forward and backward for one batch: adds to each parameter's `.grad`, as `backward()`
        does, and returns the batch's loss, on every rank. Every rank calls this.

        inputs: (rows, …), or several such tensors in a tuple, list or dict, for the first layer.
        Tensors are cut by rows, all else is the same for all micro-batches. Used on the first rank
        only. targets: (rows, …), or several, and loss_fn: used on the last. The others may pass the
        same, or None.
        loss_fn: called with the outputs and targets of a micro-batch; returns the *mean* over its
        rows. Micro-batches may differ by a row, so each counts by its rows; the sum is the mean
        over the batch. (A mean over what is not the same in all rows, such as words that are not
        padding, is another one in parts than in the whole.)

        If anything fails on a rank, all ranks raise: ValueError for fewer rows than micro-batches,
        or tensors of another number of rows, or a stage whose outputs change shape or dtype from
        one micro-batch to the next; RuntimeError for what a layer or loss_fn raised. Gradients then
        make no sense, and are to be set to None.
        """
        with added_up(self._ties, self._peers):
            return self._run(inputs, targets, loss_fn)[0]

    def forward(self, inputs: Any) -> Any:
        """The outputs for the inputs, on every rank, without gradients. Every rank calls this;
        `inputs` are those of `train_step`, used on the first. There may be fewer rows than
        micro-batches. What is no tensor comes from the first micro-batch. Raises on every rank if a
        stage fails."""
        last = self.schedule.rank_of(self.schedule.stages - 1)
        _, y = self._run(inputs, trains=False)
        told = [spec_of(y)]
        dist.broadcast_object_list(told, group=self.process_group, group_src=last)
        if y is None:
            y = empty_like(told[0], self._device)
        broadcast_state(tensors_of(y), self.process_group, last)
        return y

    def _run(
        self, inputs: Any, targets: Any = None, loss_fn: Loss | None = None, trains: bool = True
    ) -> tuple[torch.Tensor, Any]:
        """The loss, on every rank; in an evaluation the outputs, on the last."""
        peers, plan, problem = self._peers, self.schedule, None
        kind, total, parts = -1, 0, []
        try:
            if {p for p in self._shared if p.requires_grad} != self._ties.keys():
                raise RuntimeError("a shared parameter was frozen or unfrozen: make a new Pipeline")
            if peers.rank == 0:
                total = self._count(inputs, plan.microbatches if trains else 1)
                parts = split_into_microbatches("inputs", inputs, self._rows(total))
                kind = self._kind(inputs, trains)
        except Exception as error:
            problem = error
        # From rank to rank: what is to come. Nothing, if the first rank has a problem.
        header = torch.tensor([kind, total], device=peers.device)
        with record.scope("agreement", control=True):
            if peers.rank > 0:
                wait_for([peers.irecv(header, peers.rank - 1)])
            leaving = peers.isend(header, peers.rank + 1) if peers.rank + 1 < peers.size else None
        kind, total = header.tolist()
        loss, outputs = 0.0, None
        if kind >= 0:
            rows = self._rows(total)
            if not trains:
                plan = forward_only(peers.size, plan.stages, len(rows))
            batch = rows, parts, targets, loss_fn, self._specs[kind]
            executor = Executor(plan, self._stages, peers, self._device, *batch, problem)
            try:
                with torch.set_grad_enabled(trains):
                    executor.run()
            finally:
                for stage in self._stages.values():
                    stage.end_step()
            self.trace, problem = executor.trace, executor.problem
            loss = sum(each.item() for each in executor.losses)
            try:
                if executor.outputs and problem is None:
                    outputs = merge_microbatches(executor.outputs)
            except Exception as error:
                problem = error
        wait_for([leaving])
        ended = torch.tensor([loss, problem is not None], dtype=torch.float64, device=peers.device)
        dist.all_reduce(ended, group=self.process_group)
        if ended[1]:
            self._specs.clear()
            self._kinds.clear()
            agree.raise_on_every_rank(problem, self.process_group)
        return ended[0], outputs

    def _count(self, inputs: Any, least: int) -> int:
        """The rows of a batch: the length of the first tensor in it."""
        total = next((len(x) for x in tensors_of(inputs) if x.ndim), None)
        if total is None:
            raise TypeError(
                "the inputs of a pipeline are a tensor, its rows first, or several of these"
            )
        if total < least:
            raise ValueError(f"a batch of {total} rows cannot be cut into {least} micro-batches")
        return total

    def _rows(self, total: int) -> list[int]:
        """The rows of each micro-batch, as even as possible: the first ones get the remainder."""
        microbatches = min(self.microbatches, total)
        small, larger = divmod(total, microbatches)
        return [small + (i < larger) for i in range(microbatches)]

    def _kind(self, inputs: Any, trains: bool) -> int:
        """The number of this kind of batch."""
        leaves, structure = tree_flatten(inputs)
        looks = [
            (x.shape[1:], x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        device = self._device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        kind = trains, self.training, autocast, str(structure), *looks
        return self._kinds.setdefault(kind, len(self._kinds))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm, taken over all of them, is at most
        `max_norm`; what it was is returned. As `torch.nn.utils.clip_grad_norm_` of the whole
        module in one process: parameters on several ranks count once. Every rank calls this, and
        if the stages are fully sharded, every rank that has shards of them."""
        return clip_grad_norm_(
            self.parameters(),
            max_norm,
            norm_type,
            groups=[*(stage.fsdp_group.group for stage in self._sharded[:1]), self.process_group],
            device=self._peers.device,
            elsewhere=self.counted_elsewhere,
        )

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the whole module, on the CPU of every rank, which must have room for
        it. Every rank calls this, and if the stages are fully sharded, every rank that has shards
        of them. (`state_dict()` is that of this rank's layers, or shards.)"""
        with self.whole_stages():
            return agree.whole_state(self.process_group, self.state_dict(), self._names)

    @contextmanager
    def whole_stages(self) -> Iterator[None]:
        """Within the block no parameter is sharded by a strategy around its stage. Every rank that
        has shards enters it."""
        with ExitStack() as block:
            for stage in self._sharded:
                block.enter_context(stage.summon_full_params())
            yield

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load what is of this rank's layers, from a checkpoint of the whole module or of these
        layers. What is of other ranks' layers is passed over. If the stages are fully sharded, load
        that of the whole module within `whole_stages()`."""
        own = copy.copy(state_dict)
        for name in set(self._names) - set(self.state_dict()):
            own.pop(name, None)
        return super().load_state_dict(own, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharing(self, memo, self.process_group, self.schedule)
