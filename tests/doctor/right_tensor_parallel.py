"""A layer's features on all ranks, which see the same examples, as torch's example has it."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.relu, self.out_proj = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
model = parallelize_module(ToyModel(), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for i in range(10):
    torch.manual_seed(i)  # the input is the same on all ranks
    output = model(torch.rand(20, 10))
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
