"""Lesson: collectives. The nine collectives, made of nothing but send and receive.

    md.collectives.all_reduce(tensor, op=dist.ReduceOp.SUM, algorithm="ring")

They take what the functions of the same name in torch.distributed take, except `async_op`, and
leave the same results in the same places. To read: `algorithms` (the loops), then `cost` (what
they cost), `peers` (messages), `calls` (a table of what each rank passes), `agreement` (why a wrong
call raises instead of hanging).

All of them accept, as torch's:
- tensors of any dtype and shape, of no elements too, contiguous or strided, but dense; a tensor
  that is written to must not be expanded;
- `group`, None for all ranks. Roots (`src`, `dst`) count in the whole world, `group_src` and
  `group_dst` within the group;
- reductions SUM, PRODUCT, MIN and MAX; AVG of floating and complex numbers; BAND, BOR and BXOR of
  integers and bool. On complex numbers SUM, PRODUCT and AVG only.

All of them raise ValueError, on every rank of the group and with the same text, if any rank's call
is wrong or differs from the others': nobody waits for ever. A rank outside the group gets a
ValueError of its own, without the others noticing. After a reduction with one result for all,
all ranks hold the same bits.

In the costs, p is the number of ranks, n the bytes of the whole vector, α the latency of a message
and β the seconds a byte; see `cost`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.collectives.calls import run
from minidist.collectives.cost import ALGORITHMS, Cost, cost, sent, total

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
    "total",
]

Group = dist.ProcessGroup | None
Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    *,
    algorithm: str = "tree",
) -> None:
    """Copy `tensor` of rank `src` into `tensor` of every rank, in place. Lesson: collectives.

    The shape and dtype are the same on every rank. Give either `src` or `group_src`.

    algorithm: "flat", the root sends to one after another: (p-1)(α + nβ); "tree", binomial, who
    has it passes it on: ⌈lg p⌉(α + nβ) (Thakur et al. 2005).
    """
    run("broadcast", group, tensor, root=(src, group_src), algorithm=algorithm)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = dist.ReduceOp.SUM,
    group: Group = None,
    group_dst: int | None = None,
    *,
    algorithm: str = "tree",
) -> None:
    """Combine the ranks' `tensor` by `op` into `tensor` of rank `dst`, in place.

    The shape and dtype are the same on every rank. On ranks other than `dst`, `tensor` keeps its
    values (torch leaves them open). Give either `dst` or `group_dst`.

    algorithm: "flat", the root takes from one after another: (p-1)(α + nβ); "tree", binomial:
    ⌈lg p⌉(α + nβ) (Thakur et al. 2005).
    Lesson: collectives.
    """
    run("reduce", group, tensor, root=(dst, group_dst), op=op, algorithm=algorithm)


def all_reduce(
    tensor: torch.Tensor,
    op: Op = dist.ReduceOp.SUM,
    group: Group = None,
    *,
    algorithm: str = "ring",
) -> None:
    """Combine the ranks' `tensor` by `op` into `tensor` of every rank, in place.

    The shape and dtype are the same on every rank, and so are the bits of the result.

    algorithm:
    - "ring": 2(p-1)α + 2(p-1)/p nβ, the fewest bytes that are possible (Patarasuk and Yuan 2009);
    - "naive": rank 0 gathers, then sends to one after another: 2(p-1)(α + nβ);
    - "tree": reduce to rank 0, then broadcast: 2⌈lg p⌉(α + nβ) (Thakur et al. 2005);
    - "recursive_doubling": lg p (α + nβ), the fewest messages (Thakur et al. 2005);
    - "halving_doubling": 2 lg p α + 2(p-1)/p nβ (Rabenseifner 2004).
    The last two cost 2(α + nβ) more where p is not a power of two.
    Lesson: collectives.
    """
    run("all_reduce", group, tensor, op=op, algorithm=algorithm)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Copy `scatter_list[i]` of rank `src` into `tensor` of the group's rank i.

    All tensors have one shape and dtype. `scatter_list` is for the root only, one tensor a rank.
    The root is rank 0 of the world unless `src` or `group_src` says otherwise.

    The root sends to one after another: (p-1)α + (p-1)/p nβ. Lesson: collectives.
    """
    run("scatter", group, tensor, scatter_list, root=(src, group_src))


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Copy `tensor` of the group's rank i into `gather_list[i]` of rank `dst`. Lesson: collectives.

    All tensors have one shape and dtype. `gather_list` is for the root only, one tensor a rank.
    The root is rank 0 of the world unless `dst` or `group_dst` says otherwise.

    The root takes from one after another: (p-1)α + (p-1)/p nβ.
    """
    run("gather", group, tensor, gather_list, root=(dst, group_dst))


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Group = None
) -> None:
    """Copy `tensor` of the group's rank i into `tensor_list[i]` of every rank. Lesson: collectives.

    The tensors of the ranks may differ in shape, as `tensor_list` says, alike on every rank; their
    dtype is one.

    In a ring: (p-1)α + (p-1)/p nβ (Thakur et al. 2005).
    """
    run("all_gather", group, tensor, tensor_list)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Op = dist.ReduceOp.SUM,
    group: Group = None,
) -> None:
    """Combine the ranks' `input_list[i]` by `op` into `output` of the group's rank i.

    The tensors of a list may differ in shape, but the lists of all ranks are alike, and `output`
    of rank i is like `input_list[i]`. Their dtype is one. The inputs keep their values.

    In a ring: (p-1)α + (p-1)/p nβ (Patarasuk and Yuan 2009). Lesson: collectives.
    """
    run("reduce_scatter", group, output, input_list, op=op)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
) -> None:
    """Copy `input_tensor_list[j]` of rank i into `output_tensor_list[i]` of rank j, for all ranks i
    and j of the group: a transposition. Lesson: collectives.

    Every pair may have a shape of its own, the same at both ends; the dtype is one.

    In p-1 steps, at each of which every rank sends one message and receives one:
    (p-1)α + (p-1)/p nβ (Thakur et al. 2005).
    """
    run("all_to_all", group, output_tensor_list, input_tensor_list)


def barrier(group: Group = None) -> None:
    """Return only when every rank of the group has called it. Lesson: collectives.

    By dissemination: ⌈lg p⌉ messages of one byte, α each (Hensgen, Finkel and Manber 1988).
    """
    run("barrier", group)
