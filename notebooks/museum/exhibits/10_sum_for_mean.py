"""A sum for a mean

pytorch/pytorch#162338. `fully_shard` asked gloo to reduce_scatter with the operation AVG, and got
the sum, without a word. (Torch 2.13 divides.) Here nobody divides.
"""

from functools import partial

import torch
import torch.distributed as dist
from workshop import Form, replicas, train


def average(model, by):
    """Each rank averages its half of the gradients, and both are gathered."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    halves = list(flat.chunk(2))
    half = torch.empty_like(halves[0])
    dist.reduce_scatter(half, halves)
    half /= by
    dist.all_gather(halves, half)
    sizes = [p.numel() for p in model.parameters()]
    for p, grad in zip(model.parameters(), flat.split(sizes), strict=True):
        p.grad = grad.view_as(p)


WRONG = Form(replicas, partial(train, average=partial(average, by=1)))
RIGHT = Form(replicas, partial(train, average=partial(average, by=2)))
SEEN = {"watch": "2 times", "parity": "step 1"}
