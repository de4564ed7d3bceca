"""One rank runs its list of instructions: a method for each kind."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

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
from minidist.pipeline.microbatches import split_into_microbatches
from minidist.pipeline.preparation import Batch
from minidist.pipeline.simulate import Span
from minidist.pipeline.specs import ActivationSpec
from minidist.pipeline.stage import Gradients, Stage
from minidist.pipeline.transfers import Transfers, Travelling

Place = tuple[int, int]  # a stage and a micro-batch


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
