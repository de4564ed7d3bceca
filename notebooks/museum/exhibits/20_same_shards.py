"""One seed for all shards

modelscope/ms-swift#7944. With tensor parallelism each rank draws the weights of its own features.
With one seed on all ranks the shards begin the same, and each step keeps them so: the layer has
half of its width. A reference that begins from the same weights does the same.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from workshop import ROWS, Form, train

import minidist as md

PARITY, SOURCES = False, [0]  # both ranks see all rows


def wrap(model, make_optimizer, seed):
    md.tensor_parallel.parallelize_module(model, None, {"0": "columns", "2": "rows"})
    torch.manual_seed(seed())
    for p in model[0].weight, model[0].bias, model[2].weight:
        nn.init.uniform_(p.to_local(), -0.125, 0.125)
    return model, make_optimizer(model.parameters())


def all_rows(step, rank):
    return torch.arange(step * 2 * ROWS, (step + 1) * 2 * ROWS) % 1500


step = partial(train, average=lambda model: None)
WRONG = Form(partial(wrap, seed=lambda: 7), step, all_rows)
RIGHT = Form(partial(wrap, seed=lambda: 7 + dist.get_rank()), step, all_rows)
SEEN = {"hashes": ""}
