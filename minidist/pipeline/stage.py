"""One stage computes (lesson 5): forward, backward, or backward in two parts."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from minidist.common.wrapper import Wrapper
from minidist.pipeline.batch import tensors_of
from minidist.pipeline.replay import Replay
from minidist.pipeline.split import Deferred, backward_inputs

Gradients = list[torch.Tensor | None]
Finish = Callable[[Any], Any]  # what is made of the outputs


class Layers:
    """The layers of a stage, one after another. Each takes what the one before it gives, and of the
    keyword arguments those that its `forward` names."""

    def __init__(self, layers: nn.Sequential) -> None:
        self.sequence = layers
        self._names = [keywords_of(layer) for layer in layers]

    def __call__(self, x: Any, kwargs: dict[str, Any]) -> Any:
        for layer, names in zip(self.sequence, self._names, strict=True):
            x = layer(x, **{n: v for n, v in kwargs.items() if n in names}) if kwargs else layer(x)
        return x


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
    """What a forward pass leaves for its backward pass: the tensors that have come in and need a
    gradient, and the graph that autograd has recorded, by its end at each output for which a
    gradient comes back (None: nothing there is trained). Not the outputs: they have left."""

    received: list[torch.Tensor]
    ends: list[GradientEdge | None]

    def begin(self, gradients: Gradients) -> tuple[list[GradientEdge], Gradients]:
        """Where backward passes begin, and with what."""
        pairs = [(end, g) for end, g in zip(self.ends, gradients, strict=False) if end is not None]
        return [end for end, _ in pairs], [gradient for _, gradient in pairs]


class Stage:
    """The layers of one stage, and the activations of one batch's micro-batches in flight.

    recompute: keep what has come in alone, and compute forward again when backward needs the rest.
    """

    def __init__(self, layers: Layers, recompute: bool) -> None:
        self.layers, self._recompute = layers, recompute
        self._kept: dict[int, Callable[[], _Kept]] = {}
        self._deferred: dict[int, list[Deferred]] = {}

    def evaluate(self, x: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs for inputs `x`, with nothing kept for a backward pass."""
        with torch.no_grad():
            return self.layers(x, kwargs)

    def forward(self, microbatch: int, inputs: tuple[Any, Any], finish: Finish) -> Any:
        """What `finish` makes of the outputs for `inputs`: what the first layer takes, and keyword
        arguments. Backward passes begin at the tensors in it that need a gradient."""
        if not self._recompute:
            made = finish(self.layers(*_entered(inputs)))
            kept = _keep(inputs, made, lambda y: y.requires_grad)
            self._kept[microbatch] = lambda: kept
            return made
        replay = Replay(self.layers.sequence, tensors_of(inputs))

        def again() -> _Kept:
            with replay.same_again():
                return _keep(inputs, finish(self.layers(*_entered(inputs))), _takes_gradient)

        self._kept[microbatch] = again
        trained = any(p.requires_grad for p in self.layers.sequence.parameters())
        wanted = trained or bool(_received(inputs))

        def as_with_graph(y: torch.Tensor) -> torch.Tensor:
            return y.detach().requires_grad_(wanted and _takes_gradient(y))

        with torch.no_grad():  # on copies: a layer may overwrite what is needed once more
            made = finish(self.layers(*tree_map_only(torch.Tensor, torch.clone, inputs)))
        return tree_map_only(torch.Tensor, as_with_graph, made)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Add to the gradients of the weights, and return those for what has come in. `gradients`
        are those for the outputs; None stands for a loss's own, which is 1."""
        kept = self._kept.pop(microbatch)()
        ends, gradients = kept.begin(gradients)
        if ends:
            torch.autograd.backward(ends, gradients)
        return [x.grad for x in kept.received]

    def backward_inputs(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Return the gradients for what has come in. `backward_weights` does the rest."""
        kept = self._kept.pop(microbatch)()
        ends, gradients = kept.begin(gradients)
        if not ends:
            self._deferred[microbatch] = []
            return [None for _ in kept.received]
        found, self._deferred[microbatch] = backward_inputs(ends, gradients, kept.received)
        return found

    def backward_weights(self, microbatch: int) -> None:
        """Add to the gradients of the weights what `backward_inputs` has put off."""
        for deferred in self._deferred.pop(microbatch):
            deferred.run()


def _received(inputs: Any) -> list[torch.Tensor]:
    """Those tensors for which a gradient is to be sent back."""
    return [x for x in tensors_of(inputs) if x.requires_grad and x.is_leaf]


def _takes_gradient(y: torch.Tensor) -> bool:
    """Whether it could: without a graph one cannot know more."""
    return y.is_floating_point() or y.is_complex()


def _keep(inputs: Any, made: Any, gets_gradient: Callable[[torch.Tensor], bool]) -> _Kept:
    """gets_gradient: whether a gradient comes back for an output."""
    outputs = [y for y in tensors_of(made) if gets_gradient(y)]
    return _Kept(
        _received(inputs), [get_gradient_edge(y) if y.requires_grad else None for y in outputs]
    )


def _entered(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same, but for the leaves of the graph: a layer must not overwrite these, as
    nn.ReLU(inplace=True) would, so it gets their memory by another name."""

    def enter(x: torch.Tensor) -> torch.Tensor:
        return _Enter.apply(x) if x.requires_grad and x.is_leaf else x

    x, kwargs = inputs
    if isinstance(x, torch.Tensor) and not kwargs:  # mostly, and faster
        return enter(x), kwargs
    return tree_map_only(torch.Tensor, enter, inputs)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
