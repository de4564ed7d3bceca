"""Two models and two optimizers in turns, after torch's DCGAN example."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6) + 1, torch.randn(64, 3))
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
makes = DistributedDataParallel(generator)
judges = DistributedDataParallel(discriminator)
trains_judge = torch.optim.SGD(judges.parameters(), lr=0.1)
trains_maker = torch.optim.SGD(makes.parameters(), lr=0.1)


def loss(found, label):
    return F.binary_cross_entropy_with_logits(found, torch.full_like(found, label))


for real, noise in DataLoader(data, 8, sampler=DistributedSampler(data)):
    trains_judge.zero_grad()
    loss(judges(real), 1.0).backward()
    made = makes(noise)
    loss(judges(made.detach()), 0.0).backward()
    trains_judge.step()
    trains_maker.zero_grad()
    loss(judges(made), 1.0).backward()  # its gradients in the judge are thrown away
    trains_maker.step()
dist.destroy_process_group()
