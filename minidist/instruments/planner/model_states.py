"""Model states: parameters, gradients and optimizer states, the bytes that a rank holds all the
time. Rajbhandari et al., "ZeRO" (arXiv 1910.02054), sections 3.1 and 5. Lesson: zero.

The paper's Ψ is `parameters`, its N_d `world_size`. Left out: buckets on their way, what an
optimizer computes with, and numbers for whole tensors, such as Adam's counts of steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""How many states of its own size an optimizer keeps of a parameter."""


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter, its gradient, each of its states, and of the optimizer's own copy of
    the parameter, if it has one; and of a number in the forward pass, an activation. float8: linear
    layers multiply in 8 bits, and keep their inputs in 16."""

    parameter: int
    gradient: int
    state: int
    master: int = 0
    compute: int = 2
    float8: bool = False

    def states(self, optimizer: str) -> int:
        """Bytes of a parameter's states and master copy: ZeRO's K, section 3.1."""
        return self.master + OPTIMIZERS[optimizer] * self.state

    def touched(self, optimizer: str) -> int:
        """Bytes that a step of the optimizer reads and writes, of a parameter: its gradient is
        read; states, and what is updated, are read and written; a master copy is cast."""
        updated = 2 * self.master + self.parameter if self.master else 2 * self.parameter
        return self.gradient + updated + 2 * (self.states(optimizer) - self.master)


PRECISIONS = {
    "mixed": Precision(2, 2, state=4, master=4),  # ZeRO, section 3.1; DeepSpeed, by default
    "megatron": Precision(2, 4, state=4, master=4),  # bfloat16, gradients summed in float32
    "autocast": Precision(4, 4, state=4),  # torch.autocast; FSDP with param_dtype=bfloat16
    "float8": Precision(4, 4, state=4, float8=True),  # the same, with torchao's Float8Linear
    "bfloat16": Precision(2, 2, state=2),
    "float32": Precision(4, 4, state=4, compute=4),
    "float64": Precision(8, 8, state=8, compute=8),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `logits`: the loss and what it needs. `copies`: parameters that are there
    while they compute, such as the gathered units of ZeRO-3 (see `peak`)."""

    parameters: float
    gradients: float
    optimizer_states: float
    activations: float = 0.0
    logits: float = 0.0
    copies: float = 0.0

    @property
    def categories(self) -> dict[str, float]:
        """{category: bytes}, by the names that `md.measure.MemoryTracker` gives them; with logits
        and copies where there are any."""
        sizes = {each.name.replace("_", " "): getattr(self, each.name) for each in fields(self)}
        return {k: size for k, size in sizes.items() if size or k not in ("logits", "copies")}

    @property
    def total(self) -> float:
        return sum(self.categories.values())


def memory(
    parameters: float,
    world_size: int = 1,
    stage: int = 0,
    *,
    optimizer: str = "adam",
    precision: str = "mixed",
    activations: float = 0.0,
) -> Memory:
    """Bytes that each of `world_size` ranks holds of a model. Lesson: zero.

        md.planner.memory(7.5e9, world_size=64, stage=2).total / 1e9    # 16.6 GB

    parameters: how many are trained, Ψ: sum(p.numel() for p in model.parameters()).
    stage: 0 shares out nothing (DDP), 1 the optimizer states, 2 also the gradients, 3 also the
        parameters. The paper calls the last three P_os, P_os+g and P_os+g+p.
    optimizer, precision: see OPTIMIZERS and PRECISIONS.
    activations: bytes of them, of this rank's batch; no stage shares them out.

    Raises ValueError for a name or a stage that is unknown, and for numbers that make no sense.
    """
    if not (parameters > 0 and math.isfinite(parameters)):
        raise ValueError(f"a model has more than 0 parameters, not {parameters}")
    require_whole("world_size", world_size)
    require_one_of("stage", stage, STAGES)
    require_one_of("optimizer", optimizer, OPTIMIZERS)
    require_one_of("precision", precision, PRECISIONS)
    size, N = PRECISIONS[precision], world_size
    K = size.states(optimizer)
    return Memory(
        parameters=size.parameter * parameters / (N if stage >= 3 else 1),  # section 5.3
        gradients=size.gradient * parameters / (N if stage >= 2 else 1),  # section 5.2
        optimizer_states=K * parameters / (N if stage >= 1 else 1),  # section 5.1
        activations=activations,
    )


def require_whole(name: str, number: object) -> None:
    if not (isinstance(number, int) and number >= 1):
        raise ValueError(f"{name} must be a whole number from 1 on, not {number}")


def require_one_of(what: str, name: object, choices: Iterable[object]) -> None:
    if name not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(str, choices))}, not {name!r}")
