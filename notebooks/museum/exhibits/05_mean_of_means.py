"""A mean of means

huggingface/transformers#34242. Each rank takes the mean over its own tokens, and the ranks'
gradients are averaged. Where ranks have different numbers of tokens, a token of one counts more.
"""

import torch
import torch.distributed as dist
from workshop import Form, few_labels, loss_sum, replicas, train

labels = few_labels  # rank 0 has 16 in a step, rank 1 three or four


def step(model, optimizer, micro_batches):
    """All sums by all counts."""
    optimizer.zero_grad()
    total, count = loss_sum(model, micro_batches[0])
    of_all = torch.tensor(count)
    dist.all_reduce(of_all)
    loss = total / of_all.item()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    return loss.item() * dist.get_world_size()


WRONG = Form(replicas, train)
RIGHT = Form(replicas, step)
SEEN = {"watch": "rank 0: 0.5 for 0.8", "parity": "step 1", "bytes": ""}
