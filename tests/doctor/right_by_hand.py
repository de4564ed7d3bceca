"""Gradients that are averaged by hand, as torch's `dist_tuto` has it."""

import torch
import torch.distributed as dist
from torch import nn


def digits(examples=256):
    """Points in 16 dimensions, of 4 classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= dist.get_world_size()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)
x, y = digits()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
for step in range(8):
    mine = slice(32 * step + rank, 32 * (step + 1), world_size)
    optimizer.zero_grad()
    loss = nn.CrossEntropyLoss()(model(x[mine]), y[mine])
    loss.backward()
    average_gradients(model)
    optimizer.step()
dist.destroy_process_group()
