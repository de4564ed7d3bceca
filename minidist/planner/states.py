"""What a rank holds of a model at rest: parameters, gradients, optimizer states (lesson 12).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054), sections 3.1 and 5, whose Table 1 and Figure 1 `memory` gives. Its Ψ is `parameters`,
its N_d `world_size`.

Left out, since it depends on the program: what is there for a moment only, such as a bucket that
travels or what an optimizer computes with, padding (less than N elements a bucket), and numbers for
whole tensors, such as Adam's counts of steps. Lesson 8 counts all three.
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
    the parameter, if it has one."""

    parameter: int
    gradient: int
    state: int
    master: int = 0


PRECISIONS = {
    "mixed": Precision(2, 2, state=4, master=4),  # ZeRO, section 3.1: 2 + 2, and K = 12 for Adam
    "bfloat16": Precision(2, 2, state=2),
    "float32": Precision(4, 4, state=4),
    "float64": Precision(8, 8, state=8),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer_states: float
    activations: float = 0.0

    @property
    def categories(self) -> dict[str, float]:
        """{category: bytes}, by the names that `md.measure.MemoryTracker` gives them."""
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}

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
    """What each of `world_size` ranks holds of a model. Lessons 8 and 12.

        md.planner.memory(7.5e9, world_size=64, stage=2).total / 1e9    # 16.6 GB

    parameters: how many are trained, Ψ: sum(p.numel() for p in model.parameters()).
    stage: 0 shares out nothing (DDP), 1 the optimizer states, 2 and the gradients, 3 and the
        parameters. The paper calls the last three P_os, P_os+g and P_os+g+p.
    optimizer, precision: see OPTIMIZERS and PRECISIONS.
    activations: bytes of them, of this rank's batch; no stage shares them out. Those of a
        transformer: `Transformer.activations`.

    Raises ValueError for a name or a stage that is unknown, and for numbers that make no sense.
    """
    require_counts(parameters, world_size)
    require_one_of("stage", stage, STAGES)
    require_one_of("optimizer", optimizer, OPTIMIZERS)
    require_one_of("precision", precision, PRECISIONS)
    require_size("activations", activations)
    size, N = PRECISIONS[precision], world_size
    K = size.master + size.state * OPTIMIZERS[optimizer]  # ZeRO, section 3.1
    return Memory(
        parameters=size.parameter * parameters / (N if stage >= 3 else 1),  # section 5.3
        gradients=size.gradient * parameters / (N if stage >= 2 else 1),  # section 5.2
        optimizer_states=K * parameters / (N if stage >= 1 else 1),  # section 5.1
        activations=activations,
    )


def largest_model(
    nbytes: float,
    world_size: int = 1,
    stage: int = 0,
    *,
    optimizer: str = "adam",
    precision: str = "mixed",
    activations: float = 0.0,
) -> int:
    """The most parameters with which a rank holds `nbytes` at most; see `memory`. Lesson 12.

    Raises ValueError if there is no room for even one, and as `memory` does.
    """
    require_size("a memory", nbytes)
    one = memory(1, world_size, stage, optimizer=optimizer, precision=precision)
    most = math.floor((nbytes - activations) / one.total)
    if most < 1:
        words = f", of which activations take {activations:,.0f}" if activations else ""
        raise ValueError(f"no model fits in a memory of {nbytes:,.0f} bytes{words}")
    return most


def smallest_world_size(
    nbytes: float,
    parameters: float,
    stage: int = 3,
    *,
    optimizer: str = "adam",
    precision: str = "mixed",
    activations: float = 0.0,
) -> int:
    """The fewest ranks that each hold `nbytes` at most; see `memory`. Lesson 12.

    Raises ValueError if no number of ranks is enough, since what every rank holds of its own, in
    this stage, is too large; and as `memory` does.
    """
    require_size("a memory", nbytes)
    alone, of_two = (
        memory(
            parameters, N, stage, optimizer=optimizer, precision=precision, activations=activations
        ).categories
        for N in (1, 2)
    )
    if sum(alone.values()) <= nbytes:
        return 1
    own = sum(size for name, size in alone.items() if of_two[name] == size)
    shared = sum(alone.values()) - own
    if own >= nbytes:
        raise ValueError(
            f"{STAGES[stage]} fits on no number of ranks: each holds {own:,.0f} bytes that it "
            f"shares with none, and has {nbytes:,.0f}"
        )
    return math.ceil(shared / (nbytes - own))


def require_counts(parameters: float, world_size: int) -> None:
    if not (parameters > 0 and math.isfinite(parameters)):
        raise ValueError(f"a model has more than 0 parameters, not {parameters}")
    if not (isinstance(world_size, int) and world_size >= 1):
        raise ValueError(f"world_size must be a whole number from 1 on, not {world_size}")


def require_size(what: str, size: float) -> None:
    if not (size >= 0 and math.isfinite(size)):
        raise ValueError(f"{what} of {size} bytes makes no sense")


def require_one_of(what: str, name: object, choices: Iterable[object]) -> None:
    if name not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(str, choices))}, not {name!r}")
