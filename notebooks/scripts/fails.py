"""Rank 1 raises an error, and the others wait for it: run it by torchrun."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("my batch is empty")
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
