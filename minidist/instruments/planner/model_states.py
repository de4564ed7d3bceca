"""Model states: parameters, gradients and optimizer states, the bytes that a rank holds all the
time. Rajbhandari et al., "ZeRO" (arXiv 1910.02054), sections 3.1 and 5. Lesson: zero.

The paper's Ψ is `parameters`, its N_d `world_size`. Left out: buckets on their way, what an
optimizer computes with, and numbers for whole tensors, such as Adam's counts of steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
OPTIMIZERS |= {"adam8bit": 2}
"""How many states of its own size an optimizer keeps of a parameter."""
EIGHT_BIT = 1 + 4 / 256  # bytes of a state in bitsandbytes: blocks of 256 share a float32


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

    def states(self, optimizer: str) -> float:
        """Bytes of a parameter's states and master copy: ZeRO's K, section 3.1."""
        each = EIGHT_BIT if optimizer.endswith("8bit") else self.state
        return self.master + OPTIMIZERS[optimizer] * each

    def touched(self, optimizer: str) -> float:
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
    _require_size("activations", activations)
    size, N = PRECISIONS[precision], world_size
    K = size.states(optimizer)
    return Memory(
        parameters=size.parameter * parameters / (N if stage >= 3 else 1),  # section 5.3
        gradients=size.gradient * parameters / (N if stage >= 2 else 1),  # section 5.2
        optimizer_states=K * parameters / (N if stage >= 1 else 1),  # section 5.1
        activations=activations,
    )


def largest_model(
    nbytes: float, world_size: int = 1, stage: int = 0, activations: float = 0.0, **recipe: Any
) -> int:
    """The most parameters of which a rank holds `nbytes` at most; `recipe` is the optimizer and
    the precision of `memory`. ValueError if there is room for none. Lesson: zero."""
    _require_size("a memory", nbytes)
    most = math.floor((nbytes - activations) / memory(1, world_size, stage, **recipe).total)
    if most < 1:
        words = f", of which activations take {activations:,.0f}" if activations else ""
        raise ValueError(f"no model fits in a memory of {nbytes:,.0f} bytes{words}")
    return most


def smallest_world_size(
    nbytes: float, parameters: float, stage: int = 3, activations: float = 0.0, **recipe: Any
) -> int:
    """The fewest ranks that each hold `nbytes` at most; `recipe` as in `largest_model`.
    ValueError if no number of ranks is enough. Lesson: zero."""
    _require_size("a memory", nbytes)
    alone, of_two = (
        memory(parameters, N, stage, activations=activations, **recipe).categories for N in (1, 2)
    )
    own = sum(size for name, size in alone.items() if of_two[name] == size)
    shared = sum(alone.values()) - own  # so a rank of N holds own + shared / N
    if own + shared <= nbytes:
        return 1
    if own >= nbytes:
        raise ValueError(
            f"{STAGES[stage]} fits on no number of ranks: each holds {own:,.0f} bytes that it "
            f"shares with none, and has {nbytes:,.0f}"
        )
    return math.ceil(shared / (nbytes - own))


def require_whole(name: str, number: object) -> None:
    if not (isinstance(number, int) and number >= 1):
        raise ValueError(f"{name} must be a whole number from 1 on, not {number}")


def require_one_of(what: str, name: object, choices: Iterable[object]) -> None:
    if name not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(str, choices))}, not {name!r}")


def _require_size(what: str, size: float) -> None:
    if not (size >= 0 and math.isfinite(size)):
        raise ValueError(f"{what} of {size} bytes makes no sense")
