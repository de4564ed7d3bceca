"""Random trainings, each held against one process: `python -m minidist fuzz --minutes 10`.

A trial is drawn from its number alone: a model, a strategy and its options, an optimizer, a loop.
Every rank trains by the strategy and, beside it, alone on the whole batch; after each step the
weights and the losses must be equal. A number that failed fails again: `--first 123 --trials 1`.
"""

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import minidist as md
from minidist.fully_sharded import by_class, by_size
from minidist.parity import cross_entropy
from minidist.parity.snapshot import differences
from minidist.runtime import Pool
from minidist.tensor_parallel import vocab_parallel_cross_entropy

TOLERANCE = 1e-9  # relative, of float64: Adam divides by gradients that may be tiny
STEPS = 3
Options = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What is trained, and how. `options` are those of the strategy."""

    number: int
    world_size: int
    backend: str
    model: str
    strategy: str
    optimizer: str
    batch: int  # examples of a rank, for each backward pass
    passes: int  # backward passes a step
    clip: float | None
    options: Options = field(default_factory=dict)


class Recurrent(nn.Module):
    """An LSTM over the rows of a digit: (B, 64) to (B, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 64) to (B, 10)."""
        return self.head(self.lstm(x.unflatten(1, (8, 8)))[0][:, -1])


def mlp(chance: random.Random) -> nn.Sequential:
    """Of any depth, also with layers that are tied, frozen, normalized, or without bias."""
    width = chance.choice([5, 8, 16])
    layers: list[nn.Module] = [nn.Linear(64, width), nn.Tanh()]
    for _ in range(chance.randint(2, 5)):
        layers.append(nn.Linear(width, width, bias=chance.random() < 0.7))
        layers.append(chance.choice([nn.Tanh(), nn.GELU(), nn.LayerNorm(width)]))
    hidden = [layer for layer in layers[2:] if isinstance(layer, nn.Linear)]
    if chance.random() < 0.3:
        hidden[0].weight = hidden[-1].weight
    if chance.random() < 0.3:
        chance.choice(hidden).requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(width, 10))


def transformer(chance: random.Random) -> md.zoo.Transformer:
    """Two heads, or four."""
    heads = chance.choice([2, 4])
    return md.zoo.Transformer(
        64, length=8, width=4 * heads, heads=heads, layers=chance.randint(1, 3)
    )


MODELS: dict[str, Callable[[random.Random], nn.Module]] = {
    "mlp": mlp,
    "recurrent": lambda chance: Recurrent(chance.choice([4, 7])),
    "transformer": transformer,
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Options]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
}


def of_data(chance: random.Random) -> Options:
    return {
        "bucket_cap_mb": chance.choice([1e-4, 1e-3, 25]),
        "find_unused_parameters": chance.random() < 0.3,
    }


def of_units(chance: random.Random) -> Options:
    return {
        "units": chance.choice(["none", "by class", "by size"]),
        "reshard_after_forward": chance.random() < 0.6,
        "prefetch": chance.random() < 0.7,
        "hybrid": chance.random() < 0.3,
    }


def of_stages(chance: random.Random) -> Options:
    return {
        "schedule": chance.choice(["gpipe", "1f1b", "zero_bubble"]),
        "microbatches": chance.choice([1, 2, 4]),
        "recompute": chance.random() < 0.3,
    }


STRATEGIES: dict[str, Callable[[random.Random], Options]] = {
    "ddp": of_data,
    "zero1": of_data,
    "zero2": lambda chance: {},
    "fsdp": of_units,
    "pipeline": of_stages,
    "tensor": lambda chance: {"sequence_parallel": chance.random() < 0.4},
}


def draw(number: int) -> Trial:
    """The trial of this number."""
    chance = random.Random(number)
    strategy = chance.choice(list(STRATEGIES))
    split = strategy in ("pipeline", "tensor")
    model = {"pipeline": "mlp", "tensor": "transformer"}.get(strategy, chance.choice([*MODELS]))
    return Trial(
        number,
        world_size=chance.choice([2, 4] if strategy == "tensor" else [2, 3, 4]),
        backend=chance.choice(["gloo", "shm"]),
        model=model,
        strategy=strategy,
        optimizer=chance.choice(list(OPTIMIZERS)),
        batch=4 if split else chance.randint(1, 4),
        passes=1 if split else chance.choice([1, 1, 2, 3]),
        clip=chance.choice([None, 0.1, 1.0]),
        options=STRATEGIES[strategy](chance),
    )


# ---- on a rank --------------------------------------------------------------------------------


def make(trial: Trial) -> nn.Module:
    """The trial's model, in float64."""
    torch.manual_seed(trial.number)
    chance = random.Random(trial.number)
    if trial.strategy == "tensor":  # heads that all ranks can share
        return md.zoo.Transformer(64, length=8, width=16, heads=4, layers=2).double()
    return MODELS[trial.model](chance).double()


def wrap(trial: Trial, module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    """The model that is trained by the strategy, and its optimizer."""
    options, (kind, rates) = dict(trial.options), OPTIMIZERS[trial.optimizer]
    if trial.strategy == "zero1":
        sharded = md.ZeroRedundancyOptimizer(module.parameters(), kind, **rates)
        return md.DistributedDataParallel(module, **options), sharded
    if trial.strategy == "zero2":
        sharded = md.ZeroRedundancyOptimizer(module.parameters(), kind, **rates)
        return md.ShardedDataParallel(module, sharded), sharded
    if trial.strategy == "fsdp":
        tied = len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)])
        policy = {"none": None, "by class": by_class(nn.Linear), "by size": by_size(100)}
        units = policy[options.pop("units")]
        options["auto_wrap_policy"] = None if tied else units  # ties stay within a unit
        if options.pop("hybrid") and trial.world_size == 4:
            options["device_mesh"] = dist.init_device_mesh("cpu", (2, 2))
        model: Any = md.FullyShardedDataParallel(module, **options)
    elif trial.strategy == "pipeline":
        model = md.Pipeline(module, **options)  # type: ignore[arg-type]
    elif trial.strategy == "tensor":
        model = md.tensor_parallel.parallelize(module, **options)
    else:
        model = md.DistributedDataParallel(module, **options)
    return model, kind(model.parameters(), **rates)


def train(trial: Trial, model: Any, optimizer: Any, batches: list[Any], alone: bool) -> float:
    """A step of one backward pass for each batch. Returns the mean loss of this rank."""
    optimizer.zero_grad()
    split = trial.strategy == "tensor" and not alone  # each rank has some of the logits
    loss_of = vocab_parallel_cross_entropy if split else cross_entropy
    losses = []
    for number, (inputs, targets) in enumerate(batches, start=1):
        if trial.strategy == "pipeline" and not alone:
            losses.append(model.train_step(inputs, targets, cross_entropy).item())
            continue
        waits = number < len(batches) and hasattr(model, "no_sync")
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = loss_of(model(inputs), targets)
            (loss / len(batches)).backward()
        losses.append(loss.item())
    if trial.clip is not None:
        if trial.strategy == "tensor" and not alone:
            md.tensor_parallel.clip_grad_norm_(model, trial.clip)
        elif hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(trial.clip)
        else:
            clip_grad_norm_(model.parameters(), trial.clip)
    optimizer.step()
    return sum(losses) / len(losses)


def whole(trial: Trial, model: Any) -> dict[str, torch.Tensor]:
    """The weights of the whole model, on every rank."""
    if trial.strategy == "tensor":
        return md.tensor_parallel.full_state_dict(model)
    state: dict[str, torch.Tensor]
    state = model.full_state_dict() if trial.strategy == "pipeline" else model.state_dict()
    return state


def data(trial: Trial, step: int, passes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batch of each backward pass: examples of all ranks."""
    generator = torch.Generator().manual_seed(1000 * trial.number + step)
    size = trial.batch * trial.world_size
    for _ in range(passes):
        if trial.model == "transformer":
            tokens = torch.randint(64, (size, 9), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            x = torch.randn(size, 64, generator=generator, dtype=torch.float64)
            yield x, torch.randint(10, (size,), generator=generator)


def on_a_rank(trial: Trial) -> str:
    """Words for the first difference, or none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = slice(None) if trial.strategy in ("pipeline", "tensor") else slice(rank, None, size)
    bare = make(trial)
    model, optimizer = wrap(trial, make(trial))
    kind, rates = OPTIMIZERS[trial.optimizer]
    plain = kind(bare.parameters(), **rates)
    for step in range(STEPS):
        batches = list(data(trial, step, trial.passes))
        wanted = train(trial, bare, plain, batches, alone=True)
        mine = [(inputs[share], targets[share]) for inputs, targets in batches]
        loss = torch.zeros(1, dtype=torch.float64)
        loss += train(trial, model, optimizer, mine, alone=False)
        dist.all_reduce(loss)
        if not math.isclose(loss.item() / size, wanted, rel_tol=TOLERANCE):
            return f"step {step}: the mean loss is {loss.item() / size}, alone it is {wanted}"
        expected = {name: value.detach() for name, value in bare.state_dict().items()}
        for words, difference in differences(whole(trial, model), expected):
            if not difference <= TOLERANCE:
                return f"step {step}: {words}"
    return ""


# ---- the command ------------------------------------------------------------------------------


def run(minutes: float, first: int = 0, trials: int | None = None) -> list[Trial]:
    """Try numbers from `first` on, for so long or so many. Prints and returns what differs."""
    end, failed, counts = time.monotonic() + 60 * minutes, [], dict.fromkeys(STRATEGIES, 0)
    with contextlib.ExitStack() as stack:
        pools: dict[tuple[int, str], Pool] = {}
        for number in itertools.count(first):
            if number - first == trials or time.monotonic() > end:
                break
            trial = draw(number)
            key = trial.world_size, trial.backend
            if key not in pools:
                pools[key] = stack.enter_context(md.ranks(*key))
            counts[trial.strategy] += 1
            try:
                problem = next(filter(None, pools[key](on_a_rank, trial)), "")
            except md.RankError as error:
                problem = str(error).partition("\n\n")[0]
            if problem:
                failed.append(trial)
                print(f"{trial}\n  {problem}", flush=True)
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{sum(counts.values())} trials ({words}): {len(failed)} differ from one process")
    return failed
