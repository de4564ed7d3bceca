"""Divided each time

pytorch/torchtitan#1733 (torch 2.10, a nightly build). Each step of accumulation calls the schedule,
which divides all gradients that are there, so that those of the first of four are divided four
times.
"""

from workshop import Form, average, loss_of, replicas, train

MICRO = 4


def step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = 0.0
    for batch in micro_batches:
        loss = loss_of(model, batch)
        loss.backward()
        total += loss.item() / len(micro_batches)
        for p in model.parameters():
            p.grad /= len(micro_batches)
    average(model)
    optimizer.step()
    return total


WRONG = Form(replicas, step)
RIGHT = Form(replicas, train)
SEEN = {"watch": "part 0: 0.00195 for 0.125", "parity": "step 1"}
