"""One stage computes: forward, backward, or backward in two parts.

What it gives to the next is an *activation*: a tensor, or tensors in tuples, lists and dicts.

Backward in two parts, of which neither does the other's work, is zero bubble (Qi et al., arXiv
2401.10241). Autograd's graph leads from the outputs y back to the inputs x and to the weights. Take
an affine layer y = x Wᵀ. Its node gets dy, and computes two products:

    dx = dy W       for the nodes before it: on the way from y to x
    dW = dyᵀ x      for the weights: off that way

The first part goes the way from y to x only, and notes the dy of each node at which weights branch
off: a fork. The second part starts at each fork with its dy, and goes only where the weights are.
Autograd skips what nobody asks for, so a fork computes dx in the first part and dW in the second.
(A `torch.autograd.Function` written in Python computes both, twice; and a hook of an activation
runs twice.)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_map_only

from minidist.common.replay import Replay
from minidist.common.tensors_in import tensors_of

Gradients = list[torch.Tensor | None]
Graph = tuple[list[torch.Tensor], list[GradientEdge | None]]


class Stage:
    """One stage, and the activations of one batch's micro-batches in flight.

    module: its layers, or a strategy around them. recompute: keep the inputs only, and compute
    forward again when backward needs the rest.
    """

    def __init__(self, module: nn.Module, recompute: bool = False) -> None:
        self.module, self.recompute = module, recompute
        # By micro-batch: gives the received tensors that need a gradient, and the graph's edge at
        # each output. The edges hold the graph, so the outputs themselves may be freed.
        self._kept: dict[int, Callable[[], Graph]] = {}
        self._deferred: dict[int, list[Callable[[], None]]] = {}

    def forward(
        self, microbatch: int, x: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> Any:
        """The outputs for the inputs `x`, or their loss. With `recompute`, which makes no graph
        yet, each float in it may need a gradient. Under `torch.no_grad()` nothing is kept."""

        def compute() -> Any:
            y = self.module(x)
            return y if loss is None else loss(y)

        if not torch.is_grad_enabled():
            return compute()
        if not self.recompute:
            made = compute()
            graph = self._graph(x, made)
            self._kept[microbatch] = lambda: graph
            return made
        replay = Replay(self.module, tensors_of(x))

        def again() -> Graph:
            with replay.same_again():
                return self._graph(x, compute())

        self._kept[microbatch] = again
        with torch.no_grad():
            made = compute()
        return tree_map_only(
            torch.Tensor, lambda y: y.detach().requires_grad_(y.is_floating_point()), made
        )

    def _graph(self, x: Any, made: Any) -> Graph:
        ends = [y for y in tensors_of(made) if y.is_floating_point()]
        # The leaves among the inputs are those for which a gradient is sent back.
        received = [each for each in tensors_of(x) if each.requires_grad and each.is_leaf]
        return received, [get_gradient_edge(y) if y.requires_grad else None for y in ends]

    def _begin(self, microbatch: int, gradients: Gradients) -> tuple[Any, Any, Any]:
        """The received tensors; the edges, and what comes in there."""
        received, ends = self._kept.pop(microbatch)()
        ways = [(y, dy) for y, dy in zip(ends, gradients, strict=True) if y and dy is not None]
        return received, [y for y, _ in ways], [dy for _, dy in ways]

    def backward(self, microbatch: int, gradients: Gradients) -> list[torch.Tensor]:
        """Add to the gradients of the weights, and return those of the inputs. `gradients`: of the
        floats among the outputs, or of the loss; None for one that needs none."""
        received, ends, gradients = self._begin(microbatch, gradients)
        if ends:
            torch.autograd.backward(ends, gradients)
        return _or_zeros(received, [x.grad for x in received])

    def backward_inputs(self, microbatch: int, gradients: Gradients) -> list[torch.Tensor]:
        """Return the gradients of the inputs. `backward_weights` does the rest."""
        received, ends, gradients = self._begin(microbatch, gradients)
        found, left = backward_inputs(ends, gradients, received) if ends else ([], [])
        self._deferred[microbatch] = left
        return _or_zeros(received, found or [None] * len(received))

    def backward_weights(self, microbatch: int) -> None:
        """Add the gradients of the weights, which `backward_inputs` has left out."""
        for add in self._deferred.pop(microbatch):
            add()


def _or_zeros(received: list[torch.Tensor], found: Gradients) -> list[torch.Tensor]:
    """The gradients of what came in: zeros for what was not used."""
    pairs = zip(received, found, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


# ---- backward in two parts ---------------------------------------------------------------------


def backward_inputs(
    ends: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], list[Callable[[], None]]]:
    """The gradients for `inputs`; and functions, one for each fork, that add to those of the
    weights. The graph ends in `ends`, where `gradients` come in.
    Without inputs everything is left for later."""
    if not inputs:
        return [], [partial(torch.autograd.backward, ends, gradients)]
    forks = _forks(ends, {get_gradient_edge(x).node for x in inputs})
    uses = Counter(weight for _, weights in forks for weight in weights)
    # From the later use of a weight, the way to it leads over the earlier: both parts at once.
    several = [weight for weight, count in uses.items() if count > 1]
    edges = [edge for own, _ in forks for edge in own]
    wanted: list[Any] = [*inputs, *several, *edges]
    found = torch.autograd.grad(
        ends, wanted, gradients, retain_graph=bool(forks), allow_unused=True
    )
    for weight, own in zip(several, found[len(inputs) :], strict=False):
        if own is not None:
            weight.grad = own if weight.grad is None else weight.grad + own
    at = dict(zip(edges, found[len(inputs) + len(several) :], strict=True))
    left: list[Callable[[], None]] = []
    for own_edges, weights in forks:
        once = [weight for weight in weights if uses[weight] == 1]
        reached = {edge: at[edge] for edge in own_edges if at[edge] is not None}
        if once and reached:
            ready = list(reached), list(reached.values())
            left.append(partial(torch.autograd.backward, *ready, inputs=once))
    return list(found[: len(inputs)]), left


def _forks(
    ends: Sequence[GradientEdge], inputs: set[Node]
) -> list[tuple[list[GradientEdge], list[torch.Tensor]]]:
    """Of each fork the edges by which gradients come to it, and the weights that branch off there.
    An end from which no way leads to the inputs is a fork as well."""
    edges: dict[Any, dict[int, None]] = defaultdict(dict)  # by which gradients come to a node
    for end in ends:
        edges[end.node][end.output_nr] = None
    leads_on: dict[Any, bool] = {}  # to an input
    weights: dict[Any, dict[torch.Tensor, None]] = {}  # off the way, at or beyond a node
    roots = dict.fromkeys(end.node for end in ends)
    for node in _nodes(roots):
        following = [(child, number) for child, number in node.next_functions if child]
        for child, number in following:
            edges[child][number] = None
        leads_on[node] = node in inputs or any(leads_on[child] for child, _ in following)
        leaf = getattr(node, "variable", None)
        weights[node] = {} if leaf is None or node in inputs else {leaf: None}
        for child, _ in following:
            if not leads_on[child]:
                weights[node] |= weights[child]
    forks = [node for node in weights if weights[node] and (leads_on[node] or node in roots)]
    return [([GradientEdge(node, i) for i in edges[node]], list(weights[node])) for node in forks]


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """All nodes of a graph, each after those that it leads to."""
    done: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack[-1]
        new = [child for child, _ in node.next_functions if child and child not in done]
        stack += new
        if not new:
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
