"""What travels between two stages, found out once for inputs of one shape.

An activation is a tensor, or tensors and plain values in tuples, lists and dicts. Who receives one
makes room for it before it comes, so it must know its *outline*: the structure, and of each tensor
the shape and dtype. In the first step with inputs of a new shape, the stages run one micro-batch of
each size to learn them: the first stage the batch's own, each other one all ones, of the shapes
that the stage before it has found. These shapes travel; after that only tensors do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from minidist.collectives.peers import Peers
from minidist.common import agree

PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of an activation looks like, and whether a gradient for it comes back."""

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
class Outline:
    """An activation without its numbers: each tensor is a `TensorSpec`."""

    leaves: list[Any]
    structure: TreeSpec

    @classmethod
    def of(cls, activation: Any) -> "Outline":
        """Raises TypeError if there is something in it that cannot travel."""
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
        """Of the tensors for which a gradient comes back."""
        return [spec for spec in self.tensors if spec.gradient]

    @cached_property
    def without_graph(self) -> "Outline":
        """That of the same activation if autograd has not recorded how it was made."""
        leaves = [
            replace(leaf, gradient=False) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return Outline(leaves, self.structure)

    def take_apart(self, activation: Any) -> list[torch.Tensor]:
        """The tensors of an activation, cut off from autograd's graph. Raises ValueError if it is
        not like this."""
        leaves, structure = tree_flatten(activation)
        found = Outline([_spec(leaf) for leaf in leaves], structure)
        if found != self:
            raise ValueError(
                f"this stage gives {found}; after what it gave for other micro-batches it must be "
                f"{self}"
            )
        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The activation that these tensors make. Those that need a gradient are leaves of
        autograd's graph."""
        left = iter(tensors)
        leaves = [
            next(left).requires_grad_(leaf.gradient) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)

    def empty(self, device: torch.device) -> Any:
        return self.put_together([spec.empty(device) for spec in self.tensors])

    def ones(self, device: torch.device) -> Any:
        """Values that layers can take: an index of more than one row, a mask that hides nothing."""
        return self.put_together([spec.ones(device) for spec in self.tensors])


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, PLAIN):
        return leaf
    raise TypeError(
        "between stages travel tensors, numbers, strings and None, in tuples, lists and dicts; "
        f"this stage gives a {type(leaf).__name__}"
    )


Outlines = dict[tuple[int, int], Outline]  # by stage and rows of a micro-batch: what it gives


def learn(
    peers: Peers,
    stages: int,
    run: Mapping[int, Callable[[Any], Any]],
    first: Sequence[tuple[int, Any]],
    device: torch.device,
) -> Outlines:
    """The outlines of what the first so many stages give, on every rank. All call this, and all
    raise what went wrong on one.

    run: this rank's stages. first: numbers of rows, and what goes into stage 0, on its rank.
    """
    assert peers.group is not None
    found: Outlines = {}
    for rows, activation in first:
        for stage in range(stages):
            problem, told = None, [None]
            if stage in run:
                try:
                    told = [Outline.of(run[stage](activation)).tree()]
                except Exception as error:
                    problem = error
                    problem.add_note(f"(at Forward({stage}, 0) of the pipeline)")
            agree.raise_on_every_rank(peers.group, problem)
            dist.broadcast_object_list(told, group=peers.group, group_src=stage % peers.size)
            found[stage, rows] = outline = Outline(*tree_flatten(told[0]))
            activation = outline.ones(device) if stage + 1 in run else None
    return found
