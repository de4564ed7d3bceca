"""The puzzles and the exercise of the lesson fully_sharded."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.units_in_a_row import trains_otherwise
from minidist.course.checks.verdict import NotYet, check, puzzle, require_right, shown
from minidist.course.zoo import Block, mlp
from minidist.instruments.measure.storages import Ledger

peak = puzzle(__name__, "peak")
accumulated = puzzle(__name__, "accumulated")


@check
def unit(answer: object) -> None:
    """A unit around any module: a shard in memory, all of it only while it computes."""
    if not callable(answer):
        raise NotYet(f"give the class itself, not {shown(answer)}.")
    require_right(_trial, answer, world_size=3, of_rank=": ")


def _block() -> nn.Module:
    torch.manual_seed(0)
    return Block(32, 2).double()


def _mlp() -> nn.Module:
    return mlp(32, 90, 33, 32, dtype=torch.float64)


def _trial(unit: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything."""
    gc.freeze()  # what is there now is no garbage: so to look for garbage is quick
    for make in (_block, _mlp):
        alone, data = make(), torch.randn(4, 6, 2, 32, dtype=torch.float64)
        with Ledger(torch.device("cpu")) as ledger:
            module = unit(make())
            wrong = (
                _holds_more(module, alone, ledger)
                or trains_otherwise(module, alone, data)
                or _keeps(module, alone, data[0], ledger)
            )
        if wrong:
            return wrong
    return ""


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _share(module: nn.Module) -> int:
    """The most elements of it that a rank may have, if whole rows are dealt out."""
    size = dist.get_world_size()
    return sum(-(-len(p) // size) * p[0].numel() for p in module.parameters())


def _live(ledger: Ledger) -> int:
    """Bytes of all tensors that were made since it began, and are still there."""
    gc.collect()
    return ledger.live()


def _holds_more(module: Any, alone: nn.Module, ledger: Ledger) -> str:
    if not isinstance(module, nn.Module):
        return f"the unit is {shown(module)}, not an nn.Module"
    most = _share(alone)
    of = f"more than this rank's part of all {_numel(alone):,}"
    held = sum(getattr(p, "_local_tensor", p).numel() for p in module.parameters())
    if not held:
        return "its parameters() are empty: an optimizer would have nothing to train"
    if held > most:
        return f"its parameters() have {held:,} elements, {of}"
    if (there := _live(ledger) // 8) > most + 200:
        return f"after wrapping, {there:,} numbers are still in memory, {of}"
    return ""


def _keeps(module: nn.Module, alone: nn.Module, x: torch.Tensor, ledger: Ledger) -> str:
    """Whether it still has full parameters between steps, after forward, or after backward."""
    full, share, live = 8 * _numel(alone), 8 * _share(alone), []
    for each in alone, module:
        for both in alone, module:
            both.zero_grad(set_to_none=True)
        live.append(_live(ledger) - share)
        y = each(x)
        live.append(_live(ledger) - share)
        y.square().mean().backward()
        del y
    idle, plain, _, kept = live
    for when, more in {
        "between two steps": idle,
        "after forward": kept - plain,
        "after backward": _live(ledger) - 2 * share,
    }.items():
        if more > 0.4 * full:
            return (
                f"{when} {more / full:.0%} of the full parameters are in memory, beside the "
                "shard: free them, also those that autograd has saved"
            )
    return ""
