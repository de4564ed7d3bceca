"""One stage computes (lesson 5): forward, backward, or backward in two parts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.pipeline.replay import Replay
from minidist.pipeline.split import Deferred, backward_inputs

Finish = Callable[[torch.Tensor], torch.Tensor]  # what the last stage makes of its outputs


@dataclass
class _Kept:
    """What a forward pass leaves for its backward pass: the inputs, and the graph that autograd
    has recorded, by its end (None: nothing in it is trained). Not the outputs: they have left."""

    x: torch.Tensor
    end: GradientEdge | None


class Stage:
    """The layers of one stage, and the activations of one batch's micro-batches in flight.

    recompute: keep the inputs alone, and compute forward again when backward needs the rest.
    """

    def __init__(self, layers: nn.Sequential, recompute: bool) -> None:
        self.layers, self._recompute = layers, recompute
        self._kept: dict[int, Callable[[], _Kept]] = {}
        self._deferred: dict[int, list[Deferred]] = {}

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for inputs `x`, with nothing kept for a backward pass."""
        with torch.no_grad():
            return self._compute(x, None)

    def forward(
        self, microbatch: int, x: torch.Tensor, finish: Finish | None = None
    ) -> torch.Tensor:
        """The outputs for inputs `x`, or what `finish` makes of them, cut off from the graph that
        is kept for the backward pass."""
        if self._recompute:
            replay = Replay(self.layers, [x])
            with torch.no_grad():
                y = self._compute(x, finish)

            def again() -> _Kept:
                with replay.same_again():
                    return self._keep(x, self._compute(x, finish))

            self._kept[microbatch] = again
        else:
            y = self._compute(x, finish)
            kept = self._keep(x, y)
            self._kept[microbatch] = lambda: kept
        return y.detach()

    def _compute(self, x: torch.Tensor, finish: Finish | None) -> torch.Tensor:
        first = next(iter(self.layers), None)
        # A leaf of the graph must not be overwritten, as nn.ReLU(inplace=True) would.
        y = self.layers(x.clone() if getattr(first, "inplace", False) else x)
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"a stage gives one tensor, not a {type(y).__name__}")
        return finish(y) if finish else y

    def _keep(self, x: torch.Tensor, y: torch.Tensor) -> _Kept:
        return _Kept(x, get_gradient_edge(y) if y.requires_grad else None)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add to the gradients of the weights, and return that for the inputs. `gradient` is that
        for the outputs; None stands for a loss's own, which is 1."""
        kept = self._kept.pop(microbatch)()
        if kept.end is not None:
            torch.autograd.backward([kept.end], [gradient])
        return kept.x.grad

    def backward_inputs(
        self, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the gradient for the inputs. `backward_weights` does the rest."""
        kept = self._kept.pop(microbatch)()
        self._deferred[microbatch] = []
        if kept.end is None:
            return None
        x_gradient, self._deferred[microbatch] = backward_inputs(kept.end, gradient, kept.x)
        return x_gradient

    def backward_weights(self, microbatch: int) -> None:
        """Add to the gradients of the weights what `backward_inputs` has put off."""
        for deferred in self._deferred.pop(microbatch):
            deferred.run()
