"""A context that comes too late

facebookresearch/ClassyVision#706, speechbrain/speechbrain#1802. DistributedDataParallel decides in
the forward pass whether to average. `no_sync()` around the backward pass alone changes nothing:
every micro-batch is averaged. The result is right, and costs four times the bytes here.
"""

from functools import partial

from torch import nn
from workshop import Form, loss_of, mean, replicas

MICRO = 4


class Averaged(nn.Module):
    """As DistributedDataParallel does it."""

    def __init__(self, module):
        super().__init__()
        self.module, self.sync = module, True
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: mean(p.grad) if self.decided else None)

    def forward(self, inputs):
        self.decided = self.sync
        return self.module(inputs)


def wrap(model, make_optimizer):
    model, optimizer = replicas(model, make_optimizer)
    return Averaged(model), optimizer


def step(model, optimizer, micro_batches, early):
    optimizer.zero_grad()
    total = 0.0
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        model.sync = last or not early
        loss = loss_of(model, batch) / len(micro_batches)
        model.sync = last  # no_sync() begins here
        loss.backward()
        model.sync = True
        total += loss.item()
    optimizer.step()
    return total


WRONG = Form(wrap, partial(step, early=False))
RIGHT = Form(wrap, partial(step, early=True))
SEEN = {"bytes": ""}
