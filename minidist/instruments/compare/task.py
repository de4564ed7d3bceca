"""What is trained: the model, its data, and the optimizer. The same on every rank."""

import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.compare.watched_steps import State, Watch

Batch = tuple[torch.Tensor, torch.Tensor]
LAYERS, WIDTH, HEADS, LENGTH = 4, 128, 4, 64  # of the transformer: 0.9 million parameters
PREFIXES = ("module.", "_forward_module.", "_fsdp_wrapped_module.", "_orig_mod.")


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


@dataclass(frozen=True)
class Data:
    """What there is to train on: inputs and targets, and a model for them."""

    load: Callable[[], Batch]
    model: Callable[[], nn.Module]


DATA = {"text": Data(partial(md.zoo.text, LENGTH), transformer), "digits": Data(md.zoo.digits, mlp)}


@dataclass(frozen=True)
class Source:
    """A function of a file, by which each rank makes the model: "yours.py:build"."""

    place: str

    def __call__(self) -> nn.Module:
        path, _, name = self.place.rpartition(":")
        model = runpy.run_path(path)[name]()
        assert isinstance(model, nn.Module), f"{self.place} gives no module"
        return model

    def require(self) -> None:
        """Raises ValueError if there is no such file or function."""
        path, _, name = self.place.rpartition(":")
        if not Path(path).is_file():
            raise ValueError(f"a model is FILE.py:FUNCTION, and there is no file {path!r}")
        try:
            found = runpy.run_path(path)
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if not callable(found.get(name)):
            raise ValueError(f"{path} has no function {name!r}")


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
        made: torch.optim.Optimizer = self.optimizer_class(parameters, **self.options)
        return made

    def batches(self) -> list[Batch]:
        """The whole batches, one a step, the same on every rank."""
        inputs, targets = DATA[self.data].load()
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


def replicas(
    task: Task, watch: Watch, model: nn.Module, optimizer: Any, holds: Any = None
) -> State:
    """Train replicas of a model, each on its rows of each batch, as anybody writes it.

    holds: what has the optimizer's states, if that is another one inside of it.
    Lesson: real_tools."""
    for batch in task.batches():
        inputs, targets = task.share(batch)
        with watch.step(model, holds or optimizer):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        watch.loss(loss)
    return bare(model.state_dict())


def bare(state: Mapping[str, torch.Tensor]) -> State:
    """By the names that the bare model has: without those of wrappers. Lesson: real_tools."""
    found = {}
    for name, tensor in state.items():
        for prefix in PREFIXES:
            name = name.replace(prefix, "")
        found[name] = tensor.detach()
    return found
