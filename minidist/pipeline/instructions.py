"""A schedule is data: for each rank, the list of what it does in one training step.

The model is cut into stages, and the batch into micro-batches. Stage s lives on rank s modulo the
number of ranks, so the neighbours of a stage are on the neighbouring ranks. Nothing here computes:
the same lists are checked (`validate`), timed (`simulate`), drawn, and run (`executor`).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """Something that a rank does with one micro-batch in one of its stages."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.stage}, {self.microbatch})"


class Compute(Instruction):
    """What takes a rank's time. The other instructions are messages, which travel meanwhile."""


class Forward(Compute):
    """Outputs from inputs; in the last stage, the loss."""


class Backward(Compute):
    """Gradients for the inputs and for the weights, in one go."""


class BackwardInputs(Compute):
    """Gradients for the inputs alone: all that the stage before waits for."""


class BackwardWeights(Compute):
    """Gradients for the weights alone: nobody waits for them, so they fill idle time."""


class SendActivation(Instruction):
    """The stage's outputs leave for the next stage."""


class ReceiveActivation(Instruction):
    """The stage's inputs may come in, from the stage before."""


class SendGradient(Instruction):
    """The gradient for the stage's inputs leaves for the stage before."""


class ReceiveGradient(Instruction):
    """The gradient for the stage's outputs may come in, from the next stage."""


SENDS = (SendActivation, SendGradient)
RECEIVES = (ReceiveActivation, ReceiveGradient)


@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline: `ranks[r]` is the list of instructions of rank r."""

    name: str
    stages: int
    microbatches: int
    ranks: list[list[Instruction]] = field(repr=False)

    def rank_of(self, stage: int) -> int:
        """The rank that stage lives on."""
        return stage % len(self.ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients for inputs and those for weights are computed apart."""
        return any(isinstance(each, BackwardInputs) for own in self.ranks for each in own)


def needs(instruction: Instruction, stages: int) -> Instruction | None:
    """The message that must have been received before a computation, if any."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if isinstance(instruction, Forward) and stage > 0:
        return ReceiveActivation(stage, microbatch)
    if isinstance(instruction, (Backward, BackwardInputs)) and stage < stages - 1:
        return ReceiveGradient(stage, microbatch)
    return None


def gives(instruction: Instruction, stages: int) -> Instruction | None:
    """The message that a computation makes possible, if any."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if isinstance(instruction, Forward) and stage < stages - 1:
        return SendActivation(stage, microbatch)
    if isinstance(instruction, (Backward, BackwardInputs)) and stage > 0:
        return SendGradient(stage, microbatch)
    return None


def other_end(message: Instruction) -> Instruction:
    """The receive of a send, and the send of a receive."""
    stage, microbatch = message.stage, message.microbatch
    match message:
        case SendActivation():
            return ReceiveActivation(stage + 1, microbatch)
        case ReceiveActivation():
            return SendActivation(stage - 1, microbatch)
        case SendGradient():
            return ReceiveGradient(stage - 1, microbatch)
        case ReceiveGradient():
            return SendGradient(stage + 1, microbatch)
    raise TypeError(f"{message} is no message")
