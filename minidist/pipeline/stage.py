"""One stage computes: forward, backward, or backward in two parts."""

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from minidist.common.wrapper import Wrapper
from minidist.pipeline.replay import Replay
from minidist.pipeline.specs import tensors_of
from minidist.pipeline.split import Deferred, backward_inputs

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


class Layers:
    """What a stage runs. module: its layers, or a strategy around them. later: the keyword
    arguments that a layer of a later stage takes. plain: those without tensors, which every rank
    knows before the step, so that they are not sent with the activations."""

    def __init__(self, module: nn.Module, later: Set[str] = frozenset()) -> None:
        self.module, self.later = module, later
        self.plain: dict[str, Any] = {}

    def __call__(self, x: Any, kwargs: dict[str, Any]) -> Any:
        return self.module(x, **self.plain, **kwargs)

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
            return self.onward(self(x, kwargs), kwargs)


def keywords_of(layer: nn.Module) -> set[str]:
    """The keyword arguments that a layer takes: all names of its `forward` but the first."""
    while isinstance(layer, Wrapper):
        layer = layer.module
    try:
        return set(list(inspect.signature(layer.forward).parameters)[1:])
    except (TypeError, ValueError):  # a compiled function does not tell
        return set()


@dataclass
class _Kept:
    """What a forward pass keeps for its backward pass: the received tensors that need a gradient,
    and the graph that autograd has recorded, held by its end at each output. The outputs
    themselves may be freed."""

    received: list[torch.Tensor]
    ends: list[GradientEdge]


class Stage:
    """The layers of one stage, and the activations of one batch's micro-batches in flight.

    recompute: keep the inputs only, and compute forward again when backward needs the rest.
    """

    def __init__(self, layers: Layers, recompute: bool) -> None:
        self.layers, self.recompute = layers, recompute
        self._kept: dict[int, Callable[[], _Kept]] = {}
        self._deferred: dict[int, list[Deferred]] = {}

    def evaluate(self, inputs: tuple[Any, Any], finish: Finish) -> Any:
        """The same as `forward`, with nothing kept for a backward pass."""
        with torch.no_grad():
            return finish(self.layers(*inputs), inputs[1])

    def forward(self, microbatch: int, inputs: tuple[Any, Any], finish: Finish) -> Any:
        """`finish` applied to the outputs for `inputs`: what the first layer takes, and keyword
        arguments. Backward begins at the tensors in the result that need a gradient. With
        `recompute` the result has no graph yet."""

        def compute() -> Any:
            return finish(self.layers(*_entered(inputs)), inputs[1])

        if not self.recompute:
            made = compute()
            kept = _keep(inputs, made)
            self._kept[microbatch] = lambda: kept
            return made
        replay = Replay(self.layers.module, tensors_of(inputs))

        def again() -> _Kept:
            with replay.same_again():
                return _keep(inputs, compute())

        self._kept[microbatch] = again
        # On copies: a layer may overwrite what is needed once more.
        copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), inputs)
        return self.evaluate(copies, finish)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Add to the gradients of the weights, and return those of the inputs. `gradients`: of the
        outputs; None stands for that of a loss, which is 1."""
        kept = self._kept.pop(microbatch)()
        if kept.ends:
            torch.autograd.backward(kept.ends, gradients)
        return [x.grad for x in kept.received]

    def backward_inputs(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Return the gradients of the inputs. `backward_weights` does the rest."""
        kept = self._kept.pop(microbatch)()
        if not kept.ends:
            self._deferred[microbatch] = []
            return [None for _ in kept.received]
        found, left = backward_inputs(kept.ends, gradients, kept.received)
        self._deferred[microbatch] = left
        return found

    def backward_weights(self, microbatch: int) -> None:
        """Add the gradients of the weights, which `backward_inputs` has left out."""
        for deferred in self._deferred.pop(microbatch):
            deferred.run()


def _keep(inputs: Any, made: Any) -> _Kept:
    # A gradient is to be sent back for the leaves among the inputs.
    received = [x for x in tensors_of(inputs) if x.requires_grad and x.is_leaf]
    return _Kept(received, [get_gradient_edge(y) for y in tensors_of(made) if y.requires_grad])


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
