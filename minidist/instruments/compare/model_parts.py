"""What systems must know of a model: its blocks, and its layers as a sequence."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import minidist as md


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the largest nn.Sequential or nn.ModuleList in the model that have parameters.
    None of them, if there is no such list."""
    lists = [m for m in model.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
    sizes = [sum(p.numel() for p in each.parameters()) for each in lists]
    layers = lists[sizes.index(max(sizes))].children() if lists else ()
    return [layer for layer in layers if any(True for _ in layer.parameters())]


def policy(model: nn.Module) -> Callable[..., bool]:
    """For a fully sharded model: each block is a unit."""
    chosen = set(blocks(model))
    return partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in chosen)


def checkpoint(model: nn.Module) -> None:
    """Each block keeps its inputs alone."""
    names = {module: name for name, module in model.named_modules()}
    for block in blocks(model):
        model.set_submodule(names[block], md.checkpoint_wrapper(block))


def sequence(model: Any) -> nn.Sequential:
    """Its layers, one after another, as a pipeline cuts them."""
    layers: nn.Sequential = model if isinstance(model, nn.Sequential) else model.sequential()
    return layers


def by_model_names(
    model: nn.Module, layers: nn.Module, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a state has by the names of `sequence(model)`, by those of the model itself."""
    own = dict(layers.named_parameters(remove_duplicate=False))
    found = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    named = model.named_parameters(remove_duplicate=False)  # one that is tied has several
    return {name: found[id(p)] for name, p in named if id(p) in found}
