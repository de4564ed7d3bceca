"""A batch is cut into micro-batches, by rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


def rows_of(total: int, microbatches: int) -> list[int]:
    """The rows of each micro-batch, as even as possible: the first ones get the remainder."""
    small, larger = divmod(total, microbatches)
    return [small + (i < larger) for i in range(microbatches)]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count_rows(inputs: Any) -> int:
    """The rows of a batch: the length of the first tensor in it. Raises TypeError if there is
    none."""
    for tensor in tensors_of(inputs):
        if tensor.ndim:
            return len(tensor)
    raise TypeError("the inputs of a pipeline are a tensor, its rows first, or several of these")


def split_into_microbatches(what: str, batch: Any, rows: Sequence[int]) -> list[Any]:
    """The micro-batches: tensors are split by rows, all else is the same in each. Raises ValueError
    for a tensor of another number of rows."""
    leaves, structure = tree_flatten(batch)
    total, columns = sum(rows), []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            columns.append([leaf] * len(rows))
        elif len(leaf) == total:
            columns.append(list(leaf.split(list(rows))))
        else:
            found = tuple(leaf.shape)
            raise ValueError(f"the {what} of a batch of {total} rows have as many, not {found}")
    return [tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


def merge_microbatches(parts: Sequence[Any]) -> Any:
    """The batch: tensors are concatenated, all else comes from the first micro-batch."""

    def merge(first: Any, *others: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return first
        return torch.cat([first, *others]) if first.ndim else torch.stack([first, *others])

    return tree_map(merge, *parts)
