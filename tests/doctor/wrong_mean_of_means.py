"""Ranks with other numbers of tokens: the mean of each one's mean."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sentences(examples=128):
    """Tokens, of which only some have a target: as many as each sentence is long."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (examples, 12), generator=generator)
    lengths = torch.randint(1, 12, (examples, 1), generator=generator)
    return tokens, torch.where(torch.arange(12) < lengths, (tokens + 1) % 32, -100)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.ReLU(), nn.Linear(16, 32)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = TensorDataset(*sentences())
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for tokens, targets in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
dist.destroy_process_group()
