"""Reduced once

deepspeedai/DeepSpeed#8224, ZeRO-2 from 0.18.3 to 0.19.3. A module that is used twice gets its
gradient in two parts, if each use is checkpointed. The first part is averaged and taken away; it
is noted that the parameter has been reduced, and the second part is lost.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from workshop import Form, loss_of, mean, replicas


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.front, self.shared, self.last = nn.Linear(64, 24), nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.front(x)
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.shared(x)), x, use_reentrant=True)
        return self.last(x)


def wrap(model, make_optimizer, once):
    model, optimizer = replicas(model, make_optimizer)
    model.reduced = {}

    def reduce(p):
        if not (once and p in model.reduced):
            mean(p.grad)
            model.reduced[p] = model.reduced.get(p, 0) + p.grad
            p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce)
    return model, optimizer


def step(model, optimizer, micro_batches):
    loss = loss_of(model, micro_batches[0])
    loss.backward()
    for p in model.parameters():
        p.grad = model.reduced.pop(p)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


model = Twice
WRONG = Form(partial(wrap, once=True), step)
RIGHT = Form(partial(wrap, once=False), step)
SEEN = {"watch": "no mixture", "parity": "shared", "bytes": ""}
