"""One rank runs its list of instructions (lesson 5)."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from minidist.pipeline.batch import cut
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
from minidist.pipeline.opening import Batch
from minidist.pipeline.simulate import Span
from minidist.pipeline.stage import Stage
from minidist.pipeline.transfers import Outline, Transfers


class Executor:
    """Interprets the instructions of one rank, for one batch.

    keywords: of each stage, the keyword arguments that its layers take.

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
        keywords: Sequence[set[str]],
        transfers: Transfers,
        batch: Batch,
    ) -> None:
        self._schedule, self._stages, self._keywords = schedule, stages, keywords
        self._transfers, self._batch = transfers, batch
        self._made: dict[Instruction, Any] = {}  # the tensors that are to be sent
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.trace: list[Span] = []
        self.failed = False
        self.problem: Exception | None = None

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Do it all, in order."""
        for instruction in instructions:
            start = time.perf_counter()
            if isinstance(instruction, RECEIVES):
                self._transfers.expect(instruction)
            elif isinstance(instruction, SENDS):
                self._transfers.send(instruction, self._made.pop(instruction))
            else:
                start = self._compute(instruction)
            self.trace.append(Span(instruction, start, time.perf_counter()))
        self._transfers.finish()

    def _compute(self, instruction: Instruction) -> float:
        """Returns when it began, after the wait for its message."""
        stages = self._schedule.stages
        needed, send = needs(instruction, stages), gives(instruction, stages)
        received = self._transfers.take(needed) if needed else None
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

    def _work(self, instruction: Instruction, received: Any) -> Any:
        """The tensors that are to be sent, if any."""
        stage, microbatch = self._stages[instruction.stage], instruction.microbatch
        match instruction:
            case Forward():
                return self._forward(stage, instruction, received)
            case Backward():
                return stage.backward(microbatch, [None] if received is None else received)
            case BackwardInputs():
                return stage.backward_inputs(microbatch, [None] if received is None else received)
            case BackwardWeights():
                stage.backward_weights(microbatch)
        return None

    def _forward(self, stage: Stage, instruction: Forward, received: Any) -> Any:
        number, microbatch = instruction.stage, instruction.microbatch
        last = number == self._schedule.stages - 1
        x, kwargs = inputs = self._batch.inputs[microbatch] if received is None else received
        if self._batch.training is None:
            y = stage.evaluate(x, kwargs)
            if last:
                Outline.of(y)  # raises unless the other ranks can be told of it
                self.outputs.append(y)
                return None
            made = self._onward(y, kwargs, number)
        elif last:
            loss = stage.forward(microbatch, inputs, self._weighted_loss(microbatch))
            self.losses.append(loss.detach())
            return None
        else:
            made = stage.forward(microbatch, inputs, lambda y: self._onward(y, kwargs, number))
        send = gives(instruction, self._schedule.stages)
        assert send is not None  # this is not the last stage
        return self._transfers.declare(send, made)

    def _onward(self, y: Any, kwargs: dict[str, Any], stage: int) -> tuple[Any, dict[str, Any]]:
        """What goes to the next stage: of the keyword arguments those that a later layer takes."""
        if kwargs:
            later = set[str]().union(*self._keywords[stage + 1 :])
            kwargs = {name: value for name, value in kwargs.items() if name in later}
        return y, kwargs

    def _weighted_loss(self, microbatch: int) -> Callable[[Any], torch.Tensor]:
        """A micro-batch's part of the batch's mean loss: fewer rows count for less."""
        assert self._batch.training is not None
        loss_fn, rows = self._batch.training[0], self._batch.rows
        own = self._targets[microbatch]

        def finish(outputs: Any) -> torch.Tensor:
            loss = loss_fn(outputs, own)
            if not isinstance(loss, torch.Tensor) or loss.ndim:
                raise ValueError("loss_fn must return one number, the mean over its rows")
            return loss * (rows[microbatch] / sum(rows))

        return finish

    @cached_property
    def _targets(self) -> list[Any]:
        assert self._batch.training is not None
        return cut("targets", self._batch.training[1], self._batch.rows)
