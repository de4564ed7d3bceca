"""One mask for all

huggingface/accelerate#236, huggingface/transformers#37932. One seed for all ranks: their dropout,
or their augmentation, draws the same. (Parity gives each rank random numbers of its own, and so
does not see it.)
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from workshop import Form, replicas, train


def model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))


def wrap(model, make_optimizer, seed):
    torch.manual_seed(seed())
    return replicas(model, make_optimizer)


WRONG = Form(partial(wrap, seed=lambda: 7), train)
RIGHT = Form(partial(wrap, seed=lambda: 7 + dist.get_rank()), train)
SEEN = {"watch": "the same random numbers"}
