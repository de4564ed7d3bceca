"""Lesson 5: a pipeline. A model too large for one rank is cut into stages, by layers.

Each rank has a stage, or several, and passes activations on to the next and gradients back. So that
ranks do not wait for one another all the time, the batch is cut into micro-batches, and a schedule
says who does what when. To read, in this order: `instructions` (a schedule is data), `schedules`
(five of them), `simulate` and `validate` (what can be known before anything runs), `partition`
(where to cut), `stage`, `replay` and `split` (computing, computing again, and backward in two
parts), `messages`, `worker` (runs a schedule), `ties` (parameters of two stages), `norm`, and this
file.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from minidist import agree
from minidist.collectives.peers import Peers
from minidist.distributed_data_parallel.replicas import (
    broadcast_state,
    require_group,
    require_same_model,
)
from minidist.norm import norm_over_ranks
from minidist.pipeline.instructions import Schedule
from minidist.pipeline.messages import Messages
from minidist.pipeline.partition import balance_by_cost, balance_by_parameters
from minidist.pipeline.schedules import SCHEDULES, forward_only, interleaved, with_messages
from minidist.pipeline.simulate import Prediction, Span, simulate
from minidist.pipeline.stage import Stage
from minidist.pipeline.ties import find_ties, summed
from minidist.pipeline.validate import ScheduleError, validate
from minidist.pipeline.worker import Loss, Worker
from minidist.wrapper import Wrapper

__all__ = [
    "SCHEDULES",
    "Pipeline",
    "Prediction",
    "Schedule",
    "ScheduleError",
    "Span",
    "balance_by_cost",
    "balance_by_parameters",
    "simulate",
    "validate",
    "with_messages",
]


class Pipeline(Wrapper):
    """Trains `module`, an nn.Sequential, its layers spread over the ranks of a group. Lesson 5.

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
    recompute: keep a stage's inputs only, and compute its activations again for backward.

    A parameter that layers of several ranks share, as a tied embedding and head do, is kept by
    each, and gets the sum of their gradients. Batch norm takes its means over a micro-batch, not
    over the batch, and moves its running means once for each.

    Raises RuntimeError without a process group; on every rank, TypeError if the module is no
    nn.Sequential, and ValueError if it cannot be cut so, the schedule cannot take so many
    micro-batches, or the ranks disagree about any of this.
    """

    def __init__(
        self,
        module: nn.Sequential,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
    ) -> None:
        group = require_group(process_group, "Pipeline")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        problem: Exception | None = None
        try:
            plan, counts = _plan(module, microbatches, schedule, balance, ranks)
        except (TypeError, ValueError) as error:
            problem = error
        agree.raise_on_every_rank(group, problem)
        settings = dict(microbatches=microbatches, balance=counts, schedule=plan)
        agree.require_same(group, settings | dict(recompute=recompute))
        require_same_model(module, group)
        broadcast_state([*module.parameters(), *module.buffers()], group)

        layers = list(module._modules.items())  # by name: a layer that comes twice has two
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        ties = find_ties([m for _, m in layers], [plan.rank_of(stage) for stage in stage_of])
        stages = {stage: nn.Sequential() for stage in range(rank, plan.stages, ranks)}
        own = nn.Sequential()
        for (name, layer), stage in zip(layers, stage_of, strict=True):
            if stage in stages:
                stages[stage].add_module(name, layer)
                own.add_module(name, layer)
        super().__init__(own)
        self.process_group, self.schedule, self.balance = group, plan, counts
        # Of the last step or evaluation: what this rank did, and when (on a GPU: queued).
        self.trace: list[Span] = []
        self._stages, self._recompute = stages, recompute
        self._ties = [tie for tie in ties if rank in tie.ranks]
        # Parameters of ours that another rank has too, and counts in norms.
        self.counted_elsewhere = {t.parameter for t in self._ties if t.ranks[0] != rank}
        self._names = list(module.state_dict())
        first = next((p for p in module.parameters()), torch.empty(0))
        self._device, self._peers = first.device, Peers(group)

    def train_step(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: Loss
    ) -> torch.Tensor:
        """Forward and backward for one batch: adds to each parameter's `.grad`, as `backward()`
        does, and returns the batch's loss, on every rank. Every rank calls this.

        inputs: (rows, …), used on the first rank only. targets: (rows, …), and loss_fn: used on the
        last. The others may pass the same, or None.
        loss_fn: called with the outputs and targets of a micro-batch; returns the *mean* over its
        rows. Micro-batches may differ by a row, so each counts by its rows; the sum is the mean
        over the batch. (A mean over what is not the same in all rows, such as words that are not
        padding, is another one in parts than in the whole.)

        If anything fails on a rank, all ranks raise: ValueError for fewer rows than micro-batches,
        or targets of another number of rows, or a stage whose outputs change shape or dtype from
        one micro-batch to the next; RuntimeError for what a layer or loss_fn raised. Gradients then
        make no sense, and are to be set to None.
        """
        with summed(self._ties, self.process_group):
            loss, _ = self._run(self.schedule, inputs, (loss_fn, targets))
        return loss

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs for the inputs, on every rank, without gradients. Every rank calls this;
        `inputs` are used on the first. There may be fewer rows than micro-batches. Raises on every
        rank if a stage fails."""
        rank, ranks = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        plan = forward_only(ranks, self.schedule.stages, self.schedule.microbatches)
        _, outputs = self._run(plan, inputs)
        y = torch.cat(outputs) if outputs else torch.empty(0)
        told = [(y.shape, y.dtype)]
        dist.broadcast_object_list(told, group=self.process_group, group_src=ranks - 1)
        if rank != ranks - 1:
            shape, dtype = told[0]
            y = torch.empty(shape, dtype=dtype, device=self._device)
        broadcast_state([y], self.process_group, ranks - 1)
        return y

    def _run(self, schedule: Schedule, *batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss, on every rank, and the outputs, on the last."""
        messages = Messages(self._peers, schedule.microbatches, self._device)
        stages = {stage: Stage(own, self._recompute) for stage, own in self._stages.items()}
        worker = Worker(schedule, stages, messages, *batch)
        worker.run(schedule.ranks[dist.get_rank(self.process_group)])
        self.trace = worker.trace
        loss = sum(loss.item() for loss in worker.losses)
        result = torch.tensor([loss, worker.failed], dtype=torch.float64, device=self._peers.device)
        dist.all_reduce(result, group=self.process_group)
        if result[1]:
            agree.raise_on_every_rank(self.process_group, worker.problem)
        return result[0], worker.outputs

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm, taken over all of them, is at most
        `max_norm`; what it was is returned. As `torch.nn.utils.clip_grad_norm_` of the whole
        module: parameters on several ranks count once. Every rank calls this."""
        counted = set(self.parameters()) - self.counted_elsewhere
        gradients = [p.grad for p in counted if p.grad is not None]
        own = get_total_norm(gradients, norm_type).to(self._peers.device, torch.float64)
        total = norm_over_ranks(own, norm_type, self.process_group)
        clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the whole module, on the CPU of every rank, which must have room for
        it. Every rank calls this. (`state_dict()` is that of this rank's layers.)"""
        return agree.whole_state(self.process_group, self.state_dict(), self._names)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load what is of this rank's layers, from a checkpoint of the whole module or of these
        layers. What is of other ranks' layers is passed over."""
        own = copy.copy(state_dict)
        for name in set(self._names) - set(self.state_dict()):
            own.pop(name, None)
        return super().load_state_dict(own, *args, **kwargs)


def _plan(
    module: nn.Sequential,
    microbatches: int,
    schedule: str | Schedule,
    balance: Sequence[int] | None,
    ranks: int,
) -> tuple[Schedule, list[int]]:
    """The schedule, and how many layers each stage takes. Raises if there can be none."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"Pipeline cuts an nn.Sequential, not {type(module).__name__}")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches must be 1 or more, not {microbatches}")
    if isinstance(schedule, Schedule):
        found = len(schedule.ranks), schedule.microbatches
        if found != (ranks, microbatches):
            raise ValueError(
                f"the schedule is for {found[0]} ranks and {found[1]} micro-batches, "
                f"not {ranks} and {microbatches}"
            )
        validate(schedule)
    elif schedule == "interleaved":
        per_rank = 2 if balance is None else max(1, len(balance) // ranks)
        schedule = interleaved(ranks, microbatches, per_rank)
    elif schedule in SCHEDULES:
        schedule = SCHEDULES[schedule](ranks, microbatches)
    else:
        raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    if balance is None:
        return schedule, balance_by_parameters(module, schedule.stages)
    if len(balance) != schedule.stages:
        raise ValueError(
            f"balance {list(balance)} makes {len(balance)} stages; on {ranks} ranks "
            f"{schedule.name} has {schedule.stages}"
        )
    if min(balance) < 1 or sum(balance) != len(module):
        raise ValueError(
            f"balance {list(balance)} must share out {len(module)} layers, at least 1 to each "
            f"stage; it shares out {sum(balance)}"
        )
    return schedule, list(balance)
