"""What a rank can see to be wrong before it communicates.

Then its call raises a ValueError, and the group is as it was.
"""

import functools
from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def describe(*tensors: torch.Tensor) -> str:
    """Their dtypes and shapes, in words."""
    return ", ".join([_describe(x.dtype, x.shape) for x in tensors])


@functools.lru_cache(1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"


def dense(what: str, tensors: Tensors) -> None:
    """Their numbers lie in the memory of the CPU."""
    for x in tensors:
        if strange := _strange(x):
            raise ValueError(
                f'{what}: backend "shm" takes dense tensors in the memory of the CPU, not a '
                f"{type(x).__name__} of {x.dtype} ({strange})"
            )


def _strange(x: torch.Tensor) -> str:
    """What is in the way of reading its memory, if anything is."""
    if x.layout != torch.strided:
        return str(x.layout)
    if x.device.type != "cpu":
        return f"on {x.device}"
    if x.is_quantized or x.is_nested:
        return "quantized" if x.is_quantized else "nested"
    if x.numel() and not (x.data_ptr() and x.untyped_storage().nbytes()):
        return "without memory"  # it has been freed, or never was, as that of a fake tensor
    return ""


def writable(what: str, tensors: Tensors) -> None:
    """Each of their elements has a place of its own, as those of an expanded tensor have not."""
    for x in tensors:
        if not x.is_contiguous() and any(
            n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)
        ):
            raise ValueError(f"{what}: {describe(x)} is expanded: clone() it, to receive into it")


def one_each(what: str, parts: Tensors, x: torch.Tensor, size: int) -> None:
    """There is a part for each rank, like x."""
    if len(parts) != size:
        raise ValueError(f"{what} takes {size} tensors, one for each rank, not {len(parts)}")
    for rank, part in enumerate(parts):
        if part.numel() != x.numel() or part.dtype != x.dtype:
            raise ValueError(f"{what}: {describe(part)} for rank {rank}, beside {describe(x)}")


def together(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """The whole has room for such a part of each rank."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(f"{what}: {describe(whole)} is not {size} times {describe(part)}")


def splits(what: str, x: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """The number of elements for each rank, of a tensor that is cut into so many rows for each; or
    into equal parts."""
    there = len(x) if x.dim() else 1
    rows = rows or ([there // size] * size)
    if len(rows) != size or sum(rows) != there or min(rows) < 0:
        raise ValueError(
            f"{what}: {describe(x)} cannot be cut into {list(rows)} rows for {size} ranks"
        )
    return [x.numel() // there * n if there else 0 for n in rows]
