"""One rank runs its list of instructions (lesson 5)."""

import time
from collections.abc import Callable, Mapping

import torch

from minidist.pipeline.instructions import (
    RECEIVES,
    SENDS,
    Backward,
    BackwardInputs,
    BackwardWeights,
    Forward,
    Instruction,
    Schedule,
    gives,
    needs,
)
from minidist.pipeline.messages import Messages, rows_of
from minidist.pipeline.simulate import Span
from minidist.pipeline.stage import Finish, Stage

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Worker:
    """Interprets the instructions of one rank, for one batch.

    inputs: of the batch, used where the first stage is.
    training: the loss_fn and the targets, used where the last stage is. None: there is no backward
    pass, and the last stage's outputs are collected.

    If a stage fails, the rank goes on through its list, but computes nothing and sends zeros: so no
    other rank waits for ever, and all of them can be told at the end. After the run:

    losses: of the last stage, one for each micro-batch, whose sum is the mean over the batch.
    outputs: of the last stage, in an evaluation. trace: each instruction and when, which for a
    computation is after the wait for its message. failed: whether something went wrong, here or at
    a stage before; problem: what it was, if here.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        messages: Messages,
        inputs: torch.Tensor,
        training: tuple[Loss, torch.Tensor] | None = None,
    ) -> None:
        self._schedule, self._stages, self._messages = schedule, stages, messages
        self._inputs, self._training = inputs, training
        self._made: dict[Instruction, torch.Tensor | None] = {}  # what is to be sent
        self.losses: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.trace: list[Span] = []
        self.failed = False
        self.problem: Exception | None = None

    def run(self, instructions: list[Instruction]) -> None:
        """Do it all, in order."""
        for instruction in instructions:
            start = time.perf_counter()
            if isinstance(instruction, RECEIVES):
                self._messages.expect(instruction)
            elif isinstance(instruction, SENDS):
                self._messages.send(instruction, self._made.pop(instruction))
            else:
                start = self._compute(instruction)
            self.trace.append(Span(instruction, start, time.perf_counter()))
        self._messages.finish()

    def _compute(self, instruction: Instruction) -> float:
        """Returns when it began, after the wait for its message."""
        stages = self._schedule.stages
        needed, send = needs(instruction, stages), gives(instruction, stages)
        received = self._messages.take(needed) if needed else None
        start, made = time.perf_counter(), None
        self.failed |= needed is not None and received is None
        if not self.failed:
            try:
                made = self._work(instruction, received)
            except Exception as problem:
                self.failed, self.problem = True, problem
                problem.add_note(f"(at {instruction} of the pipeline)")
        if send:
            self._made[send] = made
        return start

    def _work(self, instruction: Instruction, received: torch.Tensor | None) -> torch.Tensor | None:
        stage, microbatch = self._stages[instruction.stage], instruction.microbatch
        match instruction:
            case Forward():
                return self._forward(stage, instruction, received)
            case Backward():
                return stage.backward(microbatch, received)
            case BackwardInputs():
                return stage.backward_inputs(microbatch, received)
            case BackwardWeights():
                stage.backward_weights(microbatch)
        return None

    def _forward(
        self, stage: Stage, instruction: Instruction, received: torch.Tensor | None
    ) -> torch.Tensor | None:
        number, microbatch = instruction.stage, instruction.microbatch
        total = self._total(number)
        rows = rows_of(total, self._schedule.microbatches)[microbatch]
        if rows == 0:  # in an evaluation of fewer rows than micro-batches
            return None
        if received is None:
            x = self._part(self._inputs, total, microbatch)
        else:
            x = received.requires_grad_(self._training is not None)
        last = number == self._schedule.stages - 1
        if self._training is None:
            y = stage.evaluate(x)
            if last:
                self.outputs.append(y)
        elif last:
            loss_fn, targets = self._training
            targets = self._part(targets, total, microbatch)
            y = stage.forward(microbatch, x, _weighted(loss_fn, targets, rows / total))
            self.losses.append(y)
        else:
            y = stage.forward(microbatch, x)
        if not last:
            self._messages.declare(number, microbatch, y, total)
        return y

    def _total(self, stage: int) -> int:
        """The rows of the batch: as the first stage sees, and tells the others."""
        if stage > 0:
            return self._messages.layout(stage - 1).rows
        if not isinstance(self._inputs, torch.Tensor) or self._inputs.ndim == 0:
            raise TypeError("the inputs of a pipeline are one tensor, its rows first")
        total, least = len(self._inputs), self._schedule.microbatches if self._training else 1
        if total < least:
            raise ValueError(f"a batch of {total} rows cannot be cut into {least} micro-batches")
        return total

    def _part(self, whole: object, total: int, microbatch: int) -> torch.Tensor:
        """The rows of a micro-batch."""
        if not isinstance(whole, torch.Tensor) or whole.ndim == 0 or len(whole) != total:
            found = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
            raise ValueError(f"the targets of a batch of {total} rows have as many, not {found}")
        rows = rows_of(total, self._schedule.microbatches)
        return whole.narrow(0, sum(rows[:microbatch]), rows[microbatch])


def _weighted(loss_fn: Loss, targets: torch.Tensor, weight: float) -> Finish:
    """A micro-batch's part of the batch's mean loss: fewer rows count for less."""

    def finish(outputs: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise ValueError("loss_fn must return one number, the mean over its rows")
        return loss * weight

    return finish
