"""Sealed: a norm

The model is sharded, by rows of each weight. Gradients are clipped by their norm.
"""

from functools import partial

from workshop import Form, train

import minidist as md

CLIP = 0.2


def wrap(model, make_optimizer):
    md.fully_shard(model)
    return model, make_optimizer(model.parameters())


def clip(model):
    grads = [p.grad.to_local() for p in model.parameters()]
    norm = sum(grad.square().sum() for grad in grads).sqrt()
    for grad in grads:
        grad *= (CLIP / (norm + 1e-6)).clamp(max=1)


WRONG = Form(wrap, partial(train, average=clip))
