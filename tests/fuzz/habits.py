"""What scripts do besides: hooks, gradients that are removed, parts that are frozen.

Each is done to the strategy's model and to that of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DATA = ["ddp", "zero1", "zero2"]
UNITS = ["fsdp", "fully_shard"]
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
    """No habit."""


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
    "two forward passes": Habit(
        "outputs", twice, [*DATA, *UNITS, "tensor"], ("mlp", "lstm", "transformer", "llama")
    ),
    "gradients of inputs": Habit("outputs", adversarial, [*DATA, *UNITS], ("mlp", "lstm")),
}


def fitting(strategy: str, model: str) -> list[str]:
    """The habits that can be had with these."""
    return [
        name
        for name, habit in HABITS.items()
        if strategy in habit.strategies and model in (habit.models or (model,))
    ]
