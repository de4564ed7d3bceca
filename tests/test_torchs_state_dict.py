"""torch.distributed.checkpoint.state_dict of our strategies: what one process has, or an error."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.tensor import DTensor

import minidist as md


def net():
    """With a norm and parts within parts, so that names have dots."""
    inner = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))
    return nn.Sequential(nn.Linear(4, 5), inner, nn.Tanh(), nn.Linear(5, 3)).double()


def share(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def zero(parameters):
    return md.ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)


def ddp(module, make=adam):
    model = md.DistributedDataParallel(module)
    return model, make(model.parameters())


def zero_2(module):
    optimizer = zero(module.parameters())
    return md.ShardedDataParallel(module, optimizer), optimizer


def fsdp(module):
    model = md.FullyShardedDataParallel(
        module, auto_wrap_policy=md.fully_sharded.by_class(nn.Sequential)
    )
    return model, adam(model.parameters())


def in_place(module):
    for part in module[1], module:
        md.fully_shard(part)
    return module, adam(module.parameters())


WHOLE = {"ddp": ddp, "zero 1": lambda m: ddp(m, zero), "zero 2": zero_2}
FORMS = WHOLE | {"fsdp": fsdp, "fully_shard": in_place}


def train(model, optimizer, steps=(0, 1)):
    for step in steps:
        optimizer.zero_grad()
        model(share(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()


def train_alone(model, optimizer, steps=(0, 1)):
    ranks = dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(share(rank, step)).pow(2).mean() / ranks).backward()
        optimizer.step()


def pair(form):
    """A strategy and one process, after the same two steps."""
    torch.manual_seed(0)
    plain = net()
    model, optimizer = FORMS[form](copy.deepcopy(plain))
    alone = adam(plain.parameters())
    train(model, optimizer)
    train_alone(plain, alone)
    return model, optimizer, plain, alone


def apart(found, wanted):
    """The names of what differs."""
    assert list(found) == list(wanted)
    wholes = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    differ = md.parity.relative_difference
    return [
        k for k, v in wholes.items() if v.shape != wanted[k].shape or differ(v, wanted[k]) > 1e-12
    ]


def states(by_name):
    return {f"{n} {k}": v for n, each in by_name["state"].items() for k, v in each.items()}


@pytest.mark.parametrize("form", FORMS)
def test_states_are_whole_and_load(pools, form):
    def run():
        model, optimizer, plain, alone = pair(form)
        found = []
        for full in (False, True):
            options = theirs.StateDictOptions(full_state_dict=full)
            state = theirs.get_model_state_dict(model, options=options)
            found += apart(state, plain.state_dict())
            fresh, _ = FORMS[form](net())
            theirs.set_model_state_dict(fresh, state, options=options)
            found += apart(fresh.state_dict(), plain.state_dict())
        state = theirs.get_optimizer_state_dict(model, optimizer)
        wanted = theirs.get_optimizer_state_dict(plain, alone)
        prefix = "module." if form in WHOLE else ""
        found += apart(states(state), {f"{prefix}{k}": v for k, v in states(wanted).items()})
        fresh, other = FORMS[form](copy.deepcopy(plain))
        theirs.set_optimizer_state_dict(fresh, other, state)
        train(fresh, other, [2])
        train_alone(plain, alone, [2])
        return found + apart(fresh.state_dict(), plain.state_dict())

    assert pools(2)(run) == [[]] * 2
