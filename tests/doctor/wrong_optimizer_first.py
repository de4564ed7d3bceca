"""The optimizer is made before fully_shard makes new parameters."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits(examples=256):
    """Points in 16 dimensions, of 4 classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 16, generator=generator)
    return x, x[:, :4].argmax(1)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
fully_shard(model)
data = TensorDataset(*digits())
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
dist.destroy_process_group()
