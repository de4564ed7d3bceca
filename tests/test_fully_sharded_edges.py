"""Fully sharded training at its edges: outputs that autograd does not show, modules of others, what
scripts for torch's class do. Held against one process. Lesson: fully_sharded"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_model import apart, held, loss_of, pair, saved_by, share, told
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import (
    ShardingStrategy,
    StateDictType,
)

import minidist as md
from minidist.fully_sharded import by_class

LAYERS = by_class(nn.Linear)
wrapped = partial(md.FullyShardedDataParallel, auto_wrap_policy=LAYERS)


def double(*sizes):
    return md.zoo.mlp(*sizes, dtype=torch.float64)


def train(model, ranks, loss_of=loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()


# ---- parameters are there as long as they are read ---------------------------------------------


class Encoders(nn.Module):
    """Torch's layers read the parameters of their children, and in eval mode those of all."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True, dtype=torch.float64)
        self.first, self.layers = double(6, 6), nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.layers(self.first(x).view(1, -1, 6))


READ = {
    "encoders": (Encoders, by_class(nn.TransformerEncoderLayer), loss_of),
}


@pytest.mark.parametrize("name", READ)
def test_parameters_are_there_as_long_as_they_are_read(pools, name):
    make, policy, loss = READ[name]

    def case(model, ranks):
        train(model, ranks, loss)
        model.eval()
        with torch.no_grad():
            return {"output": model(share(9))}

    wrap = partial(md.FullyShardedDataParallel, auto_wrap_policy=policy)
    assert pools(2)(held, case, make, wrap) == [{}] * 2


# ---- scripts of others ------------------------------------------------------------------------


def decayed(model):
    """The usual groups: no weight decay for biases and norms."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def states(saved):
    return {f"{n} {k}": v for n, each in saved["state"].items() for k, v in each.items()}


def test_groups_by_dimensions(pools):
    """Their states are those of one process, by number and by torch's names, and load from both."""

    def run():
        model, plain = pair(lambda: double(6, 5, 4), wrapped)
        adam = [torch.optim.AdamW(decayed(m), lr=0.1) for m in (model, plain)]
        trained = zip((model, plain), adam, ([dist.get_rank()], range(2)), strict=True)
        for m, optimizer, ranks in trained:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(m, ranks, step).backward()
                optimizer.step()
        found = apart(model.state_dict(), plain.state_dict())
        by_number, by_torch = adam[1].state_dict(), get_optimizer_state_dict(plain, adam[1])
        found |= apart(states(model.optim_state_dict(adam[0])), states(by_number))
        named = model.optim_state_dict(adam[0], by_name=True)
        assert named["param_groups"] == by_torch["param_groups"]
        assert list(named["state"]) == list(by_torch["state"])
        found |= apart(states(named), states(by_torch))
        for group in by_torch["param_groups"]:
            group["params"].reverse()  # names say which is which
        for saved in (by_number, by_torch):
            new = torch.optim.AdamW(decayed(model), lr=0.1)
            model.load_optim_state_dict(new, saved)
            for p, state in new.state.items():
                assert state["exp_avg"].shape == p.shape
                found |= apart(state, adam[0].state[p])
        by_torch["param_groups"][0]["params"][0] = "other"
        with pytest.raises(ValueError, match="its group 0 and the optimizer's differ in .*, other"):
            model.load_optim_state_dict(new, by_torch)
        return found

    assert pools(2)(run) == [{}] * 2


SCRIPT = """
import functools, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullStateDictConfig
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from LIBRARY import FullyShardedDataParallel as FSDP
from model import Block, Model

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
torch.manual_seed(0)
model = FSDP(
    Model(),
    sharding_strategy=ShardingStrategy.STRATEGY,
    cpu_offload=CPUOffload(offload_params=False),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32),
    device_id=device,
    sync_module_states=False,
    forward_prefetch=True,
    limit_all_gathers=True,
    use_orig_params=True,
)
assert model.width == 8
decay = [p for name, p in model.named_parameters() if not name.endswith("bias")]
rest = [p for name, p in model.named_parameters() if name.endswith("bias")]
groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
generator = torch.Generator().manual_seed(rank)
norms = []
for step in range(4):
    optimizer.zero_grad()
    tokens = torch.randint(16, (3, 2, 5), generator=generator)
    with model.no_sync():
        for part in tokens[:2]:
            nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
    nn.functional.cross_entropy(model(tokens[2]).flatten(0, 1), tokens[2].flatten()).backward()
    norms.append(float(model.clip_grad_norm_(0.5)))
    optimizer.step()
    schedule.step()
    if step == 1:
        states = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))

model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[0].flatten())
    dist.all_reduce(loss)
with FSDP.summon_full_params(model, writeback=False):
    total = sum(p.double().sum() for p in model.parameters()).item()
config = FullStateDictConfig()
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    state = model.state_dict()
if rank == 0:
    torch.save((state, norms, loss, total), sys.argv[1])
dist.destroy_process_group()
"""


def require_alike(saved_by_ours, saved_by_theirs):
    (ours, *found), (theirs, *wanted) = saved_by_ours, saved_by_theirs
    assert list(ours) == list(theirs) and apart(ours, theirs, 1e-5) == {}
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_script_for_torchs_class_with_one_line_changed(pools, strategy):
    run = partial(saved_by, SCRIPT.replace("STRATEGY", strategy))
    require_alike(*(pools(2)(run, each)[0] for each in ("minidist", "torch.distributed.fsdp")))


# ---- what is refused --------------------------------------------------------------------------


def backward_within():
    model = wrapped(double(6, 4))
    with model.summon_full_params():
        model(share(0)).sum().backward()


def local_states():
    wrapped(double(6, 4)).set_state_dict_type(StateDictType.LOCAL_STATE_DICT)


ARGUMENTS = {  # words: what is given
    "that is DistributedDataParallel": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "a device_mesh of two": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "has no argument sharding": {"sharding": 1},
}
REFUSED = {
    "SHARDED_STATE_DICT": local_states,
    "within summon_full_params": backward_within,
    **{words: partial(wrapped, double(6, 4), **given) for words, given in ARGUMENTS.items()},
}


def test_what_is_refused(pools):
    for words, fault in REFUSED.items():
        for found in pools(2)(told, fault):
            assert words in found, (words, found)
