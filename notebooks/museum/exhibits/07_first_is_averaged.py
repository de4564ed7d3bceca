"""The first micro-batch is averaged

modelscope/FunASR#3472. Gradients are to be averaged with the last micro-batch. The condition
`batch_idx % accum_grad` holds them back for that one, and averages with the first.
"""

from contextlib import nullcontext
from functools import partial

from torch.nn.parallel import DistributedDataParallel
from workshop import Form, loss_of

MICRO = 2


def wrap(model, make_optimizer):
    model = DistributedDataParallel(model)
    return model, make_optimizer(model.parameters())


def step(model, optimizer, micro_batches, offset):
    optimizer.zero_grad()
    total = 0.0
    for number, batch in enumerate(micro_batches):
        with model.no_sync() if (number + offset) % len(micro_batches) else nullcontext():
            loss = loss_of(model, batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
    optimizer.step()
    return total


WRONG = Form(wrap, partial(step, offset=0))
RIGHT = Form(wrap, partial(step, offset=1))
SEEN = {"watch": "rank 1 has other values", "parity": "step 1", "hashes": ""}
