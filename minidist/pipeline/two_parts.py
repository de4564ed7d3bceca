"""Backward in two parts, of which neither does the other's work: zero bubble.

Autograd's graph leads from the outputs y back to the inputs x and to the weights. Take an affine
layer y = x Wᵀ. Its node gets dy, and computes two products:

    dx = dy W       for the nodes before it: on the way from y to x
    dW = dyᵀ x      for the weights: off that way

The first part of backward goes the way from y to x only, and notes the dy of each node at which
weights branch off: a fork. The second part starts at each fork with its dy, and goes only where the
weights are. Autograd skips what nobody asks for, so a fork computes dx in the first part and dW in
the second. (A `torch.autograd.Function` written in Python computes both, twice; and a hook of an
activation runs twice.)
Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def backward_inputs(
    ends: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], list[Callable[[], None]]]:
    """The gradients for `inputs`; and functions, one for each fork, that add to those of the
    weights. The graph ends in `ends`, where `gradients` come in (None stands for a loss's own, 1).
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
            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                hook(weight)
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
