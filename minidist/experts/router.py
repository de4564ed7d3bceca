"""Which experts a token takes, and how much each of them counts.

    Switch, GShard, Mixtral    scores are the softmax of the logits
    DeepSeek-V3                scores are sigmoids; a token takes the best of score + bias, and
                               weighs them by their scores alone

The k weights are divided by their sum in GShard, Mixtral and DeepSeek-V3. With k = 1 (Switch) they
are not: a weight that is always 1 would teach the router nothing.

Fedus et al. (arXiv 2101.03961), Jiang et al. (arXiv 2401.04088), DeepSeek-AI (arXiv 2412.19437),
section 2.1.2. Lesson: experts.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Routing(NamedTuple):
    """weights, chosen: (N, k). scores: (N, E), before any bias."""

    weights: torch.Tensor
    chosen: torch.Tensor
    scores: torch.Tensor

    def counts(self) -> torch.Tensor:
        """(E,): the rows for each expert."""
        return self.chosen.flatten().bincount(minlength=self.scores.shape[1])


class Router(nn.Module):
    """Rows (N, C) to a Routing, in float32 at least: in bfloat16 some tokens would take others.

    sigmoid: scores as DeepSeek-V3 has them, else softmax.
    normalize: whether the k weights are divided by their sum; None: if k is more than 1.
    nodes, of_nodes: the experts are on so many nodes, and a token takes those of so many at most.

    `bias` (E,) is a buffer: `update_bias` moves it, not autograd. (`model.bfloat16()` would convert
    it, and steps of 0.001 be lost from 0.5 on. Autocast leaves it alone.)

    Raises ValueError for k above the number of experts, and for k = 1 with `normalize`.
    """

    bias: torch.Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        *,
        sigmoid: bool = False,
        normalize: bool | None = None,
        nodes: int = 1,
        of_nodes: int | None = None,
    ) -> None:
        super().__init__()
        of_nodes = of_nodes or nodes
        if not 1 <= k <= experts // nodes * of_nodes or experts % nodes or of_nodes > nodes:
            where = f", on {of_nodes} of {nodes} nodes" if nodes > 1 else ""
            raise ValueError(f"a token cannot take {k} of {experts} experts{where}")
        if k == 1 and normalize:
            raise ValueError("k=1, normalize=True: all weights are 1, and the router never learns")
        self.linear, self.k = nn.Linear(width, experts, bias=False), k
        self.sigmoid, self.normalize = sigmoid, k > 1 if normalize is None else normalize
        self.nodes, self.of_nodes = nodes, of_nodes
        self.register_buffer("bias", torch.zeros(experts))
        # The rows for each expert since `update_bias`, and the ranks that share a batch.
        self.seen = torch.zeros(experts, dtype=torch.long)
        self.batch_group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> Routing:
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(exact), self.linear.weight.to(exact))  # (N, E)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        chosen = self.choose(scores.detach() + self.bias)
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights, chosen, scores)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """(N, E) to the k best of each row, (N, k): of equal ones the first, as `topk` may not."""
        if self.of_nodes < self.nodes:  # the nodes whose best k / M scores have the largest sum
            by_node = scores.unflatten(1, (self.nodes, -1))  # (N, nodes, E / nodes)
            best = by_node.topk(max(1, self.k // self.of_nodes), -1).values.sum(-1)
            kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : self.of_nodes]
            outside = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
            scores = by_node.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
