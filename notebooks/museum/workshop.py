"""What exhibits are made of, and what the tools do with one on a rank.

Each file in `exhibits/` is a bug of a published system, made small: on two ranks it raises nothing,
and trains. It has these names:

    WRONG, RIGHT    what was written, and what was meant: a `Form` each
    SEEN            the tools that see it, and words that they say

and some of these, where it needs another than here:

    MICRO, CLIP     micro-batches of a step; the largest norm
    model, labels   a function that makes the model; one that changes the labels
    optimizer       SGD, if it says nothing; groups, of its parameters
    alone           what else one process does with its optimizer
    SOURCES, EPOCH  the ranks that have rows of their own; the examples of an epoch
    PARITY          whether one process can be trained the same way

A sealed exhibit has WRONG alone.
"""

import hashlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md

HERE = Path(__file__).resolve().parent
ROWS = 16  # examples of a rank in a step
IGNORE = -100
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# ---- what exhibits are made of ---------------------------------------------------------------


def rows(step: int, rank: int) -> torch.Tensor:
    """Which digits this rank takes: every second one."""
    return torch.arange(step * 2 * ROWS, (step + 1) * 2 * ROWS)[rank::2] % 1500


class Form(NamedTuple):
    """wrap(model, make_optimizer) returns the model and its optimizer; step(model, optimizer,
    micro_batches) the loss; rows(step, rank) which digits a rank takes."""

    wrap: Callable[..., Any]
    step: Callable[..., float]
    rows: Callable[[int, int], torch.Tensor] = rows


def mean(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        mean(parameter.grad)


def broadcast(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)


def replicas(model, make_optimizer):
    broadcast(model)
    return model, make_optimizer(model.parameters())


def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, ignore_index=IGNORE)


def train(model, optimizer, micro_batches, average=average) -> float:
    """A step as anybody writes it."""
    optimizer.zero_grad()
    total = 0.0
    for batch in micro_batches:
        loss = loss_of(model, batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
    average(model)
    optimizer.step()
    return total


def mlp() -> nn.Module:
    return md.zoo.mlp(64, 32, 10)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def few_labels(labels: torch.Tensor) -> torch.Tensor:
    """Of rank 1's rows each fifth has a label: three or four in a step."""
    labels = labels.clone()
    keep = torch.arange(len(labels)) % 10 == 1
    labels[1::2][~keep[1::2]] = IGNORE
    return labels


# ---- an exhibit, and a run of it ---------------------------------------------------------------

USUAL = dict(model=mlp, optimizer=sgd, labels=lambda labels: labels, groups=list)
USUAL |= dict(alone=lambda optimizer: None)
USUAL |= dict(MICRO=1, CLIP=None, SOURCES=None, EPOCH=None, PARITY=True, RIGHT=None, SEEN={})


def path_of(exhibit: int | str) -> str:
    """The file of an exhibit, by its number."""
    if isinstance(exhibit, str):
        return exhibit
    found = [*(HERE / "exhibits").glob(f"{exhibit:02}_*.py")]
    if not found:
        raise ValueError(f"there is no exhibit {exhibit}")
    return str(found[0])


def load(exhibit: int | str) -> Any:
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    names = runpy.run_path(path_of(exhibit))
    return SimpleNamespace(
        **{**USUAL, **names, "title": (names["__doc__"] or "Untitled").split("\n")[0]}
    )


class Run:
    """A form of an exhibit, on this rank."""

    def __init__(self, exhibit: int | str, form: str) -> None:
        self.exhibit = load(exhibit)
        self.form: Form = getattr(self.exhibit, form)
        self.images, labels = md.zoo.digits(torch.float64)
        self.labels = self.exhibit.labels(labels)
        torch.manual_seed(1 + dist.get_rank())
        self.model, self.optimizer = self.form.wrap(self.bare(), self.exhibit.optimizer)

    def bare(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.exhibit.model().double()

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pick = self.form.rows(step, dist.get_rank())
        parts = self.images[pick], self.labels[pick]
        return list(zip(*(part.chunk(self.exhibit.MICRO) for part in parts), strict=True))

    def step(self, micro_batches) -> float:
        return self.form.step(self.model, self.optimizer, micro_batches)


# ---- the tools -----------------------------------------------------------------------------------


def watch_says(exhibit: int | str, form: str) -> str:
    """Six steps under the watch."""
    run = Run(exhibit, form)
    watch = md.watch(
        run.model,
        run.optimizer,
        bare=run.bare,
        loss=loss_sum,
        make_optimizer=lambda bare: run.exhibit.optimizer(run.exhibit.groups(bare.parameters())),
        clip=run.exhibit.CLIP,
        sources=run.exhibit.SOURCES,
        examples=run.exhibit.EPOCH,
    )
    try:
        for step in range(6):
            micro_batches = run.micro_batches(step)
            with watch(micro_batches):
                run.step(micro_batches)
            if run.exhibit.EPOCH and (step + 1) * 2 * ROWS % run.exhibit.EPOCH == 0:
                watch.end_of_epoch()
        watch.same()
    except AssertionError as error:
        return str(error)
    return ""


def loss_sum(model, batch):
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs), targets, ignore_index=IGNORE, reduction="sum")
    return loss, int((targets != IGNORE).sum())


def readings(exhibit: int | str, form: str, steps: int) -> dict[str, Any]:
    """What the other tools read off: memory at the ends of steps 1 to 3, hashes then, the bytes of
    step 4, and the losses of all ranks."""
    run, losses = Run(exhibit, form), []
    tracker = md.measure.MemoryTracker(run.model, run.optimizer)
    traffic = md.measure.TrafficCounter()
    with tracker:
        losses += [run.step(run.micro_batches(step)) for step in range(3)]
    same = hashes(run.model)
    with traffic:
        losses.append(run.step(run.micro_batches(3)))
    losses += [run.step(run.micro_batches(step)) for step in range(4, steps)]
    curve = torch.tensor(losses, dtype=torch.float64)
    mean(curve)
    ends = [phase.end for phase in tracker.phases if phase.name == "step"]
    held = [sum(tracker.history[kind][end] for kind in HELD) for end in ends]
    sent = traffic.sent_bytes + sum(nbytes for _, nbytes in traffic.calls.values())
    return {"hashes": same, "bytes": sent, "memory": held, "curve": curve.tolist()}


HELD = "parameters", "buffers", "optimizer states", "gradients", "activations"


def hashes(model: nn.Module) -> list[str]:
    """The tensors of which all ranks have the same bytes: parameters, or shards, and buffers."""
    mine = {}
    for name, tensor in model.state_dict().items():
        tensor = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        mine[name] = hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return [name for name in mine if len({each[name] for each in everyone}) == 1]


# ---- for parity: what is done on a rank, and in the one process ----------------------------------


def on_a_rank(name: str, *args: Any) -> Any:
    """Call a function of this module as each rank imports it."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return getattr(__import__("workshop"), name)(*args)


def parity_wrap(exhibit, form, model):
    torch.manual_seed(1 + dist.get_rank())
    shown = load(exhibit)
    return getattr(shown, form).wrap(model, shown.optimizer)


def parity_step(exhibit, form, model, optimizer, inputs, targets, loss_fn):
    """A rank has the rows that parity gives it, and takes those that the exhibit's loader would."""
    shown, shares = load(exhibit), [None, None]
    dist.all_gather_object(shares, (inputs, targets))
    pick = getattr(shown, form).rows(0, dist.get_rank())
    whole = [torch.stack(parts, 1).flatten(0, 1)[pick] for parts in zip(*shares, strict=True)]
    micro_batches = list(zip(*(part.chunk(shown.MICRO) for part in whole), strict=True))
    loss = getattr(shown, form).step(model, optimizer, micro_batches)
    return torch.tensor(loss, dtype=torch.float64)


def alone(exhibit, parameters):
    """The optimizer of the one process."""
    shown = load(exhibit)
    optimizer = shown.optimizer(shown.groups(parameters))
    shown.alone(optimizer)
    return optimizer
