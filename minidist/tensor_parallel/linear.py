"""Linear layers that are split by features (lesson: feature_splitting).

    column: W = [W_0; ...; W_(t-1)]     y_r = x W_r^T                 x replicated, y sharded
    row:    W = [W_0, ..., W_(t-1)]     y = sum over r of x_r W_r^T   x sharded, y replicated

(torch keeps the transpose of the paper's matrix: what is a column there is a row of `weight`.) A
column layer followed by a row layer needs no message in between. Shoeybi et al., "Megatron-LM"
(arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from minidist.tensor_parallel.layer import ParallelLayer, require_multiple
from minidist.tensor_parallel.operators import (
    Group,
    begin_all_gather,
    begin_reduce_scatter,
    copy_to_group,
    gather_from_group,
    join,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)


class _ParallelLinear(ParallelLayer):
    """What the two have in common: they are a shard of an `nn.Linear`."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        process_group: Group,
        sequence_parallel: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__(process_group)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.has_bias = bias
        self.require_split()
        self.register_parameter("weight", None)  # in the order of nn.Linear's
        self.register_parameter("bias", None)
        self.take(self.make_dense(device, dtype))

    def make_dense(self, device: Any, dtype: Any) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.has_bias, device, dtype)

    @staticmethod
    def arguments(layer: nn.Linear) -> tuple[Any, ...]:
        return layer.in_features, layer.out_features, layer.bias is not None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}, rank {self.rank} of {self.world_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes a part of the output features.

        hidden = md.ColumnParallelLinear(C, 4 * C)(x)       # (B, T, C) to (B, T, 4C / t)
        y = md.RowParallelLinear(4 * C, C)(F.gelu(hidden))  # and back to (B, T, C)

    The input (*, in_features) is replicated, the output (*, out_features / t) sharded: rank r has
    the r-th part of the features. In backward, the gradient of the input is summed over the ranks,
    while that of the weight is computed.

    in_features, out_features, bias, device, dtype: those of `nn.Linear`, for the whole layer.
    process_group: the ranks that share the layer; None is the default group.
    gather_output: every rank gets the whole output, (*, out_features).
    sequence_parallel: the input is sharded too, along the sequence: (B, T / t, in_features). It is
        gathered, not kept, and gathered again in backward.

    Raises ValueError if `out_features` is not a multiple of the number of ranks: a step takes as
    long as its slowest rank, and attention cannot cut a head. There are no gradients of gradients;
    `F.linear` between the operators of this lesson has them.
    Lesson: feature_splitting.
    """

    split = "out_features"
    sharded = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, process_group, sequence_parallel, device, dtype
        )
        self.gather_output = gather_output
        if gather_output:  # also for a VocabParallelLinear: only equal parts can be joined
            require_multiple(out_features, self.world_size, "out_features to gather")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x, self.weight, self.bias)
        return gather_from_group(y, -1, self.process_group) if self.gather_output else y

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """F.linear of a replicated x, or of one that is sharded along the sequence."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        function = _GatherLinear if self.sequence_parallel else _CopyLinear
        return function.apply(x, weight, bias, self.process_group)


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank takes a part of the input features.

    The input (*, in_features / t) is sharded, as a `ColumnParallelLinear` leaves it; the output
    (*, out_features) is the sum over the ranks, replicated. The bias is replicated, and added once.
    Backward needs no message, but for what the options below ask for.

    in_features, out_features, bias, process_group, device, dtype: as in `ColumnParallelLinear`.
    input_is_parallel: False for a replicated input (*, in_features), which each rank then cuts.
    sequence_parallel: the output is sharded along the sequence, (B, T / t, out_features), and its
        gradient is gathered. The bias sees a part of the tokens; its gradient is summed over the
        ranks.

    Raises ValueError if `in_features` is not a multiple of the number of ranks.
    Lesson: feature_splitting.
    """

    split = "in_features"
    sharded = {"weight": 1}  # the bias is replicated

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, process_group, sequence_parallel, device, dtype
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.process_group)
        partial = F.linear(x, self.weight)  # (*, out_features)
        bias: torch.Tensor | None = self.bias
        if not self.sequence_parallel:
            y = reduce_from_group(partial, self.process_group)
        else:
            y = reduce_scatter_to_sequence(partial, -2, self.process_group)
            bias = bias if bias is None else copy_to_group(bias, self.process_group)
        return y if bias is None else y + bias.to(y.dtype)  # autocast: as nn.Linear has it


class _CopyLinear(torch.autograd.Function):
    """`F.linear(copy_to_group(x), weight, bias)`, whose backward does two things at once:

    grad_x = sum over ranks of grad W        all_reduce: on its way, while
    grad_W = grad^T x                        is computed
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = work = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grads = _parameter_grads(ctx, grad, x)
        if work is not None:
            work.wait()
        return grad_x, *grads, None


class _GatherLinear(torch.autograd.Function):
    """`F.linear(gather_from_sequence(x), weight, bias)`, that keeps x only as this rank's part:
    backward gathers it again, while it computes what needs no x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(join(x, -2, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = work = None
        whole, gathering = begin_all_gather(x, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x, work = begin_reduce_scatter(grad @ weight, -2, ctx.group)
        gathering.wait()
        grads = _parameter_grads(ctx, grad, torch.cat(whole, -2))
        if work is not None:
            work.wait()
        return grad_x, *grads, None


def _parameter_grads(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of weight and bias, as far as they are asked for."""
    rows = grad.reshape(-1, grad.shape[-1])  # (N, F / t)
    _, weight, bias, _ = ctx.needs_input_grad
    return (
        rows.T @ x.reshape(-1, x.shape[-1]) if weight else None,
        rows.sum(0) if bias else None,
    )
