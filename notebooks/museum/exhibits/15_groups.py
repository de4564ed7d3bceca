"""One group for all

verl-project/verl#5070. The optimizer gets all parameters as one group, so biases decay with the
weights.
"""

from functools import partial

from workshop import Form, broadcast, train


def groups(parameters):
    """No decay for biases."""
    parameters = list(parameters)
    weights = [p for p in parameters if p.ndim > 1]
    biases = [p for p in parameters if p.ndim == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def wrap(model, make_optimizer, groups):
    broadcast(model)
    return model, make_optimizer(groups(model.parameters()))


WRONG = Form(partial(wrap, groups=lambda ps: [{"params": ps, "weight_decay": 0.1}]), train)
RIGHT = Form(partial(wrap, groups=groups), train)
SEEN = {"watch": "bias", "parity": "step 1"}
