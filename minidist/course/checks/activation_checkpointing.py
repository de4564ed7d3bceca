"""The puzzles and the exercise of the lesson activation_checkpointing."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minidist.course.checks.verdict import check, function, puzzle, require_right, same, shown
from minidist.course.zoo import Block
from minidist.instruments.measure import MemoryTracker, count_flops

ROOM = 9.5  # what a selective block may keep, in sizes of its input


one_each = puzzle(__name__, "one_each")
wrapped_twice = puzzle(__name__, "wrapped_twice")


@check
def selective(answer: object) -> None:
    """A block that keeps at most 9.5 inputs' worth, and does no matrix product twice."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(selective: Callable[..., Any]) -> str:
    """What is wrong, if anything."""
    torch.manual_seed(0)
    for width, heads, rows in (64, 4, 8), (32, 2, 16):
        block = Block(width, heads).double()
        plain = copy.deepcopy(block)  # the answer may replace parts of the block
        names = dict(block.named_parameters())
        module = selective(block)
        if not callable(module) or isinstance(module, type):
            return f"selective(block) returns {shown(module)}, not a module"
        x = torch.randn(rows, 32, width, dtype=torch.float64)
        y = module(x.clone().requires_grad_())
        if not isinstance(y, torch.Tensor):
            return f"the module returns {shown(y)}, not a tensor"
        if not y.requires_grad:
            return "the output has no gradient: autograd has lost x"
        del y
        wanted, _, plain_flops = _measured(plain, plain, dict(plain.named_parameters()), x)
        found, kept, flops = _measured(block, module, names, x)
        if wrong := _differs(found, wanted):
            return wrong
        if kept > ROOM:
            return f"it keeps {kept:.1f} times its input for backward, and may keep {ROOM:g} times"
        if flops > plain_flops:
            more = flops / plain_flops - 1
            where = "in matrix products and attention"
            return f"it keeps little enough, but has {more:.0%} more arithmetic {where}"
    return ""


def _differs(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    for name, right in wanted.items():
        if not same(found[name], right):
            missing = found[name] is None
            return f"{name} is {'missing' if missing else 'not that of the block'}"
    return ""


def _measured(
    block: nn.Module,
    module: Callable[..., Any],
    parameters: dict[str, nn.Parameter],
    x: torch.Tensor,
) -> tuple[dict[str, Any], float, int]:
    """The output and all gradients; what is kept for backward, in sizes of x; the arithmetic."""
    inputs, again = (x.clone().requires_grad_() for _ in range(2))
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    with MemoryTracker(block) as memory:
        y = module(inputs)
        y.backward(weights)
    backward = next(phase for phase in memory.phases if phase.name == "backward")
    live = {name: nbytes[backward.start] for name, nbytes in memory.history.items()}
    kept = sum(live.values()) - live["parameters"] - y.nbytes
    results = {"the output": y.detach(), "the gradient of x": inputs.grad}
    for name, parameter in parameters.items():
        results[f"the gradient of {name}"] = parameter.grad
    block.zero_grad()  # to None: what has been found stays
    return results, kept / x.nbytes, count_flops(lambda: module(again).backward(weights))
