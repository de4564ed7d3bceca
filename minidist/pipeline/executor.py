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
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import (
    tree_flatten,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

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
PLAIN = type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size
PHASE = "pipeline.{0.__class__.__name__}({0.stage}, {0.microbatch})"  # for torch's profiler
MOST_LEAVING = 2  # messages to one rank: each holds its tensors until it has arrived


# ---- what travels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in an activation, and whether a gradient for it comes back."""

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool = field(compare=False)

    def __repr__(self) -> str:
        words = f"shape {tuple(self.shape)}, {str(self.dtype).removeprefix('torch.')}"
        without = self.dtype.is_floating_point and not self.gradient
        return words + (", without gradient" if without else "")

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def spec_of(activation: Any) -> Any:
    """The activation, with a `TensorSpec` in place of each tensor. Raises TypeError for what is
    neither a tensor nor a plain value."""
    if isinstance(activation, torch.Tensor):  # mostly; tree_map would take its time
        return TensorSpec(activation.shape, activation.dtype, activation.requires_grad)
    if isinstance(activation, PLAIN):
        return activation
    if tree_is_leaf(activation):
        raise TypeError(
            "between stages travel tensors and plain values, in tuples, lists and dicts; this "
            f"stage gives a {type(activation).__name__}"
        )
    return tree_map(spec_of, activation)


def activation_of(spec: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The activation that consists of these tensors. Those that need a gradient are leaves of
    autograd's graph."""
    if isinstance(spec, TensorSpec):
        return tensors[0].requires_grad_(spec.gradient)
    left = iter(tensors)
    return tree_map_only(TensorSpec, lambda each: next(left).requires_grad_(each.gradient), spec)


def empty_like(spec: Any, device: torch.device) -> Any:
    """An activation without values."""
    return activation_of(spec, [each.empty(device) for each in tensor_specs(spec)])


def tensor_specs(spec: Any) -> list[TensorSpec]:
    """The specs of its tensors, in the order of `tensors_of`."""
    if isinstance(spec, TensorSpec):
        return [spec]
    return [each for each in tree_leaves(spec) if isinstance(each, TensorSpec)]


def split_into_microbatches(what: str, batch: Any, rows: Sequence[int]) -> list[Any]:
    """The micro-batches: tensors are split by rows, all else is the same in each. Raises ValueError
    for a tensor of another number of rows."""
    leaves, structure = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (sum(rows),):
            raise ValueError(
                f"the {what} of a batch of {sum(rows)} rows have as many, not {tuple(leaf.shape)}"
            )
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
    and rows; the run adds those that are new. problem: this rank has failed before.

    If a stage fails, the rank goes on through its list, but computes nothing and sends zeros: so no
    other rank waits for ever, and at the end all of them raise. After the run:

    losses: of the last stage, one for each micro-batch; their sum is the mean over the batch.
    outputs: of the last stage, without a loss. trace: each instruction with its start and end; a
    computation starts after the wait for its message. problem: the error of this rank.
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
        problem: Exception | None,
    ) -> None:
        self._plan, self._stages, self._peers, self._device = plan, stages, peers, device
        self._rows, self._inputs, self._loss_fn, self._specs = rows, inputs, loss_fn, specs
        self._all_targets = targets
        self._made: dict[Instruction, Any] = {}  # by the send; None: failed
        self._coming: dict[Instruction, Travelling] = {}  # by the receive
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)  # by the rank they go to
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.trace: list[Span] = []
        # The second: whether no stage has failed, as far as this rank knows.
        self.problem, self._computes = problem, problem is None

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
        made, key = self._made.pop(now), self._key(now.stage, now)
        spec, to = made and made[0], self._rank_of(now.stage + 1)
        if key not in self._specs:
            with record.scope("agreement", control=True):
                dist.send_object_list([spec], group=self._peers.group, group_dst=to)
            self._learn(key, spec)
        self._send(to, tensor_specs(self._specs.get(key)), made and made[1])

    def _receive_activation(self, now: ReceiveActivation) -> None:
        key, source = self._key(now.stage - 1, now), self._rank_of(now.stage - 1)
        if key not in self._specs:
            told: list[Any] = [None]
            with record.scope("agreement", control=True):
                dist.recv_object_list(told, group=self._peers.group, group_src=source)
            self._learn(key, told[0])
        self._receive(now, source, tensor_specs(self._specs.get(key)))

    def _learn(self, key: tuple[int, int], spec: Any) -> None:
        if spec is not None:
            self._specs[key] = spec
        else:  # a stage has failed before, and there is nothing to compute with
            self._computes = False

    def _send_gradient(self, now: SendGradient) -> None:
        specs = self._gradients(now.stage - 1, now)
        self._send(self._rank_of(now.stage - 1), specs, self._made.pop(now))

    def _receive_gradient(self, now: ReceiveGradient) -> None:
        self._receive(now, self._rank_of(now.stage + 1), self._gradients(now.stage, now))

    def _rank_of(self, stage: int) -> int:
        return stage % self._peers.size

    def _key(self, stage: int, now: Instruction) -> tuple[int, int]:
        return stage, self._rows[now.microbatch]

    def _gradients(self, stage: int, now: Instruction) -> list[TensorSpec]:
        """The specs of the gradients that come back to what a stage has given."""
        return [x for x in tensor_specs(self._specs.get(self._key(stage, now))) if x.gradient]

    def _send(self, to: int, specs: list[TensorSpec], tensors: Any) -> None:
        """Zeros in place of what is None."""
        whole = [
            spec.empty(self._device).zero_() if x is None else x.detach().contiguous()
            for spec, x in zip(specs, tensors or [None] * len(specs), strict=True)
        ]
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
            x = self._inputs[i] if self._inputs else None
        else:
            tensors = self._take(ReceiveActivation(stage, i))
            x = activation_of(self._specs.get(self._key(stage - 1, now)), tensors)
        forward = self._stages[stage].forward
        if stage < self._plan.stages - 1:
            made = self._compute(lambda: self._ready(now, forward(i, x)))
            self._made[SendActivation(stage, i)] = made
        elif not torch.is_grad_enabled():
            self.outputs.append(self._compute(forward, i, x))
        elif (loss := self._compute(forward, i, x, partial(self._loss, i))) is not None:
            self.losses.append(loss.detach() * self._weight(i))

    def _ready(self, now: Forward, made: Any) -> tuple[Any, list[torch.Tensor]]:
        """The spec and the tensors of what a stage gives."""
        spec, known = spec_of(made), self._specs.get(self._key(now.stage, now))
        # One without a gradient may come where one needs it: of layers that are frozen meanwhile.
        more = zip(tensor_specs(spec), tensor_specs(known), strict=False)
        if known is not None and (spec != known or any(a.gradient > b.gradient for a, b in more)):
            raise ValueError(
                f"this stage gives {spec}; after what it gave for other micro-batches it must be "
                f"{known}. (Unfreeze and change layers before they are made a pipeline)"
            )
        return spec, tensors_of(made)

    def _loss(self, i: int, outputs: Any) -> torch.Tensor:
        """The mean over the rows of a micro-batch."""
        if self._loss_fn is None:
            raise TypeError("the rank of the last stage needs a loss_fn, not None")
        loss = self._loss_fn(outputs, self._targets[i])
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise ValueError("loss_fn must return one number, the mean over its rows")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "the loss needs no gradient, so that nothing would be trained: loss_fn must make "
                "it of the outputs, without detach() or item(), and some parameter must be trained"
            )
        return loss

    def _weight(self, i: int) -> float:
        """The part that a micro-batch's loss has in the batch's: fewer rows count for less."""
        return self._rows[i] / sum(self._rows)

    @cached_property
    def _targets(self) -> list[Any]:
        return split_into_microbatches("targets", self._all_targets, self._rows)

    def _backward(self, now: Backward | BackwardInputs) -> None:
        if now.stage < self._plan.stages - 1:
            came = iter(self._take(ReceiveGradient(now.stage, now.microbatch)))
            specs = tensor_specs(self._specs.get(self._key(now.stage, now)))
            floats = [spec for spec in specs if spec.dtype.is_floating_point]
            gradients: Gradients = [next(came) if spec.gradient else None for spec in floats]
        else:
            gradients = [torch.full_like(x, self._weight(now.microbatch)) for x in self.losses[:1]]
        own = self._stages[now.stage]
        way = own.backward if isinstance(now, Backward) else own.backward_inputs
        found = self._compute(way, now.microbatch, gradients)
        if now.stage > 0:
            self._made[SendGradient(now.stage, now.microbatch)] = found

    def _backward_weights(self, now: BackwardWeights) -> None:
        self._compute(self._stages[now.stage].backward_weights, now.microbatch)

    def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `work`; None if it fails, or if a stage has failed before."""
        self._start = time.perf_counter()
        if self._computes:
            try:
                with record_function(PHASE.format(self._now)):
                    return work(*arguments)
            except Exception as problem:
                problem.add_note(f"(at {self._now} of the pipeline)")
                self.problem, self._computes = problem, False
        return None


# ---- parameters of several stages --------------------------------------------------------------


@contextmanager
def added_up(ties: Mapping[nn.Parameter, Sequence[int]], peers: Peers) -> Iterator[None]:
    """What the block adds to the gradient of each of this rank's ties is summed over the ranks that
    share it, such as those of a first layer and a last one. What was there has been summed already,
    and is added after it. So copies that were equal stay equal."""
    before = {parameter: parameter.grad for parameter in ties}
    for parameter in ties:
        parameter.grad = None
    try:
        yield
        for parameter, ranks in ties.items():
            parameter.grad = _sum(parameter, ranks, peers)
    finally:
        for parameter, gradient in before.items():
            if gradient is not None:
                found = parameter.grad
                parameter.grad = gradient if found is None else gradient + found


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
