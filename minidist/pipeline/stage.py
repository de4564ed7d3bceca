"""One stage computes: forward, backward, or backward in two parts.

Backward in two parts does nothing twice. Autograd's graph leads from the outputs y back to the
inputs x and to the weights. Take an affine layer y = x Wᵀ. Its node gets dy, and computes two
products:

    dx = dy W       for the nodes before it: on the way from y to x
    dW = dyᵀ x      for the weights: off that way

The first part of backward goes the way from y to x only, and notes the dy of each node at which
weights branch off: a fork. The second part starts at each fork with its dy, and goes only where the
weights are. Autograd skips what nobody asks for, so a fork computes dx in the first part and dW in
the second. (A `torch.autograd.Function` written in Python computes both, twice.)
Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_map_only

from minidist.common.replay import Replay
from minidist.common.tensors_in import tensors_of
from minidist.common.wrapper import Wrapper

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


def keywords_of(layer: nn.Module) -> set[str]:
    """The keyword arguments that a layer takes: all names of its `forward` but the first."""
    while isinstance(layer, Wrapper):
        layer = layer.module
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
            return compute(tree_map_only(torch.Tensor, lambda x: x.detach().clone(), inputs))

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


# ---- backward in two parts ---------------------------------------------------------------------


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
