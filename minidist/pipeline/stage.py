"""One stage computes: forward, backward, or backward in two parts.

What it gives to the next is an *activation*: a tensor, or tensors and plain values in tuples, lists
and dicts; and keyword arguments for later stages. The receiver allocates memory before one arrives,
so it must know its *spec*: the structure, and of each tensor the shape and dtype.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten

from minidist.common.replay import Replay
from minidist.common.tensors_in import tensors_of
from minidist.common.wrapper import Wrapper
from minidist.pipeline.two_parts import backward_inputs

Gradients = list[torch.Tensor | None]
Finish = Callable[[Any, dict[str, Any]], Any]  # applied to outputs and keyword arguments


class StageLayers(nn.Sequential):
    """Layers, one after another. Each takes what the one before it gives, and of the keyword
    arguments those that its `forward` names."""

    @cached_property
    def _names(self) -> list[set[str]]:
        return [keywords_of(layer) for layer in self]

    def forward(self, input: Any, **kwargs: Any) -> Any:
        for layer, names in zip(self, self._names, strict=True):
            own = {n: v for n, v in kwargs.items() if n in names} if kwargs else kwargs
            input = layer(input, **own)
        return input


def keywords_of(layer: Any) -> set[str]:
    """The keyword arguments that a layer takes: all names of its `forward` but the first."""
    while isinstance(layer, Wrapper) or hasattr(layer, "_orig_mod"):  # or torch.compile's
        layer = layer.module if isinstance(layer, Wrapper) else layer._orig_mod
    try:
        others = list(inspect.signature(layer.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a compiled function does not tell
        return set()
    # Not *args and **kwargs: a wrapper has these, whatever the layer within it takes.
    return {each.name for each in others if each.kind in (_EITHER, _BY_NAME)}


_EITHER, _BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class Stage:
    """One stage, and the activations of one batch's micro-batches in flight.

    module: its layers, or a strategy around them. later: the keyword arguments that a layer of a
    later stage takes. recompute: keep the inputs only, and compute forward again when backward
    needs the rest. plain: this step's keyword arguments without tensors, which every rank knows
    before it, so that they are not sent with the activations.
    """

    def __init__(
        self, module: nn.Module, later: Set[str] = frozenset(), recompute: bool = False
    ) -> None:
        self.module, self.later, self.recompute = module, later, recompute
        self.end_step()

    def end_step(self) -> None:
        """Forget all that is of one batch."""
        self.plain: dict[str, Any] = {}
        # By micro-batch: gives the received tensors that need a gradient, and the graph's edge at
        # each output. The edges hold the graph, so the outputs themselves may be freed.
        self._kept: dict[int, Callable[[], tuple[list[torch.Tensor], list[GradientEdge]]]] = {}
        self._deferred: dict[int, list[Callable[[], None]]] = {}

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Of the strategy around the layers, if there is one that says so."""
        if (unit := getattr(self.module, "fsdp_group", None)) is not None:
            groups: Sequence[dist.ProcessGroup] = unit.options.groups
            return groups
        group = getattr(self.module, "process_group", None)
        return [] if group is None else [group]

    def onward(self, y: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What goes to the next stage."""
        return y, {name: value for name, value in kwargs.items() if name in self.later}

    def dry_run(self, inputs: tuple[Any, dict[str, Any]]) -> Any:
        """What would be sent to the next stage. Random state, buffers and inputs do not change."""
        with Replay(self.module, tensors_of(inputs)).same_again():
            x, kwargs = tree_map_only(torch.Tensor, torch.clone, inputs)
            return self.onward(self.module(x, **self.plain, **kwargs), kwargs)

    def forward(self, microbatch: int, inputs: tuple[Any, Any], finish: Finish) -> Any:
        """`finish` applied to the outputs for `inputs`: what the first layer takes, and keyword
        arguments. Backward begins at the tensors in the result that need a gradient. With
        `recompute` the result has no graph yet; under `torch.no_grad()` nothing is kept."""

        def compute(inputs: tuple[Any, Any]) -> Any:
            x, kwargs = _entered(inputs)
            return finish(self.module(x, **self.plain, **kwargs), inputs[1])

        if not torch.is_grad_enabled():
            return compute(inputs)
        if not self.recompute:
            made = compute(inputs)
            kept = _keep(inputs, made)
            self._kept[microbatch] = lambda: kept
            return made
        replay = Replay(self.module, tensors_of(inputs))

        def again() -> tuple[list[torch.Tensor], list[GradientEdge]]:
            with replay.same_again():
                return _keep(inputs, compute(inputs))

        self._kept[microbatch] = again
        with torch.no_grad():  # on copies: a layer may overwrite what is needed once more
            made = compute(tree_map_only(torch.Tensor, lambda x: x.detach().clone(), inputs))
        # A view of a weight needs a gradient even so.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, made)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Add to the gradients of the weights, and return those of the inputs. `gradients`: of the
        outputs; None stands for that of a loss, which is 1."""
        received, ends = self._kept.pop(microbatch)()
        if ends:
            torch.autograd.backward(ends, gradients)
        return [x.grad for x in received]

    def backward_inputs(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Return the gradients of the inputs. `backward_weights` does the rest."""
        received, ends = self._kept.pop(microbatch)()
        found, left = backward_inputs(ends, gradients, received) if ends else ([], [])
        self._deferred[microbatch] = left
        return found or [None for _ in received]

    def backward_weights(self, microbatch: int) -> None:
        """Add the gradients of the weights, which `backward_inputs` has left out."""
        for add in self._deferred.pop(microbatch):
            add()


def _keep(inputs: Any, made: Any) -> tuple[list[torch.Tensor], list[GradientEdge]]:
    # The leaves among the inputs are those for which a gradient is sent back.
    received = [x for x in tensors_of(inputs) if x.requires_grad and x.is_leaf]
    return received, [get_gradient_edge(y) for y in tensors_of(made) if y.requires_grad]


def _entered(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """The inputs, with each leaf of the graph replaced by an alias. A layer such as
    nn.ReLU(inplace=True) may overwrite its input, and autograd refuses that for a leaf."""

    def enter(x: torch.Tensor) -> torch.Tensor:
        return _Enter.apply(x) if x.requires_grad and x.is_leaf else x

    return tree_map_only(torch.Tensor, enter, inputs)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


# ---- what a stage gives ----------------------------------------------------------------------

FLAGS = type(None), bool, str, torch.dtype, torch.device
PLAIN = (*FLAGS, int, float, complex, torch.Size)


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

    def __deepcopy__(self, _: dict[int, Any]) -> "ActivationSpec":
        return self  # nothing in it changes, and torch warns where a structure is copied

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
        tree = tree_map(
            lambda x: replace(x, gradient=False) if isinstance(x, TensorSpec) else x, self.tree()
        )
        return ActivationSpec(*tree_flatten(tree))

    def flatten(self, activation: Any) -> list[torch.Tensor]:
        """The tensors of an activation, detached. Raises ValueError if it has another spec."""
        found = ActivationSpec.of(activation)
        if found != self:
            raise ValueError(
                f"this stage gives {found}; after what it gave for other micro-batches it must be "
                f"{self}"
            )
        return [tensor.detach() for tensor in tensors_of(activation)]

    def unflatten(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The activation that consists of these tensors. Those that need a gradient are leaves of
        autograd's graph."""
        left = iter(tensors)
        leaves = [
            next(left).requires_grad_(leaf.gradient) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)

    def empty(self, device: torch.device) -> Any:
        return self.unflatten(spec.empty(device) for spec in self.tensors)

    def ones(self, device: torch.device) -> Any:
        """Ones: valid as indices where there are two rows or more, and as a mask: none hidden."""
        return self.unflatten(spec.empty(device).fill_(1) for spec in self.tensors)


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, PLAIN):
        return leaf
    raise TypeError(
        "between stages travel tensors, numbers, strings and None, in tuples, lists and dicts; "
        f"this stage gives a {type(leaf).__name__}"
    )
