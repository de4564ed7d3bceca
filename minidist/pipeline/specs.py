"""What stages get and give: a batch in micro-batches, and the shapes of activations.

An activation is a tensor, or tensors and plain values in tuples, lists and dicts. The receiver
allocates memory before one arrives, so it must know its *spec*: the structure, and of each tensor
the shape and dtype. In the first step with inputs of a new shape, each stage runs one micro-batch
of each size without effect, a dry run: the first stage the batch's own, the others ones, of the
shapes that the stage before has found. The specs are broadcast; after that only tensors are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from minidist.collectives.peers import Peers
from minidist.common import agree

PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


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


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether a gradient for it is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    def __repr__(self) -> str:
        words = f"shape {self.shape}, {str(self.dtype).removeprefix('torch.')}"
        without = self.dtype.is_floating_point and not self.gradient
        return words + (", without gradient" if without else "")

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def ones(self, device: torch.device) -> torch.Tensor:
        return torch.ones(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ActivationSpec:
    """An activation in which each tensor is replaced by its `TensorSpec`."""

    leaves: list[Any]
    structure: TreeSpec

    @classmethod
    def of(cls, activation: Any) -> "ActivationSpec":
        """Raises TypeError if it holds something that cannot be sent."""
        leaves, structure = tree_flatten(activation)
        return cls([_spec(leaf) for leaf in leaves], structure)

    def __str__(self) -> str:
        outputs, kwargs = self.tree()
        return f"{outputs}" + (f" and {kwargs}" if kwargs else "")

    def tree(self) -> Any:
        return tree_unflatten(self.leaves, self.structure)

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """Of the tensors for which a gradient is sent back."""
        return [spec for spec in self.tensors if spec.gradient]

    @cached_property
    def without_graph(self) -> "ActivationSpec":
        """The spec of the same activation made under `torch.no_grad()`."""
        leaves = [
            replace(leaf, gradient=False) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return ActivationSpec(leaves, self.structure)

    def flatten(self, activation: Any) -> list[torch.Tensor]:
        """The tensors of an activation, detached. Raises ValueError if it has another spec."""
        leaves, structure = tree_flatten(activation)
        found = ActivationSpec([_spec(leaf) for leaf in leaves], structure)
        if found != self:
            raise ValueError(
                f"this stage gives {found}; after what it gave for other micro-batches it must be "
                f"{self}"
            )
        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The activation that consists of these tensors. Those that need a gradient are leaves of
        autograd's graph."""
        left = iter(tensors)
        leaves = [
            next(left).requires_grad_(leaf.gradient) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)

    def empty(self, device: torch.device) -> Any:
        return self.unflatten([spec.empty(device) for spec in self.tensors])

    def ones(self, device: torch.device) -> Any:
        """Ones: valid as indices where there are two rows or more, and as a mask: none hidden."""
        return self.unflatten([spec.ones(device) for spec in self.tensors])


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, PLAIN):
        return leaf
    raise TypeError(
        "between stages travel tensors, numbers, strings and None, in tuples, lists and dicts; "
        f"this stage gives a {type(leaf).__name__}"
    )


ActivationSpecs = dict[tuple[int, int], ActivationSpec]  # of outputs, by stage and rows


def infer_specs(
    peers: Peers,
    stages: int,
    run: Mapping[int, Callable[[Any], Any]],
    first: Sequence[tuple[int, Any]],
    device: torch.device,
) -> ActivationSpecs:
    """The specs of the outputs of stages 0 to `stages` - 1, on every rank. All ranks call this, and
    all raise if one fails.

    run: this rank's stages. first: (rows, the input of stage 0, on its rank), for each size.
    """
    assert peers.group is not None
    found: ActivationSpecs = {}
    for rows, activation in first:
        for stage in range(stages):
            problem, message = None, [None]
            if stage in run:
                try:
                    message = [ActivationSpec.of(run[stage](activation)).tree()]
                except Exception as error:
                    problem = error
                    problem.add_note(f"(at Forward({stage}, 0) of the pipeline)")
            agree.raise_on_every_rank(peers.group, problem)
            dist.broadcast_object_list(message, group=peers.group, group_src=stage % peers.size)
            found[stage, rows] = spec = ActivationSpec(*tree_flatten(message[0]))
            activation = spec.ones(device) if stage + 1 in run else None
    return found
