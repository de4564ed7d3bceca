"""The tensors of a call: what this rank can see to be wrong before it communicates; how they become
flat, and back; and how those of several ranks become one.

What is wrong raises a ValueError at the call, and the group is as it was.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

Tensors = Sequence[torch.Tensor]


def describe(*tensors: torch.Tensor) -> str:
    """Their dtypes and shapes, in words."""
    return ", ".join([_describe(x.dtype, x.shape) for x in tensors])


@functools.lru_cache(1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"


def dense(what: str, tensors: Tensors) -> None:
    """Check that their numbers lie in the memory of the CPU."""
    for x in map(_waited, tensors):
        if strange := _strange(x):
            raise ValueError(
                f'{what}: backend "shm" takes dense tensors in the memory of the CPU, not a '
                f"{type(x).__name__} of {x.dtype} ({strange})"
            )


def _waited(x: torch.Tensor) -> torch.Tensor:
    """x; or what x stands for, once that is there, if a functional collective gave x."""
    return x if type(x) is torch.Tensor else getattr(x, "trigger_wait", lambda: x)()


def _strange(x: torch.Tensor) -> str:
    """What is in the way of reading its memory, if anything is."""
    if x.layout != torch.strided:
        return str(x.layout)
    if not x.is_cpu:
        return f"on {x.device}"
    if x.is_quantized or x.is_nested:
        return "quantized" if x.is_quantized else "nested"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "within a transform of torch.func"
    if x.numel() and x.data_ptr() == x.storage_offset() * x.itemsize:  # it begins at address 0
        return "without memory"  # it has been freed, or never was, as that of a fake tensor
    return "" if _copied(x.dtype) else "which torch does not copy"


@functools.lru_cache(64)
def _copied(dtype: torch.dtype) -> bool:
    try:
        with _disable_current_modes():  # or the caller's would answer
            x = torch.empty(1, dtype=dtype, device="cpu")
            x.copy_(x.clone())
    except RuntimeError:
        return False
    return True


def writable(what: str, tensors: Tensors) -> None:
    """Check that no two elements share their memory, as in an expanded tensor. As with gloo, what a
    gather, an all_to_all or a reduce_scatter fills must be so. A tensor that all_reduce or
    broadcast changes takes one value: see `put_back`."""
    for x in tensors:
        if not x.is_contiguous() and any(
            n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)
        ):
            raise ValueError(f"{what}: {describe(x)} is expanded: clone() it, to receive into it")


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
    there = len(x) if x.dim() else 1
    rows = rows or ([there // size] * size)
    if len(rows) != size or sum(rows) != there or min(rows) < 0:
        raise ValueError(
            f"{what}: {describe(x)} cannot be cut into {list(rows)} rows for {size} ranks"
        )
    return [x.numel() // there * n if there else 0 for n in rows]


# ---- flat, and back ------------------------------------------------------------------------


def flatten(x: torch.Tensor) -> torch.Tensor:
    """(*,) to (n,): a view where possible."""
    x = _waited(x)
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        x = x.detach().resolve_conj().resolve_neg().contiguous()
    return _alias(x).view(-1)


def put_back(x: torch.Tensor, flat: torch.Tensor) -> None:
    """Write (n,) back where it came from, if it is a copy. Elements that share their memory, as in
    an expanded tensor, take one value. Raises RuntimeError if the result has several for them; then
    the group has ended on this rank."""
    x = _waited(x)
    if x.data_ptr() == flat.data_ptr():
        return
    x, result = _alias(x), flat.view(x.shape)
    if 0 not in x.stride():
        x.copy_(result)
        return
    one = tuple(slice(None) if stride else slice(1) for stride in x.stride())
    x[one].copy_(result[one])
    if not torch.equal(flatten(x).view(torch.uint8), flat.view(torch.uint8)):  # NaN is NaN
        raise RuntimeError(
            f"{describe(x)} is expanded: its elements share their memory, and the result has "
            "different values for them. clone() it before the call"
        )


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory, without gradients. A tensor made in inference_mode may only be written to
    within it, and who goes on with an operation is not."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        alias = torch._neg_view(alias) if x.is_neg() else alias
        return alias.conj() if x.is_conj() else alias
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
    """How two tensors become one: `add(a, b, out=total)`; and then `finish(total)`."""

    name: str  # that of the `dist.ReduceOp`
    add: Callable[..., object]
    finish: Callable[[torch.Tensor], object] = lambda total: None

    def into(self, total: torch.Tensor, x: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        """total: x and all others, added up. It may be x itself."""
        for other in others:
            self.add(x, other, out=total)
            x = total
        if x is not total:
            total.copy_(x)
        self.finish(total)

    @classmethod
    def of(cls, what: str, op: Any, tensors: Tensors, size: int) -> "Reduction":
        """What a `dist.ReduceOp` does to these tensors of so many ranks. Raises ValueError if torch
        cannot do that to numbers of such a kind."""
        op, found = getattr(op, "op", op), None  # it may be an object of ReduceOp
        for x in tensors:
            found = _reduction(op, x.dtype, size)
            if found is None:
                raise ValueError(f"{what}: there is no {op.name} of {describe(x)}")
        if found is None:
            raise ValueError(f"{what} takes one tensor or more")
        return found


@functools.lru_cache(1024)  # it is asked at each call, and takes a while
def _reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction | None:
    if op not in FUNCTIONS:
        return None
    reduction = Reduction(op.name, FUNCTIONS[op])
    if op == Op.AVG:
        reduction = replace(reduction, finish=lambda total: total.div_(size))
    try:  # Torch does not add all that it can store. Ask before a message is under way.
        with _disable_current_modes():
            x = torch.ones(1, dtype=dtype, device="cpu")
            reduction.into(x, x, [x])
    except RuntimeError:
        return None
    return reduction
