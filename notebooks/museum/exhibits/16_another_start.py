"""Each from its own start

mosaicml/llm-foundry#830. With hybrid sharding and without `sync_module_states`, each replica
starts from random weights of its own. Gradients are averaged, and fit neither.
"""

from functools import partial

from workshop import Form, replicas, train


def wrap(model, make_optimizer, sync):
    for layer in model[0], model[2]:
        layer.reset_parameters()  # each rank has another seed
    return replicas(model, make_optimizer) if sync else (model, make_optimizer(model.parameters()))


PARITY = False  # it begins from other weights
WRONG = Form(partial(wrap, sync=False), train)
RIGHT = Form(partial(wrap, sync=True), train)
SEEN = {"watch": "rank 1 has other values", "hashes": ""}
