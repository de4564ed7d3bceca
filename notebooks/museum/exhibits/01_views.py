"""Gradients that left their buffer

facebookresearch/fairscale#354, ShardedDDP. What is averaged is one flat buffer, of which each
gradient is a view. `zero_grad(set_to_none=True)` sets gradients to None, so the next backward pass
makes new ones beside the buffer, and the buffer is averaged all the same. The owner's parameters
are sent to all, so that the ranks agree.
"""

from functools import partial

import torch
import torch.distributed as dist
from workshop import Form, loss_of, mean, replicas


def wrap(model, make_optimizer):
    model, optimizer = replicas(model, make_optimizer)
    sizes = [p.numel() for p in model.parameters()]
    model.buffer = torch.zeros(sum(sizes), dtype=torch.float64)
    for p, view in zip(model.parameters(), model.buffer.split(sizes), strict=True):
        p.grad = view.view_as(p)
    return model, optimizer


def step(model, optimizer, micro_batches, set_to_none):
    loss = loss_of(model, micro_batches[0])
    loss.backward()
    mean(model.buffer)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    for number, p in enumerate(model.parameters()):
        dist.broadcast(p.data, number % dist.get_world_size())
    return loss.item()


WRONG = Form(wrap, partial(step, set_to_none=True))  # today's default
RIGHT = Form(wrap, partial(step, set_to_none=False))
SEEN = {"watch": "rank 0: 1 for 0.5", "parity": "step 2", "memory": ""}
