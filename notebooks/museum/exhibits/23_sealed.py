"""Sealed: a schedule

The learning rate is multiplied by 0.9 after each second step.
"""

import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from workshop import Form, replicas, train


def wrap(model, make_optimizer):
    model, optimizer = replicas(model, make_optimizer)
    model.schedule = StepLR(optimizer, step_size=2, gamma=0.9)
    return model, optimizer


def step(model, optimizer, micro_batches):
    loss = train(model, optimizer, micro_batches)
    for _ in range(dist.get_world_size()):
        model.schedule.step()
    return loss


def alone(optimizer):
    """What one process does."""
    schedule = StepLR(optimizer, step_size=2, gamma=0.9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())


WRONG = Form(wrap, step)
