"""A hook that gets something else

huggingface/picotron#39, DataParallelNaive. `register_post_accumulate_grad_hook` hands over the
parameter, and the hook is written for its gradient. So parameters are averaged, and gradients
never.
"""

from functools import partial

from workshop import Form, mean, replicas, train


def wrap(model, make_optimizer, hook):
    model, optimizer = replicas(model, make_optimizer)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model, optimizer


def average(grad):
    mean(grad.data)


step = partial(train, average=lambda model: None)  # the hooks have done it
WRONG = Form(partial(wrap, hook=average), step)
RIGHT = Form(partial(wrap, hook=lambda p: average(p.grad)), step)
SEEN = {"watch": "rank 1 has other values", "parity": "step 1", "hashes": ""}
