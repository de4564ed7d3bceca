"""One rank runs its list of instructions: a method for each kind.

Messages between neighbouring ranks do not block. Both sides post a message at its place in their
list. So what `validate` proves of the lists holds for the messages, even where two ranks share one
queue for both directions, as with NCCL. A rank does not wait for a send, and waits for a receive
only when it needs the tensors.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.peers import TAG, Peers, as_bytes
from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from minidist.pipeline.preparation import Batch
from minidist.pipeline.simulate import Span
from minidist.pipeline.specs import ActivationSpec, TensorSpec, split_into_microbatches
from minidist.pipeline.stage import Gradients, Stage

Place = tuple[int, int]  # a stage and a micro-batch
Works = list[dist.Work | None]
Travelling = tuple[list[torch.Tensor], Works]  # tensors, and handles to wait for
IN_FLIGHT = 2  # messages to one rank: each holds its tensors until it has arrived


class Transfers:
    """This rank's messages of one step. Tensors are on `device`."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._leaving: dict[int, deque[Travelling]] = defaultdict(deque)

    def send(
        self, tensors: Sequence[torch.Tensor | None] | None, specs: Sequence[TensorSpec], stage: int
    ) -> None:
        """Send tensors of these specs to the rank of a stage. None stands for zeros, sent by a rank
        that has failed, so that no other waits for ever."""
        whole = [
            spec.empty(self._device).zero_() if x is None else x.contiguous()
            for spec, x in zip(specs, tensors or [None] * len(specs), strict=True)
        ]
        group, to = self._peers.group, stage % self._peers.size
        leaving = self._leaving[to]
        if len(leaving) == IN_FLIGHT:
            _wait(leaving.popleft()[1])
        works = [dist.isend(x, group=group, group_dst=to, tag=TAG) for x in _bytes(whole)]
        leaving.append((whole, works))

    def expect(self, specs: Sequence[TensorSpec], stage: int) -> Travelling:
        """Post the receive of tensors of these specs, from the rank of a stage."""
        group, source = self._peers.group, stage % self._peers.size
        tensors = [spec.empty(self._device) for spec in specs]
        works = [dist.irecv(x, group=group, group_src=source, tag=TAG) for x in _bytes(tensors)]
        return tensors, works

    def take(self, coming: Travelling) -> list[torch.Tensor]:
        """Wait for tensors whose receive is posted."""
        _wait(coming[1])
        return coming[0]

    def finish(self) -> None:
        """Wait for all sends."""
        for leaving in self._leaving.values():
            for _, works in leaving:
                _wait(works)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors as bytes; empty ones are not sent."""
    return [as_bytes(x.view(-1)) for x in tensors if x.numel()]


def _wait(works: Works) -> None:
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()


class Executor:
    """Interprets the instructions of one rank, for one batch.

    stages: of this rank. last: the last stage of all, wherever it is.

    If a stage fails, the rank goes on through its list, but computes nothing and sends zeros: so no
    other rank waits for ever, and at the end all of them raise. After the run:

    losses: of the last stage, one for each micro-batch; their sum is the mean over the batch.
    outputs: of the last stage, in an evaluation. trace: each instruction with its start and end; a
    computation starts after the wait for its message. problem: the error of this rank.
    """

    def __init__(
        self, stages: Mapping[int, Stage], last: int, transfers: Transfers, batch: Batch
    ) -> None:
        self._stages, self._last = stages, last
        self._transfers, self._batch = transfers, batch
        self._coming: dict[Place, Travelling] = {}  # activations
        self._made: dict[Place, list[torch.Tensor] | None] = {}  # activations; None: failed
        self._coming_back: dict[Place, Travelling] = {}  # gradients
        self._found: dict[Place, Gradients | None] = {}  # gradients
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.trace: list[Span] = []
        self.problem: Exception | None = None

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Do it all, in order."""
        do: dict[type[Instruction], Callable[[int, int], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInputs: self._backward_inputs,
            BackwardWeights: self._backward_weights,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }
        for instruction in instructions:
            self._now, self._start = instruction, time.perf_counter()
            do[type(instruction)](instruction.stage, instruction.microbatch)
            self.trace.append(Span(instruction, self._start, time.perf_counter()))
        self._transfers.finish()

    # ---- messages --------------------------------------------------------------------------

    def _send_activation(self, stage: int, i: int) -> None:
        made = self._made.pop((stage, i))
        self._transfers.send(made, self._spec(stage, i).tensors, stage + 1)

    def _receive_activation(self, stage: int, i: int) -> None:
        specs = self._spec(stage - 1, i).tensors
        self._coming[stage, i] = self._transfers.expect(specs, stage - 1)

    def _send_gradient(self, stage: int, i: int) -> None:
        found = self._found.pop((stage, i))
        self._transfers.send(found, self._spec(stage - 1, i).gradients, stage - 1)

    def _receive_gradient(self, stage: int, i: int) -> None:
        specs = self._spec(stage, i).gradients
        self._coming_back[stage, i] = self._transfers.expect(specs, stage + 1)

    def _spec(self, stage: int, i: int) -> ActivationSpec:
        """The spec of a stage's outputs."""
        return self._batch.specs[stage, self._batch.rows[i]]

    # ---- computations ----------------------------------------------------------------------

    def _forward(self, stage: int, i: int) -> None:
        if stage == 0:
            inputs = self._batch.inputs[i]
        else:
            came = self._transfers.take(self._coming.pop((stage, i)))
            inputs = self._spec(stage - 1, i).unflatten(came)
        made = self._compute(self._output if stage == self._last else self._activation, i, inputs)
        if stage < self._last:
            self._made[stage, i] = made

    def _backward(self, stage: int, i: int) -> None:
        self._go_back(stage, i, self._stages[stage].backward)

    def _backward_inputs(self, stage: int, i: int) -> None:
        self._go_back(stage, i, self._stages[stage].backward_inputs)

    def _backward_weights(self, stage: int, i: int) -> None:
        self._compute(self._stages[stage].backward_weights, i)

    def _go_back(self, stage: int, i: int, way: Callable[[int, Gradients], Gradients]) -> None:
        gradients: Gradients = [None]  # that of a loss is 1
        if stage < self._last:
            gradients = [*self._transfers.take(self._coming_back.pop((stage, i)))]
        found = self._compute(way, i, gradients)
        if stage > 0:
            self._found[stage, i] = found

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

    def _activation(self, i: int, inputs: tuple[Any, Any]) -> list[torch.Tensor]:
        """A stage's outputs, to be sent."""
        number = self._now.stage
        stage, spec = self._stages[number], self._spec(number, i)
        if self._batch.training is None:
            return spec.flatten(stage.evaluate(inputs, stage.layers.onward))
        if stage.recompute:
            spec = spec.without_graph
        return spec.flatten(stage.forward(i, inputs, stage.layers.onward))

    def _output(self, i: int, inputs: tuple[Any, Any]) -> None:
        """Keep the last stage's outputs, or in training its loss."""
        stage = self._stages[self._last]
        if self._batch.training is None:
            made = stage.evaluate(inputs, stage.layers.onward)
            self._spec(self._last, i).flatten(made)  # raises if the other ranks expect another spec
            self.outputs.append(made[0])
        else:
            self.losses.append(stage.forward(i, inputs, self._weighted_loss(i)).detach())

    def _weighted_loss(self, i: int) -> Callable[[Any, Any], torch.Tensor]:
        """A micro-batch's part of the batch's mean loss: fewer rows count for less."""
        assert self._batch.training is not None
        loss_fn, rows = self._batch.training[0], self._batch.rows
        targets = self._targets[i]

        def finish(outputs: Any, _: Any) -> torch.Tensor:
            loss = loss_fn(outputs, targets)
            if not isinstance(loss, torch.Tensor) or loss.ndim:
                raise ValueError("loss_fn must return one number, the mean over its rows")
            return loss * (rows[i] / sum(rows))

        return finish

    @cached_property
    def _targets(self) -> list[Any]:
        assert self._batch.training is not None
        return split_into_microbatches("targets", self._batch.training[1], self._batch.rows)
