"""A toy model whose step is timed on any mesh, over emulated links, and predicted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.zoo import Sleep
from minidist.instruments.link import Link
from minidist.machine.runtime import Pool
from minidist.mixed import AXES, MixedParallel, mesh
from minidist.pipeline import SCHEDULES, simulate
from minidist.pipeline.instructions import Compute

Sizes = tuple[int, int, int]  # of the axes data, pipeline, tensor
PLAN = {"*.up": "columns", "*.down": "rows"}


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) to (B, T, C)
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Chain:
    """Equal layers that sleep as if they computed: so two cores can play many ranks.

        chain = md.scaling.Chain()
        with md.ranks(4, nodes=2, link=link) as pool:
            parts, nbytes = chain.measure(pool, (2, 1, 2), 4)     # {part: seconds}; of node 0
        chain.predict(link, (2, 1, 2), 4)                         # {part: seconds}

    The parts of a step: "passes", computing and the sums along tensor; "waiting" for other stages;
    "data", the gradients of the replicas, after the last pass. sizes: of data, pipeline, tensor.
    batch: into how many micro-batches the whole batch is cut, which the replicas share; without
    stages a replica takes its rows at once.

    rows: of the whole batch, each of `length` tokens. ms: milliseconds that a layer sleeps for a
    row in forward, and half of what it sleeps in backward; where it is cut in t, a t-th of both.
    Lesson: mixed_parallelism.
    """

    layers: int = 4
    width: int = 64
    hidden: int = 32
    rows: int = 32
    length: int = 32
    ms: float = 3.0

    def module(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer(self.width, self.hidden) for _ in range(self.layers)])

    def microbatches(self, sizes: Sizes, batch: int) -> int:
        """Those of a replica."""
        return batch // sizes[0] if sizes[1] > 1 else 1

    def held(self, sizes: Sizes) -> int:
        """The bytes of a rank's parameters: all is cut along tensor, but for the bias of `down`."""
        _, pipeline, tensor = sizes
        cut = 2 * self.width * self.hidden + self.hidden
        return self.layers // pipeline * 4 * (cut // tensor + self.width)

    def leaving(self, sizes: Sizes) -> float:
        """The bytes that leave one of two nodes in a step, by the formula. The outermost of the
        axes data, pipeline, tensor that has several ranks crosses, as rings and messages do."""
        data, pipeline, tensor = sizes
        activation = self.rows * self.length * self.width * 4
        if data > 1:  # each group is a ring, and together they carry all gradients
            return 2 * (data - 1) / data * self.held(sizes) * pipeline * tensor
        if pipeline > 1:
            return tensor * activation
        return 2 * (tensor - 1) / tensor * (2 * self.layers - 1) * activation

    def measure(
        self, pool: Pool, sizes: Sizes, batch: int, order: Sequence[str] = AXES
    ) -> tuple[dict[str, float], float]:
        """The parts of a step, in seconds, and the bytes that left node 0. Passes and waiting are
        means over the ranks. order: of the axes, the outermost first."""
        found = pool(self._step, sizes, batch, order)
        start, busy, last, end, sent = zip(*found, strict=True)
        passes, done = sum(busy) / len(busy), max(last)
        done = done if sizes[0] > 1 else max(end)  # what follows then is no gradient
        waiting = done - min(start) - passes
        return {"passes": passes, "waiting": waiting, "data": max(end) - done}, sent[0]

    def predict(self, link: Link, sizes: Sizes, batch: int) -> dict[str, float]:
        """The same by the formula, on two nodes of two ranks: it knows sleep and links alone."""
        assert link.inter is not None, "a link with a cable between the nodes"
        data, pipeline, tensor = sizes
        m = self.microbatches(sizes, batch)
        rows, depth = self.rows // data // m, self.layers // pipeline
        nbytes = rows * self.length * self.width * 4  # of a micro-batch's activation
        along = link if tensor <= 2 else link.inter
        sums = along.seconds(2 * (tensor - 1) / tensor * nbytes, 2 * (tensor - 1))
        forward = depth * (rows * self.ms / 1e3 / tensor + sums)
        backward = depth * (2 * rows * self.ms / 1e3 / tensor + sums)
        nodes = 2 if data == 1 and pipeline > 1 else 1
        times: Any = forward, backward / 2, backward / 2, link, tensor * nbytes, nodes
        passes = m * (forward + backward)
        waiting = simulate(SCHEDULES["1f1b"](pipeline, m), *times).time - passes
        gradients = link.inter.seconds(self.leaving(sizes), 2 * (data - 1)) if data > 1 else 0.0
        # The gradient of the first layer's input is not needed, nor its sum.
        return {"passes": passes - m * sums / pipeline, "waiting": waiting, "data": gradients}

    def _step(self, sizes: Sizes, batch: int, order: Sequence[str]) -> tuple[float, ...]:
        """Of a step on this rank: its start, the seconds in passes, the end of the last pass, its
        end; the bytes that left node 0."""
        axes, m = mesh(*sizes, order=order), self.microbatches(sizes, batch)
        model = MixedParallel(self.module(), axes, m, plan=PLAN)
        x = torch.randn(self.rows, self.length, self.width)[axes.get_local_rank("data") :: sizes[0]]
        if sizes[1] > 1:
            model.train_step(x, x, F.mse_loss)  # here the stages learn the shapes
        sleep = Sleep(self.ms / sizes[2])
        for layer in model.module.children():
            layer.register_forward_hook(lambda _, __, y: sleep(y))
        dist.barrier()
        before = Link.sent_by_node(0)
        dist.barrier()
        start = time.perf_counter()
        model.train_step(x, x, F.mse_loss)
        end = time.perf_counter()
        dist.barrier()
        sent = Link.sent_by_node(0) - before
        passes = [span for span in model.pipeline.trace if isinstance(span.instruction, Compute)]
        busy = sum(span.end - span.start for span in passes)
        return start, busy, passes[-1].end, end, sent
