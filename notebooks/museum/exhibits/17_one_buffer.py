"""Two moments in one buffer

Seen in torch 2.13.0 on the CPU, FSDP with `use_orig_params=True`: `optim_state_dict` gathers the
states of a parameter one after another into one buffer, and returns views of it. So Adam's first
moment is saved with the values of the second. Who loads that trains on, with wrong moments.
The watch reads gradients out of the first moment, and so it blames gradients.
"""

from functools import partial

import torch
from workshop import Form, replicas, train


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def saved(optimizer, copy):
    found = {}
    for p, state in optimizer.state.items():
        buffer = torch.empty_like(p)
        for name in "exp_avg", "exp_avg_sq":
            found[p, name] = (
                buffer.copy_(state[name]).clone() if copy else buffer.copy_(state[name])
            )
    return found


def step(model, optimizer, micro_batches, copy):
    loss = train(model, optimizer, micro_batches)
    model.steps = getattr(model, "steps", 0) + 1
    if model.steps == 3:  # a checkpoint is written, and read
        for (p, name), value in saved(optimizer, copy).items():
            optimizer.state[p][name].copy_(value)
    return loss


WRONG = Form(replicas, partial(step, copy=False))
RIGHT = Form(replicas, partial(step, copy=True))
SEEN = {"watch": "step 3", "parity": "step 3"}
