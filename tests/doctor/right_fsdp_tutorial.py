"""Layers that are sharded by fully_shard, as torch's tutorial has them."""

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
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 4)
)
for layer in model[:3]:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = TensorDataset(*digits())
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
