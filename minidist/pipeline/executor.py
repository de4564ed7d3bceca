"""One rank runs its list of instructions.

Messages between neighbouring ranks do not block. Both sides post a message at its place in their
list. So what `validate` proves of the lists holds for the messages, even where two ranks share one
queue for both directions, as with NCCL. A rank does not wait for a send, and waits for a receive
only when it needs the tensors.

Whoever receives an activation allocates memory before it comes, and so must know its *spec*: its
structure, and of each tensor the shape and dtype. The first activation of a kind that one stage
gives the next is preceded by its spec, for which the receiver waits. Both remember it, and after
that only tensors travel.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from minidist.collectives.peers import Peers, wait_for
from minidist.common.tensors_in import tensors_of
from minidist.instruments.measure import record
from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
    Span,
)
from minidist.pipeline.stage import Gradients, Stage

Loss = Callable[[Any, Any], torch.Tensor]
Travelling = tuple[list[torch.Tensor], list[dist.Work | None]]  # tensors, and handles to wait for
PHASE = "pipeline.{0.__class__.__name__}({0.stage}, {0.microbatch})"  # for torch's profiler
MOST_LEAVING = 2  # messages to one rank: each holds its tensors until it has arrived


# ---- what travels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in an activation, and whether a gradient for it comes back."""

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def spec_of(activation: Any) -> Any:
    """The activation, with a `TensorSpec` in place of each tensor."""
    if isinstance(activation, torch.Tensor):  # mostly; tree_map would take its time
        return TensorSpec(activation.shape, activation.dtype, activation.requires_grad)
    return tree_map_only(torch.Tensor, spec_of, activation)


def activation_of(spec: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The activation that consists of these tensors. Those that need a gradient are leaves of
    autograd's graph."""
    left = iter(tensors)
    return tree_map_only(TensorSpec, lambda each: next(left).requires_grad_(each.gradient), spec)


def tensor_specs(spec: Any) -> list[TensorSpec]:
    """The specs of its tensors, in the order of `tensors_of`."""
    return [each for each in tree_leaves(spec) if isinstance(each, TensorSpec)]


def split_into_microbatches(batch: Any, rows: Sequence[int]) -> list[Any]:
    """The micro-batches: tensors are split by rows, all else is the same in each."""
    leaves, structure = tree_flatten(batch)
    columns = [
        leaf.split(list(rows)) if isinstance(leaf, torch.Tensor) else [leaf] * len(rows)
        for leaf in leaves
    ]
    return [tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


def merge_microbatches(parts: Sequence[Any]) -> Any:
    """The batch: tensors are concatenated, all else comes from the first micro-batch."""
    return tree_map(
        lambda x, *others: torch.cat([x, *others]) if isinstance(x, torch.Tensor) else x, *parts
    )


# ---- a rank at work ----------------------------------------------------------------------------


class Executor:
    """Interprets the instructions of one rank, for one batch.

    plan: for the batch's micro-batches. stages: of this rank. device: of the tensors. rows: of each
    micro-batch. inputs: of each, on the rank of the first stage. targets, of the whole batch, and
    loss_fn: for the last stage, in training. specs: of what stages give for such a batch, by stage
    and rows; the run adds those that are new. After the run:

    losses: of the last stage, for each micro-batch the sum over its rows.
    outputs: of the last stage, without a loss. trace: each instruction with its start and end; a
    computation starts after the wait for its message.
    """

    def __init__(
        self,
        plan: Schedule,
        stages: Mapping[int, Stage],
        peers: Peers,
        device: torch.device,
        rows: Sequence[int],
        inputs: Sequence[Any],
        targets: Any,
        loss_fn: Loss | None,
        specs: dict[tuple[int, int], Any],
    ) -> None:
        self._plan, self._stages, self._peers, self._device = plan, stages, peers, device
        self._rows, self._specs = rows, specs
        self._inputs, self._all_targets, self._loss_fn = inputs, targets, loss_fn
        self._made: dict[Instruction, Any] = {}  # by the send
        self._coming: dict[Instruction, Travelling] = {}  # by the receive
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)  # by the rank they go to
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.trace: list[Span] = []

    def run(self) -> None:
        """Do it all, in order."""
        do: dict[type[Instruction], Callable[[Any], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInputs: self._backward,
            BackwardWeights: self._backward_weights,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }
        for now in self._plan.ranks[self._peers.rank]:
            self._now, self._start = now, time.perf_counter()
            do[type(now)](now)
            self.trace.append(Span(now, self._start, time.perf_counter()))
        for leaving in self._leaving.values():
            for _, works in leaving:
                wait_for(works)

    # ---- messages --------------------------------------------------------------------------

    def _send_activation(self, now: SendActivation) -> None:
        made, key, to = self._made.pop(now), self._key(now.stage, now), self._rank_of(now.stage + 1)
        spec = spec_of(made)
        if key not in self._specs:
            with record.scope("agreement", control=True):
                dist.send_object_list([spec], group=self._peers.group, group_dst=to)
            self._specs[key] = spec
        elif spec != self._specs[key]:
            raise ValueError(
                f"stage {now.stage} gives {spec}; after what it gave for other micro-batches it "
                f"must be {self._specs[key]}. (Freeze, unfreeze and change layers before)"
            )
        self._send(to, tensors_of(made))

    def _receive_activation(self, now: ReceiveActivation) -> None:
        key, source = self._key(now.stage - 1, now), self._rank_of(now.stage - 1)
        if key not in self._specs:
            told: list[Any] = [None]
            with record.scope("agreement", control=True):
                dist.recv_object_list(told, group=self._peers.group, group_src=source)
            self._specs[key] = told[0]
        self._receive(now, source, tensor_specs(self._specs[key]))

    def _send_gradient(self, now: SendGradient) -> None:
        self._send(self._rank_of(now.stage - 1), self._made.pop(now))

    def _receive_gradient(self, now: ReceiveGradient) -> None:
        specs = [x for x in tensor_specs(self._specs[self._key(now.stage, now)]) if x.gradient]
        self._receive(now, self._rank_of(now.stage + 1), specs)

    def _rank_of(self, stage: int) -> int:
        return stage % self._peers.size

    def _key(self, stage: int, now: Instruction) -> tuple[int, int]:
        return stage, self._rows[now.microbatch]

    def _send(self, to: int, tensors: list[torch.Tensor]) -> None:
        whole = [x.detach().contiguous() for x in tensors]
        leaving = self._leaving[to]
        if len(leaving) == MOST_LEAVING:
            wait_for(leaving.popleft()[1])
        leaving.append((whole, [self._peers.isend(x.view(-1), to) for x in whole]))

    def _receive(self, now: Instruction, source: int, specs: list[TensorSpec]) -> None:
        """Post a receive; `_take` waits for it."""
        tensors = [spec.empty(self._device) for spec in specs]
        self._coming[now] = tensors, [self._peers.irecv(x.view(-1), source) for x in tensors]

    def _take(self, message: Instruction) -> list[torch.Tensor]:
        tensors, works = self._coming.pop(message)
        wait_for(works)
        return tensors

    # ---- computations ----------------------------------------------------------------------

    def _forward(self, now: Forward) -> None:
        stage, i = now.stage, now.microbatch
        if stage == 0:
            x = self._inputs[i]
        else:
            tensors = self._take(ReceiveActivation(stage, i))
            x = activation_of(self._specs[self._key(stage - 1, now)], tensors)
        forward = self._stages[stage].forward
        if stage < self._plan.stages - 1:
            self._made[SendActivation(stage, i)] = self._compute(forward, i, x)
        elif torch.is_grad_enabled():
            loss = self._compute(forward, i, x, partial(self._loss, i))
            # Another tensor: a view of the loss would hold its graph, and what came in.
            self.losses.append(loss.detach() * self._rows[i])
        else:
            self.outputs.append(self._compute(forward, i, x))

    def _loss(self, i: int, outputs: Any) -> torch.Tensor:
        """The mean over the rows of a micro-batch."""
        assert self._loss_fn is not None
        loss = self._loss_fn(outputs, self._targets[i])
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss needs no gradient: loss_fn is to make it of the outputs")
        return loss

    @cached_property
    def _targets(self) -> list[Any]:
        return split_into_microbatches(self._all_targets, self._rows)

    def _backward(self, now: Backward | BackwardInputs) -> None:
        if now.stage < self._plan.stages - 1:
            came = iter(self._take(ReceiveGradient(now.stage, now.microbatch)))
            specs = tensor_specs(self._specs[self._key(now.stage, now)])
            floats = [spec for spec in specs if spec.dtype.is_floating_point]
            gradients: Gradients = [next(came) if spec.gradient else None for spec in floats]
        else:  # fewer rows count for less in the mean over the batch
            weight = self._rows[now.microbatch] / sum(self._rows)
            gradients = [torch.full_like(self.losses[0], weight)]
        own = self._stages[now.stage]
        way = own.backward if isinstance(now, Backward) else own.backward_inputs
        found = self._compute(way, now.microbatch, gradients)
        if now.stage > 0:
            self._made[SendGradient(now.stage, now.microbatch)] = found

    def _backward_weights(self, now: BackwardWeights) -> None:
        self._compute(self._stages[now.stage].backward_weights, now.microbatch)

    def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        self._start = time.perf_counter()
        try:
            with record_function(PHASE.format(self._now)):
                return work(*arguments)
        except Exception as problem:
            problem.add_note(f"(at {self._now} of the pipeline)")
            raise


# ---- parameters of several stages --------------------------------------------------------------


@contextmanager
def added_up(ties: Mapping[nn.Parameter, Sequence[int]], peers: Peers) -> Iterator[None]:
    """What the block adds to the gradient of each of this rank's ties is summed over the ranks that
    share it, such as those of a first layer and a last one. What was there has been summed already,
    and is added after it. So copies that were equal stay equal."""
    before = {parameter: parameter.grad for parameter in ties}
    for parameter in ties:
        parameter.grad = None
    yield
    for parameter, ranks in ties.items():
        summed, earlier = _sum(parameter, ranks, peers), before[parameter]
        parameter.grad = summed if earlier is None else earlier + summed


def _sum(parameter: nn.Parameter, ranks: Sequence[int], peers: Peers) -> torch.Tensor:
    """Each rank sends its part to all others (mostly there is one) and adds up in the order of
    `ranks`, so that all have the same bits. Of two ranks, the first sends first: where they have
    one queue, as with NCCL, two sends would wait for each other."""
    parts = parameter.new_zeros(len(ranks), parameter.numel())  # for each rank a row
    mine = parts[ranks.index(peers.rank)]
    if parameter.grad is not None:
        mine.copy_(parameter.grad.reshape(-1))
    works: list[dist.Work | None] = []
    for other, part in zip(ranks, parts, strict=True):
        if other < peers.rank:
            works += [peers.irecv(part, other), peers.isend(mine, other)]
        elif other > peers.rank:
            works += [peers.isend(mine, other), peers.irecv(part, other)]
    wait_for(works)
    return parts.sum(0).view(parameter.shape)
