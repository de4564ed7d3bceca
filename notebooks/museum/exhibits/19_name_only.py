"""ZeRO-2 by name

karpathy/nanochat#566. An optimizer called "ZeRO-2 style" takes gradients after the backward pass:
by then each rank holds them whole. ZeRO-2 keeps those of the rank's own parameters alone.
"""

from functools import partial

import torch.distributed as dist
from workshop import Form, average, mean, replicas, train


def wrap(model, make_optimizer, as_they_come):
    model, optimizer = replicas(model, make_optimizer)

    def reduce(p, owner):
        mean(p.grad)
        if owner != dist.get_rank():
            p.grad = None

    for number, p in enumerate(model.parameters()):
        if as_they_come:
            p.register_post_accumulate_grad_hook(partial(reduce, owner=number // 2))
    return model, optimizer


def step(model, optimizer, micro_batches, average):
    loss = train(model, optimizer, micro_batches, average)
    for number, p in enumerate(model.parameters()):
        dist.broadcast(p.data, number // 2)
    return loss


WRONG = Form(partial(wrap, as_they_come=False), partial(step, average=average))
RIGHT = Form(partial(wrap, as_they_come=True), partial(step, average=lambda model: None))
SEEN = {"memory": ""}
