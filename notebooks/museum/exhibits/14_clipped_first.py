"""Clipped first

mindspore-lab/mindcv#603. Each rank clips its own gradient, and the average comes afterwards. The
norm to clip by is that of the average.
"""

from functools import partial

from torch.nn.utils import clip_grad_norm_
from workshop import Form, average, replicas, train

CLIP = 0.5


def first(model):
    clip_grad_norm_(model.parameters(), CLIP)
    average(model)


def last(model):
    average(model)
    clip_grad_norm_(model.parameters(), CLIP)


WRONG = Form(replicas, partial(train, average=first))
RIGHT = Form(replicas, partial(train, average=last))
SEEN = {"watch": "for 0.", "parity": "step 1"}
