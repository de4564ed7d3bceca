"""Two ranks by hand, as torch's own tutorials start them: run it by `python spawned.py`."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, world_size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/meeting", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)  # every rank ends with the sum
    if rank == 0:
        print("the sum is", x.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(2, folder), nprocs=2)
