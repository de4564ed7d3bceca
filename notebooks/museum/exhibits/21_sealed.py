"""Sealed: one loss for all ranks

The loss of the whole batch is known on each rank before the backward pass, and goes into the log.
"""

import torch.distributed as dist
from museum import Form, average, loss_of, replicas


def step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    loss = loss_of(model, micro_batches[0])
    loss = loss / dist.get_world_size()
    dist.all_reduce(loss)
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()


WRONG = Form(replicas, step)
