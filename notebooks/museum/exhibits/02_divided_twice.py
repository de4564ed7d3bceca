"""Divided by each stage

deepspeedai/DeepSpeed#8152 (0.19.2). A pipeline divides the loss by the number of micro-batches, in
its last stage; each stage before it divides the gradient that arrives once more.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from workshop import Form, replicas

MICRO = 2


def step(model, optimizer, micro_batches, again):
    """Rank 0 has the first stage, rank 1 the second. Each sees all micro-batches."""
    optimizer.zero_grad()
    everyone = [None, None]
    dist.all_gather_object(everyone, micro_batches)
    n, total = 2 * len(micro_batches), torch.zeros(1, dtype=torch.float64)
    for inputs, targets in everyone[0] + everyone[1]:
        if dist.get_rank() == 0:
            out = model[:2](inputs)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad / n if again else grad)
        else:
            out = torch.empty(len(inputs), 32, dtype=torch.float64)
            dist.recv(out, 0)
            loss = F.cross_entropy(model[2](out.requires_grad_()), targets) / n
            loss.backward()
            dist.send(out.grad, 0)
            total += loss.item()
    optimizer.step()
    for name, p in model.named_parameters():  # each rank has the other's stage, too
        dist.broadcast(p.data, 0 if name.startswith("0.") else 1)
    dist.broadcast(total, 1)
    return total.item()


WRONG = Form(replicas, partial(step, again=True))
RIGHT = Form(replicas, partial(step, again=False))
SEEN = {"watch": "0.25 times", "parity": "0.weight"}
