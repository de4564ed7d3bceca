"""Answers to the puzzles and the exercise of the lesson fsdp_in_practice."""

import warnings
from functools import partial

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import minidist as md
from minidist.course.checks import fsdp_in_practice as check
from minidist.fully_sharded import by_class


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


def by_parts(model, fully_shard=md.fully_shard):
    where = mesh()
    for block in model.blocks:
        for part in block.mlp, block.qkv, block.out:
            fully_shard(part, mesh=where)
    fully_shard(model, mesh=where)
    return model, adam(model)


def of_torch(model):
    warnings.simplefilter("ignore")  # torch's, about views
    return by_parts(model, torch_fsdp.fully_shard)


def blocks_of_torch(model):
    warnings.simplefilter("ignore")
    return blocks_then_root(model, torch_fsdp.fully_shard)


def wrapper(model):
    parts = {part for block in model.blocks for part in (block.mlp, block.qkv, block.out)}
    policy = partial(lambda_auto_wrap_policy, lambda_fn=parts.__contains__)
    model = md.FullyShardedDataParallel(model, auto_wrap_policy=policy)
    return [model, adam(model)]


def by_policy(model, **options):
    policy = by_class(md.zoo.Block)
    model = md.FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    return model, adam(model)


def mlps_only(model):
    for block in model.blocks:
        md.fully_shard(block.mlp)
    md.fully_shard(model)
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


kept = partial(by_parts, fully_shard=partial(md.fully_shard, reshard_after_forward=False))


def no_root(model):
    for block in model.blocks:
        for part in block.mlp, block.qkv, block.out:
            md.fully_shard(part)
    return model, adam(model)


def made_before(model):
    optimizer = adam(model)
    return by_parts(model)[0], optimizer


def with_sgd(model):
    return by_parts(model)[0], torch.optim.SGD(model.parameters(), lr=1e-3)


def no_optimizer(model):
    return by_parts(model)[0]


def by_ddp(model):
    return md.DistributedDataParallel(model), adam(model)


ANSWERS = {
    check.norm_of_whole: ([85, 85.0], [103, 25.75, 84, 7225, 50, "85 or so"]),
    check.pairs_of_nodes: (
        [57 / 16, 3 * 15 / 16 + 8 * 2 * 3 / 4 / 16],
        [189 / 64, 45 / 16, 0.75, 1.5, 1.75, 69 / 16, 93 / 32, 3.6, 4, "3.5625 Ψ"],
    ),
    check.prepare: (
        [by_parts, of_torch, wrapper, partial(by_policy, prefetch=False)],
        [
            blocks_then_root,
            blocks_of_torch,
            by_policy,
            mlps_only,
            one_unit,
            each_linear,
            in_pairs,
            kept,
            no_root,
            made_before,
            by_ddp,
            with_sgd,
            no_optimizer,
        ],
    ),
}
