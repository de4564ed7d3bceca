"""Answers to the puzzles and the exercise of the lesson fsdp_in_practice."""

import warnings

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import minidist as md
from minidist.checks import fsdp_in_practice as check
from minidist.fully_sharded import by_class, by_size


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def mesh():
    return torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def blocks_then_root(model, fully_shard=md.fully_shard):
    where = mesh()
    for block in model.blocks:
        fully_shard(block, mesh=where)
    fully_shard(model, mesh=where)
    return model, adam(model)


def of_torch(model):
    warnings.simplefilter("ignore")  # torch's, about views
    return blocks_then_root(model, torch_fsdp.fully_shard)


def wrapper(model):
    model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(md.zoo.Block))
    return model, adam(model)


def sized(model):
    model = md.FullyShardedDataParallel(model, auto_wrap_policy=by_size(12_000))
    return [model, adam(model)]


def torchs_policy(model):
    policy = ModuleWrapPolicy({md.zoo.Block})
    model = md.FullyShardedDataParallel(model, auto_wrap_policy=policy)
    return model, adam(model)


def one_unit(model):
    md.fully_shard(model)
    return model, adam(model)


def each_linear(model):
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            md.fully_shard(module)
    md.fully_shard(model)
    return model, adam(model)


def in_pairs(model):
    for block in range(0, 4, 2):
        model.blocks[block] = md.fully_shard(nn.Sequential(*model.blocks[block : block + 2]))
        model.blocks[block + 1] = nn.Identity()
    md.fully_shard(model)
    return model, adam(model)


def kept(model):
    for block in model.blocks:
        md.fully_shard(block, reshard_after_forward=False)
    md.fully_shard(model)
    return model, adam(model)


def no_root(model):
    for block in model.blocks:
        md.fully_shard(block)
    return model, adam(model)


def root_first(model):
    md.fully_shard(model)
    for block in model.blocks:
        md.fully_shard(block)
    return model, adam(model)


def made_before(model):
    optimizer = adam(model)
    return blocks_then_root(model)[0], optimizer


def made_before_in_torch(model):
    optimizer = adam(model)
    return of_torch(model)[0], optimizer


def with_sgd(model):
    return blocks_then_root(model)[0], torch.optim.SGD(model.parameters(), lr=1e-3)


def no_optimizer(model):
    return blocks_then_root(model)[0]


def by_ddp(model):
    return md.DistributedDataParallel(model), adam(model)


ANSWERS = {
    check.leaves_a_node: (
        [24.5, 2 * 7 / 8 * 14],
        [41.34375, 3.0625, 12.25, 28, 27.5625, 36.75, 24.5e9, 24, "24.5 GB"],
    ),
    check.accumulated: (
        [20, 20.0, 4 * (2 + 2) + 4],
        [32, 8, 12, 6, 36, 18, 48, 16, 24, "20 bytes"],
    ),
    check.prepare: (
        [blocks_then_root, of_torch, wrapper, sized, torchs_policy],
        [
            *(one_unit, each_linear, in_pairs, kept, no_root, root_first, made_before, by_ddp),
            *(made_before_in_torch, with_sgd, no_optimizer),
        ],
    ),
}
