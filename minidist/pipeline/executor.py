"""One rank runs its list of instructions.

Messages between neighbouring ranks do not block. Both sides post a message at its place in their
list. So what `validate` proves of the lists holds for the messages, even where two ranks share one
queue for both directions, as with NCCL. A rank does not wait for a send, and waits for a receive
only when it needs the tensors.

At the end of a step, ranks that share a parameter, as a first layer and a last one do, add up the
parts of its gradient that they have found: a tie. So copies that were equal stay equal.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.collectives.peers import Peers, wait_for
from minidist.common.tensors_in import tensors_of
from minidist.pipeline.batch import Batch, split_into_microbatches
from minidist.pipeline.instructions import (
    RECEIVES,
    SENDS,
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
from minidist.pipeline.stage import ActivationSpec, Gradients, Stage, TensorSpec

Works = list[dist.Work | None]
Travelling = tuple[list[torch.Tensor], Works]  # tensors, and handles to wait for
MOST_LEAVING = 2  # messages to one rank: each holds its tensors until it has arrived


class Executor:
    """Interprets the instructions of one rank, for one batch.

    plan: for the batch's micro-batches. stages: of this rank. device: of the tensors.

    If a stage fails, the rank goes on through its list, but computes nothing and sends zeros: so no
    other rank waits for ever, and at the end all of them raise. After the run:

    losses: of the last stage, one for each micro-batch; their sum is the mean over the batch.
    outputs: of the last stage, in an evaluation. trace: each instruction with its start and end; a
    computation starts after the wait for its message. problem: the error of this rank.
    """

    def __init__(
        self,
        plan: Schedule,
        stages: Mapping[int, Stage],
        peers: Peers,
        device: torch.device,
        batch: Batch,
    ) -> None:
        self._plan, self._stages, self._batch = plan, stages, batch
        self._last = plan.stages - 1
        self._peers, self._device = peers, device
        self._made: dict[Instruction, Gradients | None] = {}  # by the send; None: failed
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)  # by the rank they go to
        self._coming: dict[Instruction, Travelling] = {}  # by the receive
        self._constant = 0  # losses without a graph
        self._now: Instruction | str = ""  # what is done at the moment
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.trace: list[Span] = []
        self.problem: Exception | None = None

    def run(self, go_on: Callable[[], None]) -> None:
        """Do it all, in order, and then `go_on`."""
        for now in self._plan.ranks[self._peers.rank]:
            self._now, self._start = now, time.perf_counter()
            if isinstance(now, SENDS):
                self._send(now)
            elif isinstance(now, RECEIVES):
                self._receive(now)
            elif isinstance(now, Forward):
                self._forward(now.stage, now.microbatch)
            elif isinstance(now, BackwardWeights):
                self._compute(self._stages[now.stage].backward_weights, now.microbatch)
            else:
                self._backward(now.stage, now.microbatch)
            self.trace.append(Span(now, self._start, time.perf_counter()))
        for leaving in self._leaving.values():
            for _, works in leaving:
                wait_for(works)
        self._now = "the backward pass of what made the inputs"
        self._compute(go_on)

    # ---- messages --------------------------------------------------------------------------

    def _send(self, message: Instruction) -> None:
        """The tensors that are ready for it; zeros if this rank has failed."""
        specs, other = self._carried(message)
        tensors = self._made.pop(message) or [None] * len(specs)
        whole = [
            spec.empty(self._device).zero_() if x is None else x.contiguous()
            for spec, x in zip(specs, tensors, strict=True)
        ]
        leaving = self._leaving[other]
        if len(leaving) == MOST_LEAVING:
            wait_for(leaving.popleft()[1])
        leaving.append((whole, [self._peers.isend(x.view(-1), other) for x in whole]))

    def _receive(self, message: Instruction) -> None:
        """Post a receive; `_take` waits for it."""
        specs, other = self._carried(message)
        tensors = [spec.empty(self._device) for spec in specs]
        works = [self._peers.irecv(x.view(-1), other) for x in tensors]
        self._coming[message] = tensors, works

    def _carried(self, message: Instruction) -> tuple[list[TensorSpec], int]:
        """The specs of the tensors in a message, and the rank at its other end."""
        up = isinstance(message, (SendActivation, ReceiveGradient))
        other = message.stage + (1 if up else -1)
        spec = self._spec(min(message.stage, other), message.microbatch)
        activation = isinstance(message, (SendActivation, ReceiveActivation))
        return spec.tensors if activation else spec.gradients, other % self._peers.size

    def _spec(self, stage: int, i: int) -> ActivationSpec:
        """The spec of a stage's outputs."""
        return self._batch.specs[stage, self._batch.rows[i]]

    def _take(self, message: Instruction) -> list[torch.Tensor]:
        """Wait for a receive that is posted: its tensors."""
        tensors, works = self._coming.pop(message)
        wait_for(works)
        return tensors

    # ---- computations ----------------------------------------------------------------------

    def _forward(self, stage: int, i: int) -> None:
        if stage == 0:
            inputs = self._batch.inputs[i]
        else:
            came = self._take(ReceiveActivation(stage, i))
            inputs = self._spec(stage - 1, i).unflatten(came)
        made = self._compute(self._outputs, stage, i, inputs)
        if stage < self._last:
            self._made[SendActivation(stage, i)] = made

    def _backward(self, stage: int, i: int) -> None:
        gradients: Gradients = [None]  # that of a loss is 1
        if stage < self._last:
            gradients = [*self._take(ReceiveGradient(stage, i))]
        own = self._stages[stage]
        way = own.backward_inputs if isinstance(self._now, BackwardInputs) else own.backward
        found = self._compute(way, i, gradients)
        if stage > 0:
            self._made[SendGradient(stage, i)] = found

    def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `work`; None if it fails, or if this rank has failed before."""
        self._start = time.perf_counter()
        if self.problem is not None:
            return None
        try:
            return work(*arguments)
        except Exception as problem:
            self.problem = problem
            problem.add_note(f"(at {self._now} of the pipeline)")
            return None

    def _outputs(self, stage: int, i: int, inputs: tuple[Any, Any]) -> Gradients:
        """A stage's outputs, to be sent. Of the last one they are kept, or in training the loss."""
        own, last = self._stages[stage], stage == self._last
        if last and self._batch.training is not None:
            finish = partial(self._weighted_loss, i, self._targets[i])
            self.losses.append(own.forward(i, inputs, finish).detach())
            return []
        made = own.forward(i, inputs, own.onward)
        if last:
            self.outputs.append(made[0])
        spec = self._spec(stage, i)
        return [*(spec.without_graph if own.recompute else spec).flatten(made)]

    def _weighted_loss(self, i: int, targets: Any, outputs: Any, _: Any) -> torch.Tensor:
        """A micro-batch's part of the batch's mean loss: fewer rows count for less."""
        assert self._batch.training is not None
        loss, rows = self._batch.training[0](outputs, targets), self._batch.rows
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise ValueError("loss_fn must return one number, the mean over its rows")
        if torch.is_grad_enabled() and not loss.requires_grad:
            self._constant += 1  # one alone may be, as where all words are padding
            if self._constant == len(rows):
                raise ValueError(
                    "the loss needs no gradient, so that nothing would be trained: loss_fn must "
                    "make it of the outputs, without detach() or item(), and some parameter must "
                    "be trained"
                )
            # Backward goes all the way even so: a strategy around a stage waits for other replicas.
            needed = (y for y in tensors_of(outputs) if y.requires_grad)
            loss = loss + sum(y.flatten()[:0].abs().sum() for y in needed)
        return loss * (rows[i] / sum(rows))

    @cached_property
    def _targets(self) -> list[Any]:
        assert self._batch.training is not None
        return split_into_microbatches("targets", self._batch.training[1], self._batch.rows)


# ---- parameters of several stages --------------------------------------------------------------


@contextmanager
def added_up(ties: Mapping[nn.Parameter, Sequence[int]], peers: Peers) -> Iterator[None]:
    """What the block adds to the gradient of each of this rank's ties is summed over the ranks that
    share it. What was there has been summed already, and is added after it."""
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


def _sum(parameter: nn.Parameter, ranks: Sequence[int], peers: Peers) -> torch.Tensor | None:
    """Each rank sends its part to all others (mostly there is one) and adds up in the order of
    `ranks`, so that all have the same bits. None if none has a gradient. Of two ranks, the first
    sends first: where they have one queue, as with NCCL, two sends would wait for each other."""
    # For each rank a row: its part, and whether it has one.
    parts = parameter.new_zeros(len(ranks), parameter.numel() + 1)
    mine = parts[ranks.index(peers.rank)]
    if parameter.grad is not None:
        mine[:-1], mine[-1] = parameter.grad.reshape(-1), 1
    works: Works = []
    for other, part in zip(ranks, parts, strict=True):
        if other < peers.rank:
            works += [peers.irecv(part, other), peers.isend(mine, other)]
        elif other > peers.rank:
            works += [peers.isend(mine, other), peers.irecv(part, other)]
    wait_for(works)
    total = parts.sum(0)
    return total[:-1].view(parameter.shape) if total[-1] else None
