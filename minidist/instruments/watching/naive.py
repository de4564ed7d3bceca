"""The idea (lesson: wrong_in_silence): whose examples are in a gradient?

Each rank has gradients of its own micro-batches, g₁ … gₙ. Whatever a strategy does with them, the
optimizer should get a sum of them, g = w₁g₁ + … + wₙgₙ, and each weight should be the micro-batch's
share of all examples. A gradient has far more elements than there are micro-batches, so least
squares finds the weights. They say what went wrong: a sum for a mean (all are n times as large), a
rank that kept its own (1 and 0 for ½ and ½), a micro-batch that is missing. What no weights explain
came from elsewhere.
"""

from collections.abc import Sequence

import torch


def mixture(g: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The weights (n,) of n gradients in g, all of one shape; and which part of g, from 0 to 1, is
    something else. Lesson: wrong_in_silence."""
    columns = torch.stack([each.flatten() for each in gradients], dim=1).double()  # (elements, n)
    wanted = g.flatten().double()
    weights = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
    left = (wanted - columns @ weights).norm() / wanted.norm()
    return weights, left.item()
