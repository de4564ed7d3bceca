"""A trial: what is trained, and how. Drawn from a number."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fuzz.habits import fitting

Options = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What is trained, and how.

    optimizers: names of `alone.OPTIMIZERS`. If there are two, the first has the matrices.
    batch: rows of a rank, for each backward pass.
    passes: backward passes a step.
    waiting: what those before the last do: "no_sync"; "attribute", as scripts of torch have it; or
        nothing: each reduces its own gradients.
    habit: what the script does besides, of `habits.HABITS`.
    options: those of the strategy.
    evaluation: after each step: "no_grad"; or "inference_mode", which then comes before the first
        step as well; or nothing: all is compared after the last step.
    checkpoint: a folder for one. After the first step all is saved there, made anew and loaded.
    """

    number: int
    world_size: int
    backend: str
    model: str
    strategy: str
    optimizers: tuple[str, ...]
    batch: int
    passes: int
    waiting: str
    clip: float | None
    habit: str = "none"
    options: Options = field(default_factory=dict)
    evaluation: str = "no_grad"
    checkpoint: str = ""


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


def of_units_in_place(chance: random.Random) -> Options:
    return {
        "units": chance.choice(["none", "by class", "by size"]),
        "reshard_after_forward": chance.choice([None, True, False]),
        "hybrid": chance.random() < 0.3,
    }


def of_stages(chance: random.Random) -> Options:
    return {
        "schedule": chance.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
        "microbatches": chance.choice([1, 2, 4]),
        "recompute": chance.random() < 0.3,
    }


def of_features(chance: random.Random) -> Options:
    return {"sequence_parallel": chance.random() < 0.4}


def of_a_mesh(chance: random.Random) -> Options:
    """Two of the three axes, of two ranks each. The names: data, pipeline, tensor."""
    return {
        "mesh": chance.choice([(2, 2, 1), (2, 1, 2), (1, 2, 2)]),
        "shard": chance.choice(["nothing", "states", "units"]),
        **of_stages(chance),
        **of_features(chance),
    }


STRATEGIES: dict[str, Callable[[random.Random], Options]] = {
    "ddp": of_data,
    "zero1": of_data,
    "zero2": lambda chance: {"find_unused_parameters": True},
    "fsdp": of_units,
    "fully_shard": of_units_in_place,
    "pipeline": of_stages,
    "tensor": of_features,
    "mixed": of_a_mesh,
}
MODELS = ["mlp", "lstm", "batch norm", "transformer", "llama"]
# What else than these has no sequence of layers, or no plan of how it is split.
MODELS_OF = {
    "pipeline": ["mlp", "mlp", "batch norm", "transformer", "llama"],
    "tensor": ["transformer", "llama"],
    "mixed": ["transformer", "llama"],
}
SIZES_OF = {"tensor": [2, 4], "mixed": [4]}
OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop"]


def draw(number: int) -> Trial:
    """The trial of this number."""
    chance = random.Random(number)
    strategy = chance.choice(list(STRATEGIES))
    model = chance.choice(MODELS_OF.get(strategy, MODELS))
    world_size = chance.choice(SIZES_OF.get(strategy, [2, 3, 4]))
    options = STRATEGIES[strategy](chance)
    if options.get("schedule") == "interleaved":
        if strategy == "mixed" or model not in ("mlp", "batch norm"):  # those of enough layers
            options["schedule"] = "1f1b"
        else:  # two stages a rank
            world_size = min(world_size, 3)
            options["microbatches"] = world_size * chance.choice([1, 2])
    if options.get("shard") == "units":  # which take no tied model, and no backward in two parts
        model, options["sequence_parallel"] = "llama", False
        options["schedule"] = options["schedule"].replace("zero_bubble", "1f1b")
    counts = [1] if strategy == "zero2" else [1, 1, 2]
    trial = Trial(
        number,
        world_size,
        chance.choice(["gloo", "shm"]),
        model,
        strategy,
        optimizers=tuple(chance.choices(OPTIMIZERS, k=chance.choice(counts))),
        batch=4 if strategy in ("pipeline", "mixed") else chance.randint(1, 4),
        passes=chance.choice([1, 1, 2, 3]),
        waiting=chance.choice(["no_sync", "attribute", "nothing"]),
        clip=chance.choice([None, 0.1, 1.0]),
        options=options,
    )
    habit = chance.choice(fitting(strategy, model))
    if habit == "frozen for a step" and "find_unused_parameters" in options:
        options["find_unused_parameters"] = True
    return replace(trial, habit=habit)
