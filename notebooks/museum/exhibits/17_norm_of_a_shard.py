"""The norm of a shard

pytorch/pytorch#72548, FSDP. `clip_grad_norm_` sees this rank's shards alone, so each rank scales
its part of the gradient by another factor.
"""

from functools import partial

import torch.distributed as dist
from museum import Form, train

import minidist as md

CLIP = 0.2


def wrap(model, make_optimizer):
    md.fully_shard(model)
    return model, make_optimizer(model.parameters())


def clip(model, whole):
    squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
    if whole:
        dist.all_reduce(squares)
    for p in model.parameters():
        p.grad *= (CLIP / (squares.sqrt() + 1e-6)).clamp(max=1)


WRONG = Form(wrap, partial(train, average=partial(clip, whole=False)))
RIGHT = Form(wrap, partial(train, average=partial(clip, whole=True)))
SEEN = {"watch": "step 1", "parity": "step 1", "bytes": ""}
