"""Uphill

meta-pytorch/torchft#233, DiLoCo. The outer optimizer is given new minus old for a gradient; it
should be old minus new. Here each inner step is followed by an outer one, of SGD with learning
rate 1.
"""

from functools import partial

from workshop import Form, mean, replicas, train


def wrap(model, make_optimizer):
    model, optimizer = replicas(model, make_optimizer)
    model.old = [p.detach().clone() for p in model.parameters()]
    return model, optimizer


def step(model, optimizer, micro_batches, sign):
    loss = train(model, optimizer, micro_batches, average=lambda model: None)
    for old, p in zip(model.old, model.parameters(), strict=True):
        pseudogradient = sign * (old - p.data)
        mean(pseudogradient)
        old -= pseudogradient
        p.data.copy_(old)
    return loss


WRONG = Form(wrap, partial(step, sign=-1))
RIGHT = Form(wrap, partial(step, sign=1))
SEEN = {"watch": "-1 times", "parity": "step 1", "curve": ""}
