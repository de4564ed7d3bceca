"""The conjugate operators: how tensors enter and leave what ranks compute apart.

A tensor lies on the t ranks of a group in one of four ways. Three have DTensor's names:

    Replicate   every rank has the whole x, and does the same with it
    copied      every rank has the whole x, and does something of its own with it
    Shard       rank r has x_r, the r-th of t equal parts along a dimension
    Partial     rank r has a summand, as large as the whole: x = x_0 + ... + x_(t-1)

(For DTensor what is copied is Replicate as well, and only its gradient is Partial.) Each operator
leads from one way to another, and does it by a linear map. For two ranks, I being the identity:

    copy_to_group               Replicate -> copied      identity         [I; I]
    reduce_from_group           Partial -> Replicate     all_reduce       [I  I]

    scatter_to_group            Replicate -> Shard       own part         I
    gather_from_group           Shard -> Replicate       all_gather       I

    gather_from_sequence        Shard -> copied          all_gather       [I; I]
    reduce_scatter_to_sequence  Partial -> Shard         reduce_scatter   [I  I]

The backward pass of a linear map is its transpose, and leads back. So two that stand together are
conjugate: each is the backward pass of the other. The gradient of a copied tensor is Partial (what
the ranks do with x adds up), and that of a Partial one copied; the gradients of Replicate and
Shard are Replicate and Shard as they are.

The last pair does the work of the other two in one message each. An all_reduce is a reduce_scatter
and an all_gather: the pair moves the bytes of one all_reduce.

The first two are f and g of Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; the last
two are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), section 4.2.2. All can be differentiated any number of times.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

Group = dist.ProcessGroup | None  # None: the default group
Map = Callable[..., torch.Tensor]
Result = Callable[[], torch.Tensor]


def copy_to_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: x as it is. Backward: the gradients of all ranks are summed.

    For the input of a layer that is split by features, and for a replicated weight that sees other
    tokens on each rank.
    Lesson: feature_splitting.
    """
    return _Conjugate.apply(x, _identity, all_reduce, group)


def reduce_from_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: the sum of the ranks' x, on every rank. Backward: the gradient as it is.
    Lesson: feature_splitting."""
    return _Conjugate.apply(x, all_reduce, _identity, group)


def scatter_to_group(x: torch.Tensor, dim: int = -1, group: Group = None) -> torch.Tensor:
    """Forward: this rank's part of a Replicate x. Backward: the gradients of all parts are
    gathered.

    Raises ValueError, on every rank, if x cannot be cut along `dim` into equal parts.
    """
    return _Conjugate.apply(x, own_part, all_gather, dim, group)


def gather_from_group(x: torch.Tensor, dim: int = -1, group: Group = None) -> torch.Tensor:
    """Forward: the parts of all ranks, joined along `dim`. Backward: this rank's part of the
    gradient, which must be Replicate."""
    return _Conjugate.apply(x, all_gather, own_part, dim, group)


def gather_from_sequence(x: torch.Tensor, dim: int = -2, group: Group = None) -> torch.Tensor:
    """Forward: the parts of all ranks, joined along `dim`, as copies. Backward: the
    gradients of all ranks are summed, and this rank takes its part. Lesson: sequence_parallel."""
    return _Conjugate.apply(x, all_gather, reduce_scatter, dim, group)


def reduce_scatter_to_sequence(x: torch.Tensor, dim: int = -2, group: Group = None) -> torch.Tensor:
    """Forward: this rank's part, along `dim`, of the sum of the ranks' x. Backward: the gradients
    of all parts are gathered. Lesson: sequence_parallel.

    Raises ValueError, on every rank, if x cannot be cut along `dim` into equal parts.
    """
    return _Conjugate.apply(x, reduce_scatter, all_gather, dim, group)


class _Conjugate(torch.autograd.Function):
    """Apply a linear map, and to the gradient its transpose. where: along which dimension, if it
    has one, and in which group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, transpose: Map, *where: Any) -> Any:
        ctx.rest = transpose, forward, *where  # the transpose of the transpose is the map itself
        return forward(x, *where)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Conjugate.apply(grad, *ctx.rest), *[None] * len(ctx.rest)


# The five maps, without autograd. None writes into its argument.


def _identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.view_as(x)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the ranks."""
    return _begin_all_reduce(x.clone(memory_format=torch.contiguous_format), None, group)()


def own_part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's part of x."""
    return parts(x, dim, group)[dist.get_rank(group)].contiguous()


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The parts of all ranks as one."""
    return _begin_all_gather(x, dim, group)()


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's part of the sum over the ranks."""
    return _begin_reduce_scatter(x, dim, group)()


def parts(x: torch.Tensor, dim: int, group: Group) -> list[torch.Tensor]:
    """x cut into a part for each rank. Raises ValueError if they would not be equal."""
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        raise ValueError(
            f"{size} ranks cannot share a tensor of shape {tuple(x.shape)} evenly along dimension "
            f"{dim}: {x.shape[dim]} is not a multiple of {size}"
        )
    return list(x.chunk(size, dim))


# ---- a linear layer and a message at once -----------------------------------------------------

# Three of the maps, begun: what is returned waits for the result.


def _begin_all_reduce(x: torch.Tensor, _: Any, group: Group) -> Result:
    work = dist.all_reduce(x, group=group, async_op=True)  # into x itself
    return partial(_wait, work, lambda: x)


def _begin_all_gather(x: torch.Tensor, dim: int, group: Group) -> Result:
    size = dist.get_world_size(group)
    whole = x.new_empty(size * x.numel())  # flat, as gloo wants it
    work = dist.all_gather_single(whole, x.contiguous().view(-1), group=group, async_op=True)
    return partial(_wait, work, lambda: torch.cat(list(whole.view(size, *x.shape)), dim))


def _begin_reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> Result:
    pieces = parts(x, dim, group)
    own = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    work = dist.reduce_scatter_single(own, torch.cat(pieces), group=group, async_op=True)
    return partial(_wait, work, lambda: own)


def _wait(work: Any, result: Result) -> torch.Tensor:
    work.wait()
    return result()


class ColumnLinear(torch.autograd.Function):
    """`F.linear` of `copy_to_group(x)`; or, with `sequence`, of `gather_from_sequence(x)`.

    Backward does two things at once:

        grad_x = grad W, summed over the ranks     is on its way, while
        grad_W = grad^T x                          is computed

    With `sequence` it keeps x only as this rank's part, and gathers it again while it computes
    what needs no x.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group, sequence: bool) -> Any:
        ctx.group, ctx.sequence = group, sequence
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, -2, group) if sequence else x, weight, bias)

    @staticmethod
    @once_differentiable
    @record_function("tensor_parallel.ColumnLinear.backward")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gathered = _begin_all_gather(x, -2, ctx.group) if ctx.sequence else None
        begin = _begin_reduce_scatter if ctx.sequence else _begin_all_reduce
        summed = begin(grad @ weight, -2, ctx.group) if needs_x else None
        if gathered is not None:
            x = gathered()
        rows = grad.reshape(-1, grad.shape[-1])  # (N, F / t)
        grad_weight = rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        grad_x = None if summed is None else summed()
        return grad_x, grad_weight, grad_bias, None, None
