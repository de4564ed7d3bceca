"""Lesson: collectives. The nine collectives, made of nothing but send and receive.

    md.collectives.all_reduce(tensor, op=dist.ReduceOp.SUM, algorithm="ring")

They take what the functions of the same name in torch.distributed take, except `async_op` and the
root's rank within a group, and leave the same results in the same places. To read: `nine` (the
functions), `algorithms` (the loops), then `cost` (what they cost), `peers` (messages), `calls` (a
table of what each rank passes; why a wrong call raises instead of hanging), `reduce_op` (what SUM
and the others mean).

Roots (`src`, `dst`) count in the whole world. After a reduction with one result for all, all ranks
hold the same bits. If any rank's call is wrong, or differs from the others', all ranks of the group
raise the same ValueError. A rank outside the group gets one of its own.

Limits: tensors are dense, and one that is written to is not expanded: torch says so, on the rank
that has it. A list on another rank than the root is not looked at. gloo sends nothing from a GPU's
memory, and ends the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minidist.collectives.cost import ALGORITHMS, Cost, cost, sent, total

if TYPE_CHECKING:
    from minidist.collectives.nine import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
        sent_as_rings,
    )

__all__ = [
    "ALGORITHMS",
    "Cost",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "cost",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sent",
    "sent_as_rings",
    "total",
]


def __getattr__(name: str) -> Any:
    # On first use: `cost` is there without torch, too, as in a browser.
    if name in __all__:
        return getattr(import_module("minidist.collectives.nine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
