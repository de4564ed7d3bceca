"""Squares added up twice

modelscope/twinkle#290. All ranks have the same averaged gradient, and its squares are added up
over the ranks once more: the norm is 1.41 times too large on two ranks, and clipping cuts too much.
"""

from functools import partial

import torch.distributed as dist
from workshop import Form, average, replicas, train

CLIP = 0.5


def clip(model, twice):
    average(model)
    squares = sum(p.grad.square().sum() for p in model.parameters())
    if twice:
        dist.all_reduce(squares)
    for p in model.parameters():
        p.grad *= (CLIP / (squares.sqrt() + 1e-6)).clamp(max=1)


WRONG = Form(replicas, partial(train, average=partial(clip, twice=True)))
RIGHT = Form(replicas, partial(train, average=partial(clip, twice=False)))
SEEN = {"watch": "times", "parity": "step 1", "bytes": ""}
