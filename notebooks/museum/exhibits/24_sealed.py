"""Sealed: a score

After each step the rows are seen once more, for a score of the run.
"""

from workshop import Form, loss_of, replicas, train


def wrap(model, make_optimizer):
    model, optimizer = replicas(model, make_optimizer)
    model.score = 0.0
    return model, optimizer


def step(model, optimizer, micro_batches):
    loss = train(model, optimizer, micro_batches)
    seen = loss_of(model, micro_batches[0])
    model.score = model.score + seen
    return loss


WRONG = Form(wrap, step)
