"""What scripts do besides: hooks, gradients that are removed, parts that are frozen or added.

Each is done to the strategy's model and to that of one process.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DATA = ["ddp", "zero1", "zero2"]
UNITS = ["fsdp", "fully_shard"]
OWN = ("mlp", "lstm", "llama")  # models of `random_models`, which have a method
ALL = [*DATA, *UNITS, "pipeline", "tensor", "mixed"]


def double(run: Any, _: int) -> None:
    """A hook of a gradient."""
    for parameter in run.chosen():
        parameter.register_hook(lambda gradient: 2 * gradient)


def leave_nothing(run: Any, _: int) -> None:
    """A hook that comes after a gradient has been added up."""

    def hook(parameter: Any) -> None:
        parameter.grad.zero_()

    for parameter in run.chosen():
        parameter.register_post_accumulate_grad_hook(hook)


def remove(run: Any, _: int) -> None:
    """So the optimizer passes over it, and nothing of it is clipped."""
    for parameter in run.chosen():
        parameter.grad = None


def freeze(run: Any, step: int) -> None:
    """For one step, after the strategy has taken it to train."""
    for parameter in run.chosen():
        parameter.requires_grad_(step != 1)


def add(run: Any, step: int) -> None:
    """Another layer, after the strategy has taken those that it trains."""
    if step == 1:
        torch.manual_seed(run.trial.number)
        run.add(nn.Linear(10, 10).double())


def by_a_method(run: Any, inputs: torch.Tensor) -> torch.Tensor:
    """A method of the module, by way of the wrapper: it is refused, or right."""
    with suppress(RuntimeError):
        if hasattr(run.model, "predict"):
            return run.model.predict(inputs)
    return run.model(inputs)


def twice(run: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Two forward passes for one backward pass."""
    return torch.cat([run.model(part) for part in inputs.chunk(2)])


def adversarial(run: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Gradients of the inputs, between a forward pass and its backward pass, weigh the rows."""
    x = inputs.clone().requires_grad_()
    outputs = run.model(inputs)
    (gradient,) = torch.autograd.grad(run.model(x).sum(), x)
    return outputs * (1 + gradient.sum(1, keepdim=True))


def nothing(*_: Any) -> None:
    """`strategies` sees to it."""


@dataclass(frozen=True)
class Habit:
    """when: "wrapped", once; "step", before each; "outputs", in place of the forward pass;
    "gradients", before they are clipped. models: none named are all."""

    when: str
    do: Callable[[Any, Any], Any]
    strategies: list[str]
    models: tuple[str, ...] = ()


HABITS = {
    "none": Habit("", nothing, ALL),
    "a hook of a gradient": Habit("wrapped", double, [*DATA, "pipeline", "tensor"]),
    "a hook after a gradient": Habit("wrapped", leave_nothing, ALL[3:]),
    "a gradient is removed": Habit("gradients", remove, ALL),
    "frozen for a step": Habit("step", freeze, ALL),
    "a layer is added": Habit("step", add, DATA, ("mlp",)),
    "a method computes": Habit("outputs", by_a_method, [*DATA, "tensor"], OWN),
    "two forward passes": Habit("outputs", twice, [*DATA, *UNITS, "tensor"], (*OWN, "transformer")),
    "gradients of inputs": Habit("outputs", adversarial, [*DATA, *UNITS], ("mlp", "lstm")),
    "two wrappers": Habit("", nothing, [*DATA, "fsdp"], ("mlp",)),
}


def fitting(strategy: str, model: str) -> list[str]:
    """The habits that can be had with these."""
    return [
        name
        for name, habit in HABITS.items()
        if strategy in habit.strategies and model in (habit.models or (model,))
    ]
