"""A museum of silent bugs. The notebook beside this file is the way in.

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

import base64
import hashlib
import json
import runpy
import sys
import textwrap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.checks.verdict import Verdict

HERE = Path(__file__).resolve().parent
ROWS = 16  # examples of a rank in a step
STEPS = 80  # of a loss curve
IGNORE = -100
TOOLS = "watch", "parity", "hashes", "bytes", "memory", "curve"
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
    """Rank 1's rows have a label each fifth time, and one at least."""
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
    return str(next((HERE / "exhibits").glob(f"{exhibit:02}_*.py")))


def load(exhibit: int | str) -> Any:
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    names = runpy.run_path(path_of(exhibit))
    return SimpleNamespace(**{**USUAL, **names, "title": names["__doc__"].split("\n")[0]})


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
    )
    try:
        for step in range(6):
            micro_batches = run.micro_batches(step)
            with watch(micro_batches):
                run.step(micro_batches)
            if run.exhibit.EPOCH and (step + 1) * 2 * ROWS % run.exhibit.EPOCH == 0:
                watch.end_of_epoch(run.exhibit.EPOCH)
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
    """The parameters of which all ranks have the same bytes."""
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
    return getattr(__import__("museum"), name)(*args)


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


def whole(model):
    """All of each parameter, also where ranks have shards."""
    found = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in found.items()}


def alone(exhibit, parameters):
    """The optimizer of the one process, which clips as the exhibit does."""
    shown = load(exhibit)
    parameters = list(parameters)
    optimizer = shown.optimizer(shown.groups(parameters))
    shown.alone(optimizer)
    if shown.CLIP:
        clip = partial(nn.utils.clip_grad_norm_, parameters, shown.CLIP)
        optimizer.register_step_pre_hook(lambda *_: clip() and None)
    return optimizer


# ---- in the notebook -----------------------------------------------------------------------------


def parity_says(ranks, exhibit: int | str, form: str) -> str:
    shown = load(exhibit)
    if not shown.PARITY:
        return ""
    images, labels = md.zoo.digits(torch.float64)
    try:
        md.parity.check(
            partial(on_a_rank, "parity_wrap", exhibit, form),
            model=shown.model,
            optimizer=partial(on_a_rank, "alone", exhibit),
            step=partial(on_a_rank, "parity_step", exhibit, form),
            loss_fn=partial(F.cross_entropy, ignore_index=IGNORE),
            data=(images, shown.labels(labels)),
            weights=partial(on_a_rank, "whole"),
            ranks=ranks,
        )
    except md.parity.ParityError as error:
        return str(error)
    return ""


def reading(ranks, exhibit: int | str, form: str, tool: str) -> Any:
    """What a tool says of an exhibit. For bytes and memory: of both ranks together."""
    if tool == "parity":
        return parity_says(ranks, exhibit, form)
    if tool == "watch":
        return ranks(on_a_rank, "watch_says", exhibit, form)[0]
    if tool == "bytes":
        return sum(each["bytes"] for each in _readings(ranks, exhibit, form))
    if tool == "memory":
        held = [each["memory"] for each in _readings(ranks, exhibit, form)]
        return [sum(of_ranks) for of_ranks in zip(*held, strict=True)]
    return _readings(ranks, exhibit, form)[0][tool]


def _readings(ranks, exhibit: int | str, form: str) -> Any:
    return _run(ranks, path_of(exhibit), form, Path(path_of(exhibit)).read_text())


@cache
def _run(ranks, path: str, form: str, text: str) -> Any:
    """One run for four tools, and another one when the file has changed."""
    return ranks(on_a_rank, "readings", path, form, STEPS)


def hunt(ranks, exhibit: int | str, tool: str, form: str = "WRONG") -> None:
    """Print what a tool says."""
    if tool not in TOOLS:
        raise ValueError(f"the tools are {', '.join(TOOLS)}, not {tool!r}")
    read = reading(ranks, exhibit, form, tool)
    if tool == "hashes":
        read = f"on both ranks the same: {', '.join(read) or 'nothing'}"
    elif tool == "bytes":
        read = f"{read:,} handed to collectives or sent in step 4"
    elif tool == "memory":
        read = f"{', '.join(f'{held:,}' for held in read)} held after steps 1, 2, 3"
    elif tool == "curve":
        read = f"loss {read[0]:.3f} at step 1, {read[-1]:.3f} at step {STEPS}"
    print(textwrap.fill(f"{tool:7} {read or '(silent)'}", 98, subsequent_indent=" " * 8))


def seen_by(ranks, exhibit: int | str) -> list[str]:
    """The tools that tell the wrong form: the watch and parity if they say something, the others if
    they read something else off the right one."""

    def sees(tool: str) -> bool:
        wrong = reading(ranks, exhibit, "WRONG", tool)
        return bool(wrong if tool in ("watch", "parity") else wrong != right(tool))

    def right(tool: str) -> Any:
        return reading(ranks, exhibit, "RIGHT", tool)

    return [tool for tool in TOOLS[:-1] if sees(tool)]


def mark(exhibit: int | str, tool: str, seen: list[str]) -> str:
    """For a table: whether it sees the bug, and – if it cannot be asked."""
    if tool == "parity" and not load(exhibit).PARITY:
        return "–"
    return "×" if tool in seen else "·"


def show(exhibit: int | str) -> None:
    """Print an exhibit, with the numbers of its lines."""
    for number, line in enumerate(Path(path_of(exhibit)).read_text().splitlines(), start=1):
        print(f"{number:2}  {line}".rstrip())


def open(exhibit: int, line: int | None) -> Verdict:
    """Open a sealed exhibit with the number of the line that is wrong."""
    for seal in json.loads((HERE / "sealed.json").read_text())[str(exhibit)]:
        said = unseal(base64.b64decode(seal), exhibit, line)
        if said.startswith(b"Right: "):
            return Verdict(True, said.decode())
    return Verdict(False, f"Not yet: line {line} is not it." if line else "Not yet.")


def unseal(text: bytes, exhibit: int, line: int | None) -> bytes:
    """It seals, too. The salt makes a table of hashes useless, if not a loop over all lines."""
    salted = f"a museum of silent bugs, {exhibit}, {line}".encode()
    key = hashlib.pbkdf2_hmac("sha256", salted, b"minidist", 10_000, len(text))
    return bytes(a ^ b for a, b in zip(text, key, strict=True))


def gallery(ranks, exhibits) -> None:
    """Draw the loss of each exhibit, and that of its right form."""
    import matplotlib.pyplot as plt  # not on each rank

    figure, axes = plt.subplots(4, 5, figsize=(11, 7.5), sharex=True, layout="constrained")
    for exhibit, axis in zip(exhibits, axes.flat, strict=True):
        for form, style in ("RIGHT", "C0-"), ("WRONG", "C1--"):
            axis.plot(reading(ranks, exhibit, form, "curve"), style, label=form.lower())
        axis.set(ylim=(0, 3.5))
        axis.set_title(f"{exhibit} {load(exhibit).title}", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("step")
    figure.supylabel("loss")
    plt.show()
