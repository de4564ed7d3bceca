"""How long a step takes: from FLOP/s, α and β, which a small run finds out (lesson 12)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from minidist.backend.link import Link
from minidist.collectives.cost import Cost, cost
from minidist.planner.states import PRECISIONS, STAGES, require_counts, require_one_of

if TYPE_CHECKING:
    from minidist.runtime import Pool

# What travels in a step: gradients, then parameters. Stage 1 stands behind a DDP, as in lesson 8;
# with a reduce_scatter of the gradients there too it would send what stage 2 sends.
COLLECTIVES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    0: (("all_reduce",), ()),
    1: (("all_reduce",), ("all_gather",)),
    2: (("reduce_scatter",), ("all_gather",)),
    3: (("reduce_scatter",), ("all_gather", "all_gather")),  # for forward, and for backward
}
WIDTH, ROWS, LAYERS = 512, 256, 4  # of the small run's model
LARGE = 2**22  # bytes of its large all_reduce
TIMES = 9  # how often it takes each time


@dataclass(frozen=True)
class Machine:
    """What a rank can do: `flops` floating-point operations a second, while all ranks compute; and
    send a message of n bytes in alpha + beta n seconds (lesson 2)."""

    flops: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.alpha >= 0 and self.beta >= 0):
            raise ValueError(
                "a machine has more than 0 FLOP/s, and alpha and beta of 0 s or more, not "
                f"{self.flops}, {self.alpha} and {self.beta}"
            )

    @classmethod
    def on(cls, link: Link, flops: float) -> "Machine":
        """With such a link between any two ranks, or `link.inter` if it has one. A ring sends one
        block at a time through a node's cable, so it does not matter how many ranks share that; but
        what it waits for latency is then less than this says."""
        line = link.inter or link
        return cls(flops, alpha=line.seconds(0), beta=line.seconds(1) - line.seconds(0))


@dataclass(frozen=True)
class StepTime:
    """Seconds of forward, backward and what travels. The optimizer's own work is left out."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """If nothing overlaps."""
        return self.compute + self.communication

    @property
    def overlapped(self) -> float:
        """If all overlaps that can: no schedule is faster."""
        return max(self.compute, self.communication)


def traffic(
    parameters: float, world_size: int = 1, stage: int = 0, *, precision: str = "mixed"
) -> float:
    """Bytes that each rank sends in a step. Lessons 8 and 12.

    With ring collectives, Ψ parameters and N ranks: 2Ψ(N-1)/N elements in DDP and in stage 2, and
    3Ψ(N-1)/N in stages 1 and 3. ZeRO (arXiv 1910.02054), section 7, has them without (N-1)/N, and
    has 2Ψ for stage 1: see COLLECTIVES. Raises ValueError as `memory` does.
    """
    return sum(each.nbytes for each in _costs(parameters, world_size, stage, precision))


def step_time(
    parameters: float,
    world_size: int = 1,
    stage: int = 0,
    *,
    tokens: float,
    machine: Machine,
    precision: str = "mixed",
    recompute: bool = False,
) -> StepTime:
    """Predict a training step. Lesson 12.

    tokens: how many each rank trains on in a step; of models that know no tokens, examples.
    machine: from `calibrate`, or with numbers of your own.
    recompute: whether backward repeats the forward pass (lesson 10).

    A parameter takes 6 operations a token: 2 forward, 4 backward; attention scores and all that is
    no matrix product are left out (Kaplan et al., arXiv 2001.08361, section 2.1). Messages go
    around a ring, as `minidist.collectives.cost` has it. Raises ValueError as `memory` does.
    """
    costs = _costs(parameters, world_size, stage, precision)
    if not tokens > 0:
        raise ValueError(f"a step has more than 0 tokens, not {tokens}")
    return StepTime(
        compute=(8 if recompute else 6) * parameters * tokens / machine.flops,
        communication=sum(each.seconds(machine.alpha, machine.beta) for each in costs),
    )


def _costs(parameters: float, world_size: int, stage: int, precision: str) -> list[Cost]:
    require_counts(parameters, world_size)
    require_one_of("stage", stage, STAGES)
    require_one_of("precision", precision, PRECISIONS)
    size = PRECISIONS[precision]
    of_gradients, of_parameters = COLLECTIVES[stage]
    return [
        cost(operation, "ring", world_size, element * parameters)
        for operations, element in ((of_gradients, size.gradient), (of_parameters, size.parameter))
        for operation in operations
    ]


def calibrate(ranks: "Pool") -> Machine:
    """Find out what these ranks can do, by a run of a second or so. Lesson 12.

        with md.ranks(2) as r:
            machine = md.planner.calibrate(r)

    FLOP/s are those of forward and backward of a small MLP in float32, on all ranks at once. α and
    β are those with which the ring's formula gives the times of a short and of a long all_reduce,
    whatever the backend does instead. (One rank sends nothing: both are then 0.) Each time is the
    slowest rank's, a median of nine.
    """
    compute, short, long = (max(seconds) for seconds in zip(*ranks(_times_here), strict=True))
    sizes = {4: short, LARGE: long}
    alpha, beta = fit(ranks.world_size, sizes) if ranks.world_size > 1 else (0.0, 0.0)
    return Machine(6 * LAYERS * WIDTH**2 * ROWS / compute, alpha, beta)


def fit(world_size: int, all_reduces: dict[int, float]) -> tuple[float, float]:
    """α and β of a ring, of {bytes: seconds} of a short and of a long all_reduce."""
    (few, short), (many, long) = sorted(all_reduces.items())
    ring = [cost("all_reduce", "ring", world_size, nbytes) for nbytes in (few, many)]
    beta = max(0.0, long - short) / (ring[1].nbytes - ring[0].nbytes)
    alpha = max(0.0, short - beta * ring[0].nbytes) / ring[0].messages
    return alpha, beta


def _times_here() -> tuple[float, float, float]:
    """Seconds of forward and backward, and of all_reduces of 4 bytes and of LARGE ones."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH, requires_grad=True)
    short, long = torch.zeros(1), torch.zeros(LARGE // 4)
    work: list[Callable[[], object]] = [
        lambda: model(x).sum().backward(),
        lambda: dist.all_reduce(short),
        lambda: dist.all_reduce(long),
    ]
    return _typical(work[0]), _typical(work[1]), _typical(work[2])


def _typical(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(2 + TIMES):  # two to warm up
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])
