"""A judge for anybody's way to train: are the weights right, does it train by what was asked for,
and does a rank hold the bytes that this should need?"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.instruments.compare.task import bare
from minidist.instruments.compare.torch_systems import whole
from minidist.instruments.compare.watched_steps import State
from minidist.instruments.measure.storages import storages
from minidist.machine.runtime import Pool

# Adam hides gradients that are too large by a factor; but its states are more to be sharded.
EXACT: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
COUNTED: Any = partial(torch.optim.Adam, lr=1e-3)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


class Found(NamedTuple):
    """What trains on a rank; its bytes a parameter after a step, by what they are, and at the peak.
    Lesson: real_tools."""

    kinds: str
    parts: dict[str, float]
    peak: float

    @property
    def held(self) -> float:
        return sum(self.parts.values())


def weights_of(model: nn.Module) -> State:
    """Whole, by the names of the bare model."""
    return bare(whole(model.state_dict()))


def kinds_of(model: Any, optimizer: Any) -> str:
    """The types of the model and of its optimizers, the innermost last; DeepSpeed's stage.
    Lesson: real_tools."""
    kinds = [type(model).__name__]
    if hasattr(model, "zero_optimization_stage"):
        kinds.append(f"stage {model.zero_optimization_stage()}")
    return ", ".join(kinds + [type(each).__name__ for each in layers_of(optimizer)])


def layers_of(optimizer: Any) -> list[Any]:
    """The optimizer, and those that it wraps, the innermost last."""
    if optimizer is None:
        return []
    within = getattr(optimizer, "optimizer", getattr(optimizer, "optim", None))
    return [optimizer, *layers_of(within)]


def found_by(model: Callable[[], nn.Module], strategy: Any, step: Any) -> Found:
    """Two steps on this rank, on 16 of the digits, in float32 with Adam. Lesson: real_tools."""
    made = model().float()
    size = sum(p.numel() for p in made.parameters())
    images, labels = (each[:16].clone() for each in md.zoo.digits())
    with md.measure.MemoryTracker(made) as memory:
        trained, optimizer = strategy(made, COUNTED)
        for _ in range(2):
            step(trained, optimizer, images, labels, F.cross_entropy)
    innermost = layers_of(optimizer)[-1]
    of_model = {storage._cdata for storage in storages(list(trained.parameters()))}
    held = storages((dict(innermost.state), [g["params"] for g in innermost.param_groups]))
    own = {storage._cdata: storage.nbytes() for storage in held}
    states = sum(nbytes for key, nbytes in own.items() if key not in of_model)
    live = memory.live | {"optimizer states": states, "other": memory.live["other"] - states}
    parts = {name: nbytes / size for name, nbytes in live.items()}
    return Found(kinds_of(trained, optimizer), parts, memory.peak / size)


class Judge:
    """Holds strategies against one process. Lesson: real_tools.

        judge = md.compare.Judge(make_model, pool)
        judge("torch DDP", ddp, trains="DistributedDataParallel", held=20)

    strategy: called on each rank with a model of the digits and `make`, which makes an optimizer
        of parameters; returns the model and the optimizer that train. Its weights are held against
        one process by `md.parity.check`, which describes `step`, `weights` and `dtype`.
    trains: a type, or DeepSpeed's stage, that must be among those of `kinds_of` on every rank.
    held: the bytes a parameter that the fullest rank should hold after a step, to a tenth, with
        Adam in float32.

    Prints a line. Raises `md.parity.ParityError`, or AssertionError for what trains and its bytes.
    `rows` keeps, by name, what was found on the fullest rank, and `formulas` what was expected.
    """

    def __init__(self, model: Callable[[], nn.Module], ranks: Pool) -> None:
        self.model, self.ranks = model, ranks
        self.rows, self.formulas = dict[str, Found](), dict[str, float]()

    def __call__(
        self,
        name: str,
        strategy: Callable[..., Any],
        trains: str,
        held: float,
        step: Callable[..., Any] = md.parity.train_step,
        weights: Callable[..., Any] = weights_of,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        exact = partial(strategy, make=EXACT)
        how: Any = dict(model=self.model, step=step, weights=weights, dtype=dtype, ranks=self.ranks)
        md.parity.check(exact, **how, tolerance=TOLERANCES[dtype])
        found = self.ranks(found_by, self.model, strategy, step)
        fullest = max(found, key=lambda each: each.held)
        asked = all(trains in each.kinds.split(", ") for each in found)
        if not asked or abs(fullest.held / held - 1) > 0.1:
            raise AssertionError(
                f"{name}: the weights are right, but {fullest.kinds} trains and holds "
                f"{fullest.held:.1f} bytes a parameter, not {trains} with {held:.1f}"
            )
        self.rows[name], self.formulas[name] = fullest, held
        print(f"{name:>16}: as one process; {fullest.held:4.1f} bytes; {fullest.kinds}")
