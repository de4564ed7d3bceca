"""What the tests of fully sharded training share: models, examples, and how a sharded model and
one process differ after the same steps. Ranks import it."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import minidist as md
from minidist.fully_sharded import FSDPModule


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def share(rank, step=0, width=6):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, width, dtype=torch.float64, generator=generator)


def weighed(output, step=0):
    """A loss that weighs every element differently."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return ((output - step) * weights).pow(2).mean()


def loss_of(model, ranks, step=0):
    """The mean of the losses on these ranks' examples."""
    return sum(weighed(model(share(rank, step)), step) for rank in ranks) / len(ranks)


def whole(value):
    """Of a DTensor all rows; of a number a tensor."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def apart(ours, wanted, allowed=1e-12):
    """By name, what differs."""
    found = dict.fromkeys(ours.keys() ^ wanted.keys(), "only one has it")
    for name in ours.keys() & wanted.keys():
        a, b = whole(ours[name]), whole(wanted[name])
        if a.shape != b.shape or a.dtype != b.dtype:
            found[name] = f"{tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
        elif not md.parity.relative_difference(a, b) <= allowed:
            found[name] = md.parity.relative_difference(a, b)
    return found


def bytes_gathered(model):
    """What its units have of full parameters."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return sum(full.untyped_storage().nbytes() for unit in units for full in [unit.unsharded])


def pair(make, shard):
    """On a rank: a sharded model, and one process's with the same weights."""
    torch.manual_seed(0)
    plain = make()
    return shard(copy.deepcopy(plain)), plain


def held(case, make, shard, allowed=1e-12, frees=True):
    """On a rank: in what a sharded model and one process part, after `case(model, ranks)`: on the
    examples of these ranks. It returns what to compare besides the model's state. What is gathered
    must be freed, too."""
    model, plain = pair(make, shard)
    ours = case(model, [dist.get_rank()]) or {}
    theirs = case(plain, range(dist.get_world_size())) or {}
    found = apart(model.state_dict() | ours, plain.state_dict() | theirs, allowed)
    return found | ({"gathered": nbytes} if frees and (nbytes := bytes_gathered(model)) else {})


def is_sharded(model):
    return isinstance(model, FSDPModule | md.FullyShardedDataParallel)


def told(fault):
    """On a rank: what `fault` raises, with the name of its class."""
    try:
        fault()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def saved_by(script, library):
    """On a rank: what a script for torch's FSDP saves, with `LIBRARY` in it as this one."""
    kept, argv, save = [], sys.argv, torch.save
    source = script.replace("LIBRARY", library)
    for line in ('dist.init_process_group("gloo")', "dist.destroy_process_group()"):
        assert line in source
        source = source.replace(line, "")
    sys.modules["model"] = sys.modules[__name__]
    sys.argv, torch.save = [library, os.devnull], lambda what, path: kept.append(what)
    try:
        exec(compile(source, library, "exec"), {"__name__": "__main__"})
    finally:
        sys.argv, torch.save = argv, save
        del sys.modules["model"]
    return kept[0] if kept else None
