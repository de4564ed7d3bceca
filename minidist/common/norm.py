"""The norm of gradients that lie on several ranks: the norm of the ranks' norms."""

import copy
from collections.abc import Iterable, Sequence, Set
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from minidist.common.tensors_in import local_of


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Iterable[dist.ProcessGroup | None],
    device: torch.device,
    elsewhere: Set[torch.Tensor] = frozenset(),
) -> torch.Tensor:
    """Scale the gradients of all ranks' `parameters` so that their norm is at most `max_norm`, and
    return what it was: the same number on every rank.

    parameters: this rank's: its shards, its layers, or both.
    groups: the ranks that have the others, along each axis of a mesh. One all_reduce of one number
        for each group, which all of its ranks must call.
    device: where that number is.
    elsewhere: those of `parameters` that another rank has too, and counts. They are scaled too.

    Raises ValueError for a `norm_type` of 0 or less.
    """
    own = {p: _own(p.grad) for p in parameters if p.grad is not None}
    counted = [grad for p, grad in own.items() if p not in elsewhere and grad.numel()]
    # As float64 on every rank: one without gradients would have no other dtype to choose.
    total = get_total_norm(counted, norm_type).to(device, torch.float64)
    for group in groups:
        total = norm_over_ranks(total, norm_type, group)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)  # as torch's clip_grads_with_norm_
    for where in {grad.device for grad in own.values()}:
        here = [grad.detach() for grad in own.values() if grad.device == where]
        torch._foreach_mul_(here, scale.to(where))
    return total


def _own(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, without the mark of `mark_parts`."""
    return local_of(gradient.detach() if isinstance(gradient, _Part) else gradient)


def norm_over_ranks(
    own: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The norm of all that the ranks of a group have, from that of what each has: a number, the
    same on every rank. One all_reduce of one number. Raises ValueError for a `norm_type` of 0 or
    less."""
    if norm_type <= 0:
        raise ValueError(f"norm_type must be more than 0, not {norm_type}")
    if norm_type == float("inf"):
        total = own.clone()
        dist.all_reduce(total, dist.ReduceOp.MAX, group)
        return total
    total = own**norm_type
    dist.all_reduce(total, group=group)
    return total ** (1 / norm_type)


# ---- torch's own function ------------------------------------------------------------------------


def mark_parts(parameters: Iterable[torch.Tensor]) -> None:
    """Mark their gradients as a part of all that there are: of one rank's layers, or what lies
    beside shards. torch's `clip_grad_norm_` then raises RuntimeError, where it would take the norm
    of this part for that of the whole, and each rank would scale by another number. So does
    torch.stack of norms by torch.linalg.vector_norm. All else computes as before. Where a rank has
    no gradient, torch's function returns 0 there."""
    for grad in (p.grad for p in parameters if p.grad is not None):
        if type(grad) is torch.Tensor or hasattr(grad, "_local_tensor"):  # a DTensor
            grad.__class__ = _part_of(type(grad))


class _Part:
    """A gradient, or its norm, that must not be added up without those of the other ranks."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.stack and not (args[0] if args else kwargs["tensors"])[0].ndim:
            raise RuntimeError(
                "this rank has a part of the gradients here, and would clip by the norm of that "
                "part: call the model's clip_grad_norm_ in place of torch's"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if function in _NORMS or (function is torch.Tensor.to and isinstance(args[0], _Part)):
            norms: Sequence[torch.Tensor] = result if isinstance(result, tuple | list) else [result]
            for norm in norms:
                if not norm.ndim:
                    norm.__class__ = _part_of(type(norm))
        return result

    # What is kept, sent or shown is an ordinary tensor.

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.detach(), memo)  # which keeps what it has copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __repr__(self: Any, **how: Any) -> str:
        return repr(self.detach())


_NORMS = torch.linalg.vector_norm, torch._foreach_norm


@cache
def _part_of(kind: Any) -> Any:
    return (
        kind if issubclass(kind, _Part) else type(kind.__name__, (_Part, kind), {"__slots__": ()})
    )
