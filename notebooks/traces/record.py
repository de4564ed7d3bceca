"""Record the ten traces: `python notebooks/traces/record.py`, on a machine that does nothing else.

It says which trace is which, so read the page first. Arithmetic sleeps: it takes a known time and
needs no core. The link is emulated.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

import minidist as md

HERE = Path(__file__).resolve().parent
STEPS = 4
LINK = md.Link(gbps=1, latency_us=200)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "Layer", *weights: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.shapes = layer, [weight.shape for weight in weights]
        layer.compute("forward", layer.ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.layer.compute("backward", 2 * ctx.layer.ms)
        return gradient, None, *(gradient.new_ones(shape) for shape in ctx.shapes)


class Layer(nn.Module):
    """It computes row by row: ms of forward for each, and twice that of backward.

    gap: ms between two rows. numbers: its parameters have so many together. tensors: so many.
    """

    def __init__(
        self,
        ms: float = 1.25,
        rows: int = 2,
        gap: float = 0,
        numbers: int = 2**16,
        tensors: int = 1,
    ) -> None:
        super().__init__()
        self.ms, self.rows, self.gap = ms, rows, gap
        self.weights = nn.ParameterList(torch.zeros(numbers // tensors) for _ in range(tensors))

    def compute(self, name: str, ms: float) -> None:
        for _ in range(self.rows):
            with record_function(f"compute {name}"):
                sleep(ms / 1e3)
            if self.gap:
                sleep(self.gap / 1e3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Rows.apply(x, self, *self.weights)


def recorded(step: Callable[[int], Any]) -> md.tracing.Trace:
    """STEPS steps, after two that are not recorded. torch's own operations are left out: they copy
    gradients, in microseconds."""
    for _ in range(2):
        step(-1)
    dist.barrier()
    with md.tracing.record() as trace:
        for k in range(STEPS):
            with trace.step():
                step(k)
    trace.spans = [e for e in trace.spans if not e.name.startswith("aten::")]
    return trace


def replicas(
    layer: dict[str, Any] | None = None,
    on: dict[int, dict[str, Any]] | None = None,
    cap: float | None = 0.25,
    load: dict[int, float] | None = None,
    pause: dict[int, float] | None = None,
) -> md.tracing.Trace:
    """Eight layers on each rank. on: what is particular to the layers of a rank. cap: MB of a
    bucket; None: no DDP, but an all_reduce of each parameter after backward. load: of a rank, the
    ms before a step. pause: of a step, the rank that stands still."""
    rank = dist.get_rank()
    mine = (layer or {}) | (on or {}).get(rank, {})
    model: nn.Module = nn.Sequential(*(Layer(**mine) for _ in range(8)))
    if cap is not None:
        model = md.DistributedDataParallel(model, bucket_cap_mb=cap)
    x = torch.ones(1, 8, requires_grad=True)

    def step(k: int) -> None:
        sleep((load or {}).get(rank, 1) / 1e3)
        loss = model(x).sum()
        if (pause or {}).get(k) == rank:
            sleep(0.04)
        loss.backward()
        if cap is None:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)

    return recorded(step)


def stages(balance: list[int]) -> md.tracing.Trace:
    """A pipeline of so many layers a stage, in four micro-batches."""
    layers = nn.Sequential(*(Layer(rows=1, numbers=64) for _ in range(sum(balance))))
    model = md.Pipeline(layers, 4, schedule="1f1b", balance=balance)
    x, y = torch.ones(4, 4096), torch.zeros(4, 4096)
    return recorded(lambda _: model.train_step(x, y, lambda out, y: (out - y).square().mean()))


class Scene(NamedTuple):
    cause: str
    rank: int | None
    run: Callable[..., md.tracing.Trace]
    arguments: dict[str, Any] = {}
    link: md.Link = LINK


SHORT = {"ms": 0.1, "rows": 8, "gap": 0.7, "numbers": 2**15}
SCENES = {
    1: Scene("slow loader", 2, replicas, {"load": {2: 30}}),
    2: Scene("no overlap", None, replicas, {"cap": None}),
    3: Scene("uneven stages", 1, stages, {"balance": [1, 3, 1, 1]}),
    4: Scene("healthy", None, replicas),
    5: Scene("slow device", 3, replicas, {"on": {3: {"ms": 2.2}}}),
    6: Scene("small messages", None, replicas, {"layer": {"tensors": 16}, "cap": 0.001}),
    7: Scene("pauses in turn", None, replicas, {"pause": {0: 2, 1: 0, 2: 3, 3: 1}}),
    8: Scene("bound by Python", None, replicas, {"layer": SHORT}),
    9: Scene("more rows", 0, replicas, {"on": {0: {"rows": 3}}}),
    10: Scene("slow link", None, replicas, link=md.Link(gbps=0.2, latency_us=200)),
}


def path_of(number: int, folder: Path = HERE) -> Path:
    return folder / f"{number:02}.json.gz"


def main(folder: Path = HERE) -> None:
    pools = {}
    for number, scene in SCENES.items():
        ranks = pools.get(scene.link) or md.ranks(4, backend="shm", link=scene.link)
        pools[scene.link] = ranks
        md.tracing.save(ranks(scene.run, **scene.arguments), path_of(number, folder))
        print(number, md.tracing.validate(path_of(number, folder)), "events")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
