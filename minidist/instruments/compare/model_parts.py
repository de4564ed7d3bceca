"""What systems must know of a model: its blocks, its layers as a sequence, its plan."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import minidist as md
from minidist.instruments import planner
from minidist.instruments.compare.systems import RefusedError
from minidist.instruments.compare.task import LENGTH, Task


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of the largest nn.Sequential or nn.ModuleList in the model, by name: those that
    have parameters. None of them, if there is no such list."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
    }
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is None:
        return {}
    return {
        f"{largest}.{name}".lstrip("."): child
        for name, child in lists[largest].named_children()
        if any(True for _ in child.parameters())
    }


def policy(model: nn.Module) -> Callable[..., bool]:
    """For a fully sharded model: each block is a unit."""
    chosen = list(blocks(model).values())
    return partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: any(module is each for each in chosen)
    )


def checkpoint(model: nn.Module) -> None:
    """Each block keeps its inputs alone."""
    found = blocks(model)
    if not found:
        raise RefusedError("a model without an nn.Sequential or nn.ModuleList has no blocks")
    for name, block in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, md.checkpoint_wrapper(block))


def sequence(model: nn.Module) -> nn.Sequential:
    """Its layers, one after another, as a pipeline cuts them."""
    if isinstance(model, nn.Sequential):
        return model
    if hasattr(model, "sequential"):
        layers: nn.Sequential = model.sequential()  # type: ignore[operator]
        return layers
    raise RefusedError(
        f"a pipeline cuts an nn.Sequential, or a model whose sequential() gives one, "
        f"not a {type(model).__name__}"
    )


def by_model_names(
    model: nn.Module, layers: nn.Module, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a state has by the names of `sequence(model)`, by those of the model itself."""
    own = dict(layers.named_parameters(remove_duplicate=False))
    found = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    named = model.named_parameters(remove_duplicate=False)  # one that is tied has several
    return {name: found[id(p)] for name, p in named if id(p) in found}


def plan_of(model: nn.Module) -> Mapping[str, Any] | None:
    """How the model is split by features: its own `tensor_plan`, or None for a
    `zoo.Transformer`."""
    plan: Mapping[str, Any] | None = getattr(model, "tensor_plan", None)
    if plan is None and not isinstance(model, md.zoo.Transformer):
        raise RefusedError(
            f"nothing says how a {type(model).__name__} is split by features: give it an "
            "attribute `tensor_plan`, as md.tensor_parallel.parallelize_module takes it"
        )
    return plan


def shape_of(model: nn.Module) -> planner.Transformer | None:
    """What the planner takes for a `zoo.Transformer` of the task, its head not tied; None for any
    other model. The planner's layers have biases of queries, keys and values as well, so that along
    data it plans a little more than there is."""
    if type(model) is not md.zoo.Transformer or hasattr(model, "tensor_plan"):
        return None
    if not len(model.blocks):
        return None
    block: Any = model.blocks[0]
    vocabulary, width = model.tokens.weight.shape
    shape = planner.Transformer(
        len(model.blocks), width, block.heads, LENGTH, vocabulary, tied=False
    )
    biases = 3 * width * shape.layers
    there = sum(parameter.numel() for parameter in model.parameters())
    return shape if there == shape.parameters - biases else None


def layers_in_turn(task: Task) -> planner.Layout:
    """A stage on each rank."""
    ranks, rows = task.world_size, task.rows // task.microbatches
    return planner.Layout(ranks, 1, ranks, micro_batch=rows, micro_batches=task.microbatches)


def features_apart(task: Task) -> planner.Layout:
    """Some features on each rank."""
    return planner.Layout(task.world_size, task.world_size, micro_batch=task.rows)


@contextmanager
def taking() -> Iterator[None]:
    """What is raised in this block says why the model cannot be taken."""
    try:
        yield
    except RefusedError:
        raise
    except (TypeError, ValueError) as error:
        raise RefusedError(str(error)) from error
