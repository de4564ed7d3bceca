"""Train on the digits with any number of ranks, on any number of machines; go on after a fault.

    python train.py                                             two ranks, on this machine
    torchrun --standalone --nproc-per-node 4 train.py           four, started by torchrun
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
        --local-addr ADDRESS train.py                           the same line on each node, with its
                                                                own address, which others know

A run that ended, or was killed, goes on when it is started again with the same `--folder`. The
number of ranks may be another one that divides 48: a step trains on the same examples whatever that
number is. `train.slurm` and `train_over_ssh.sh` start it on several machines.
Lesson: surviving_failures.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import minidist as md
from minidist.course import zoo

BATCH = 48  # examples of a step, over all ranks, which share it evenly


class Seen:
    """How often each example was trained on, by all ranks together."""

    def __init__(self, examples: int, device: torch.device) -> None:
        self.counts = torch.zeros(examples, dtype=torch.int64, device=device)

    def add(self, mine: torch.Tensor) -> None:
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        # A batch that ends an epoch and begins the next may have an example twice.
        self.counts += torch.cat(everyone).bincount(minlength=len(self.counts))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts.copy_(state["counts"])


def main(folder: str, steps: int, every: int, pause: float) -> str:
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), md.rank.device()
    images, labels = zoo.digits(dtype=torch.float64)
    numbers = torch.arange(len(labels))
    batches = md.saving.Batches(TensorDataset(images, labels, numbers), BATCH)
    model = md.DistributedDataParallel(zoo.mlp(64, 32, 10, dtype=torch.float64).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = Seen(len(labels), device)
    parts = {"model": model, "optimizer": optimizer, "data": batches, "seen": seen}

    with md.saving.Checkpoints(folder) as checkpoints:
        begin = checkpoints.load(**parts) or 0
        for step, batch in zip(range(begin + 1, steps + 1), batches, strict=False):
            inputs, targets, mine = (each.to(device) for each in batch)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.add(mine)

            total = loss.detach()
            dist.all_reduce(total)
            if rank == 0:
                with open(Path(folder, "losses.csv"), "a") as file:
                    file.write(f"{step},{world_size},{total.item() / world_size:.6f}\n")
            if step % every == 0 or step == steps:
                checkpoints.save(step, **parts)
            time.sleep(pause)
    return f"rank {rank} of {world_size} went from step {begin} to {steps}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="runs/digits", help="of checkpoints, seen by all nodes")
    parser.add_argument("--steps", type=int, default=150, help="over all restarts")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    said = md.launch(main, *vars(parser.parse_args()).values(), world_size=2)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, every rank comes this way
        print("\n".join(said))
