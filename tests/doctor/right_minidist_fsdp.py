"""minidist's FullyShardedDataParallel, by md.launch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import minidist as md


def train():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = md.zoo.digits(torch.float32)
    model = md.zoo.mlp(64, 32, 10, dtype=torch.float32)
    model = md.FullyShardedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        mine = slice(48 * step + rank, 48 * (step + 1), world_size)
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


if __name__ == "__main__":
    md.launch(train, world_size=2)
