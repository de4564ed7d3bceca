"""Divided after backward

pytorch/torchtitan#2972. The pipeline's schedule runs backward on the sum of losses; the trainer
divides by the number of tokens afterwards, for the log alone.
"""

from workshop import Form, average, loss_sum, replicas, train


def step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    loss, count = loss_sum(model, micro_batches[0])
    loss.backward()
    loss = loss / count  # the log is right
    average(model)
    optimizer.step()
    return loss.item()


WRONG = Form(replicas, step)
RIGHT = Form(replicas, train)
SEEN = {"watch": "16 times", "parity": "step 1", "curve": ""}
