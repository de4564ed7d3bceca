"""What is trained: the model, its data, and the optimizer. The same on every rank."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.compare.watched_steps import State, Watch

Batch = tuple[torch.Tensor, torch.Tensor]
LAYERS, WIDTH, HEADS, LENGTH = 4, 128, 4, 64  # of the transformer: 0.9 million parameters


def transformer() -> nn.Module:
    """A `zoo.Transformer`, its head not tied: torch's pipelining knows no ties."""
    model = md.zoo.Transformer(256, LENGTH, WIDTH, HEADS, LAYERS)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def mlp() -> nn.Module:
    """(B, 64) to (B, 10), with a plan for tensor parallelism."""
    model: Any = md.zoo.mlp(64, 512, 512, 512, 10)
    model.tensor_plan = {"0": "columns", "2": "rows", "4": "columns", "6": "rows"}
    return model


# Of each name: what gives the inputs and targets, and a model for them.
DATA: dict[str, tuple[Callable[[], Batch], Callable[[], nn.Module]]] = {
    "text": (partial(md.zoo.text, LENGTH), transformer),
    "digits": (md.zoo.digits, mlp),
}


@dataclass(frozen=True)
class Task:
    """A training of `steps` batches of `rows` examples each, of all ranks together.
    Lesson: real_tools.

    model: makes the model; see `make`. data: a name in DATA.
    optimizer_class, options: for a system that makes the optimizer itself; else see `optimizer`.
    microbatches: of a pipeline. world_size: of the comparison, also where one process stands in.
    """

    model: Callable[[], nn.Module]
    data: str = "text"
    rows: int = 32
    steps: int = 3
    dtype: torch.dtype = torch.float64
    microbatches: int = 8
    world_size: int = 1
    optimizer_class: Any = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=lambda: dict(lr=0.1, momentum=0.9))

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return md.rank.device() if dist.is_initialized() else torch.device("cpu")

    def make(self) -> nn.Module:
        """A new model, with the same weights on every rank and at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().to(self.device, self.dtype)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """A new one, of these parameters."""
        made: torch.optim.Optimizer = self.optimizer_class(parameters, **self.options)
        return made

    def batches(self) -> list[Batch]:
        """The whole batches, one a step, the same on every rank."""
        inputs, targets = DATA[self.data][0]()
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        picks = torch.arange(self.steps * self.rows).view(self.steps, -1) % len(inputs)
        return [(inputs[p].to(self.device), targets[p].to(self.device)) for p in picks]

    def share(self, batch: Batch) -> Batch:
        """This rank's rows: every N-th, from its own number on."""
        if not dist.is_initialized():
            return batch
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return batch[0][rank::ranks], batch[1][rank::ranks]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all predictions: outputs (*, classes), targets (*,)."""
        return md.parity.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class System:
    """A way to train: `train(task, watch)` on every rank. Lesson: real_tools.

    name: what the table and `--only` call it. one_process: it runs in one process, as DataParallel.
    stage: of ZeRO, 0 for DDP to 3, for the bytes that the planner has of it; None is not known.
    """

    name: str
    train: Callable[[Task, Watch], State]
    one_process: bool = False
    stage: int | None = None


def replicas(task: Task, watch: Watch, model: nn.Module, optimizer: Any) -> State:
    """Train replicas of a model, each on its rows of each batch, as anybody writes it.
    Lesson: real_tools."""
    for batch in task.batches():
        inputs, targets = task.share(batch)
        with watch.step(model, optimizer):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        watch.loss(loss)
    return bare(model.state_dict())


def bare(state: Mapping[str, torch.Tensor]) -> State:
    """By the names that the bare model has: without those of wrappers. Lesson: real_tools."""
    return {name.replace("module.", ""): tensor.detach() for name, tensor in state.items()}
