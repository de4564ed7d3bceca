"""What the tests of fully sharded training share: models, examples, both forms, and how a sharded
model and one process differ after the same steps. Ranks import it."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import minidist as md
from minidist.fully_sharded import FSDPModule, by_class

WIDTH = 7  # of which no number of ranks here gets even rows


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks, and parameters of the root's own. Of three ranks the last has no row of the head."""

    def __init__(self, block=Block, forward=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 4)
        self.other = forward

    def forward(self, x):
        if self.other:
            return self.other(self, x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- both forms -------------------------------------------------------------------------------

PARTS = Block, nn.TransformerEncoderLayer  # that are units


def in_place(model, shard=md.fully_shard, kinds=PARTS, **options):
    for part in list(model.modules()):
        if isinstance(part, kinds):
            shard(part, **options)
    return shard(model, **options)


def wrapped(model, kinds=PARTS, **options):
    return md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(*kinds), **options)


def two_axes():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


@contextlib.contextmanager
def unreduced(model):
    """Within the block no backward pass reduces, as a script of either form says it."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        yield
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)


def units_of(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def bytes_gathered(model):
    """What its units have of full parameters."""
    return sum(unit.unsharded.untyped_storage().nbytes() for unit in units_of(model))


# ---- beside one process -----------------------------------------------------------------------


def share(rank, step=0):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)


def weighed(output, step=0):
    """A loss that weighs every element differently."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return ((output - step) * weights).pow(2).mean()


def loss_of(model, ranks, step=0):
    """The mean of the losses on these ranks' examples."""
    return sum(weighed(model(share(rank, step)), step) for rank in ranks) / len(ranks)


def plainly(model, ranks, step):
    loss_of(model, ranks, step).backward()


def groups_of(model):
    """The usual ones: no weight decay for biases and norms."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def steps_of(loop, steps=range(3), make=torch.optim.SGD, **options):
    """What `held` takes: steps of this loop, which makes gradients, and of an optimizer."""
    options = options or {"lr": 0.1, "momentum": 0.9}  # it sees gradients of another size

    def train(model, ranks):
        optimizer, out = make(groups_of(model), **options), {}
        for step in steps:
            optimizer.zero_grad()
            given = loop(model, ranks, step)
            named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
            out |= {f"gradient of {name} at {step}": grad for name, grad in named}
            optimizer.step()
            if given is not None:
                out[f"given at {step}"] = given
        return out

    return train


def whole(value):
    """Of a DTensor all rows; of a number a tensor."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def apart(ours, wanted, allowed=1e-12):
    """By name, what differs."""
    found = dict.fromkeys(ours.keys() ^ wanted.keys(), "only one has it")
    for name in (name for name in wanted if name in ours):
        a, b = whole(ours[name]), whole(wanted[name])
        if a.shape != b.shape or a.dtype != b.dtype:
            found[name] = f"{tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
        elif not md.parity.relative_difference(a, b) <= allowed:
            found[name] = md.parity.relative_difference(a, b)
    return found


def pair(make, shard, dtype=torch.float64):
    """On a rank: a sharded model, and one process's with the same weights."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    return shard(copy.deepcopy(plain)), plain


def held(case, make, shard, allowed=1e-12):
    """On a rank: in what a sharded model and one process part, after `case(model, ranks)`: on the
    examples of these ranks. It returns what to compare besides the model's state. What is gathered
    must be freed, too."""
    model, plain = pair(make, shard)
    ours = case(model, [dist.get_rank()]) or {}
    theirs = case(plain, range(dist.get_world_size())) or {}
    found = apart(model.state_dict() | ours, plain.state_dict() | theirs, allowed)
    return found | ({"gathered": nbytes} if (nbytes := bytes_gathered(model)) else {})


def told(fault):
    """On a rank: what `fault` raises, with the name of its class."""
    try:
        fault()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
