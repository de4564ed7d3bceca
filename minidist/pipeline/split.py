"""Backward in two parts, without doing anything twice (lesson 5).

Autograd's graph leads from the outputs y back to the inputs x and to the weights. Take an affine
layer y = x Wᵀ. Its node gets dy, and computes two products:

    dx = dy W       for the nodes before it: on the way from y to x
    dW = dyᵀ x      for the weights: off that way

The first part of backward goes the way from y to x only, and notes the dy of each node at which
weights branch off: a fork. The second part starts at each fork with its dy, and goes only where the
weights are. Autograd skips what nobody asks for, so a fork computes dx in the first part and dW in
the second. (A `torch.autograd.Function` written in Python computes both, twice.)
Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Fork = tuple[list[GradientEdge], list[torch.Tensor]]


@dataclass
class Deferred:
    """A fork: the gradients that have come to it, and the weights that branch off there (None: all
    weights beyond)."""

    edges: list[GradientEdge]
    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor] | None

    def run(self) -> None:
        """Add to the weights' gradients."""
        torch.autograd.backward(self.edges, self.gradients, inputs=self.weights)


def backward_inputs(
    end: GradientEdge, gradient: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, list[Deferred]]:
    """The gradient for `x`, and what is left to do for the weights. The graph ends in `end`, where
    `gradient` comes in (None stands for a loss's own, 1). Inputs that get no gradient leave
    everything for later."""
    forks = _forks(end, get_gradient_edge(x).node) if x.requires_grad else None
    if forks is None:
        return None, [Deferred([end], [gradient], None)]
    uses = Counter(weight for _, weights in forks for weight in weights)
    # From the later use of a weight, the way to it leads over the earlier: both parts at once.
    several = [weight for weight, count in uses.items() if count > 1]
    edges = [edge for own, _ in forks for edge in own]
    wanted: list[Any] = [x, *several, *edges]
    found = torch.autograd.grad(
        [end], wanted, [gradient], retain_graph=bool(forks), allow_unused=True
    )
    for weight, own in zip(several, found[1:], strict=False):
        weight.grad = own if weight.grad is None else weight.grad + own
    at = dict(zip(edges, found[1 + len(several) :], strict=True))
    left = []
    for own_edges, weights in forks:
        once = [weight for weight in weights if uses[weight] == 1]
        reached = {edge: at[edge] for edge in own_edges if at[edge] is not None}
        if once and reached:
            left.append(Deferred(list(reached), list(reached.values()), once))
    return found[0], left


def _forks(end: GradientEdge, x: Node) -> list[_Fork] | None:
    """The nodes on the way to `x` from which weights branch off: the edges by which gradients come
    to each, and those weights. None if no way leads to `x`."""
    edges: dict[Any, dict[int, None]] = defaultdict(dict)  # by which gradients come to a node
    edges[end.node][end.output_nr] = None
    leads_to_x: dict[Any, bool] = {}
    weights: dict[Any, dict[torch.Tensor, None]] = {}  # off the way, at or beyond a node
    forks = []
    for node in _nodes(end.node):
        following = [(child, number) for child, number in node.next_functions if child]
        for child, number in following:
            edges[child][number] = None
        leads_to_x[node] = node is x or any(leads_to_x[child] for child, _ in following)
        leaf = getattr(node, "variable", None)
        weights[node] = {} if leaf is None or node is x else {leaf: None}
        for child, _ in following:
            if not leads_to_x[child]:
                weights[node] |= weights[child]
        if leads_to_x[node] and weights[node]:
            forks.append((node, list(weights[node])))
    if not leads_to_x[end.node]:
        return None
    return [([GradientEdge(node, i) for i in edges[node]], found) for node, found in forks]


def _nodes(root: Any) -> Iterator[Any]:
    """All nodes of a graph, each after those that it leads to."""
    done: set[Any] = set()
    stack = [root]
    while stack:
        node = stack[-1]
        new = [child for child, _ in node.next_functions if child and child not in done]
        stack += new
        if not new:
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
