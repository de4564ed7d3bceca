"""The tensors of a call: what this rank can see to be wrong before it communicates; how they become
flat, and back; and how those of several ranks become one.

What is wrong raises a ValueError at the call, and the group is as it was.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]


def describe(*tensors: torch.Tensor) -> str:
    """Their dtypes and shapes, in words."""
    return ", ".join([_describe(x.dtype, x.shape) for x in tensors])


@functools.lru_cache(1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"


def on_cpu(what: str, tensors: Tensors) -> None:
    """Check that they lie in the memory of the CPU."""
    for x in tensors:
        if not x.is_cpu:
            name = what.partition("(")[0]
            raise ValueError(f'{name}: backend "shm" takes tensors on the CPU, not on {x.device}')


def one_each(what: str, parts: Tensors, x: torch.Tensor, size: int) -> None:
    """Check that there is a part for each rank, like x."""
    if len(parts) != size:
        raise ValueError(f"{what} takes {size} tensors, one for each rank, not {len(parts)}")
    for rank, part in enumerate(parts):
        if part.numel() != x.numel() or part.dtype != x.dtype:
            raise ValueError(f"{what}: {describe(part)} for rank {rank}, beside {describe(x)}")


def together(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Check that the whole is as large as such a part of each rank together."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(f"{what}: {describe(whole)} is not {size} times {describe(part)}")


def splits(what: str, x: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """The number of elements for each rank: of a tensor cut into `rows[rank]` rows, or, without
    rows, into equal parts."""
    there = len(x)
    rows = rows or ([there // size] * size)
    if len(rows) != size or sum(rows) != there:
        raise ValueError(
            f"{what}: {describe(x)} cannot be cut into {list(rows)} rows for {size} ranks"
        )
    return [x.numel() // there * n if there else 0 for n in rows]


# ---- flat, and back ------------------------------------------------------------------------


def flatten(x: torch.Tensor) -> torch.Tensor:
    """(*,) to (n,): a view where possible."""
    x = _waited(x)
    return _alias(x if x.is_contiguous() else x.detach().contiguous()).view(-1)


def put_back(x: torch.Tensor, flat: torch.Tensor) -> None:
    """Write (n,) back where it came from, if it is a copy."""
    x = _waited(x)
    if x.data_ptr() != flat.data_ptr():
        _alias(x).copy_(flat.view(x.shape))


def _waited(x: torch.Tensor) -> torch.Tensor:
    """x; or what x stands for, once that is there, if a functional collective gave x."""
    return x if type(x) is torch.Tensor else getattr(x, "trigger_wait", lambda: x)()


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory, without gradients. A tensor made in inference_mode may only be written to
    within it, and who goes on with an operation is not."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        alias = torch.empty(0, dtype=x.dtype)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    return x.detach()


# ---- what `dist.ReduceOp` means ------------------------------------------------------------

Op: Any = dist.ReduceOp.RedOpType

FUNCTIONS: dict[Any, Callable[..., object]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # and divided in the end
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Reduction:
    """How two tensors become one: `add(a, b, out=total)`; the total is divided by `ranks`."""

    name: str  # that of the `dist.ReduceOp`
    add: Callable[..., object]
    ranks: int

    def into(self, total: torch.Tensor, x: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        """total: x and all others, added up. It may be x itself."""
        for other in others:
            self.add(x, other, out=total)
            x = total
        if x is not total:
            total.copy_(x)
        if self.ranks > 1:
            total.div_(self.ranks)


def reduction(what: str, op: Any, size: int) -> Reduction:
    """What a `dist.ReduceOp` does to the tensors of so many ranks. Raises ValueError if it is none
    of the ordinary ones."""
    op = getattr(op, "op", op)  # it may be an object of ReduceOp
    if op not in FUNCTIONS:
        raise ValueError(f"{what}: there is no {op.name} in shared memory")
    return Reduction(op.name, FUNCTIONS[op], size if op == Op.AVG else 1)
