"""`md.fully_shard`, torch's form in place, as scripts for torch's use it. Held against one process
and against torch's. Lesson: fully_sharded"""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_model import Block, apart, bytes_gathered, loss_of, saved_by, share, told, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import minidist as md
from minidist.fully_sharded import FSDPModule

LIMIT = 1e-12


class Model(nn.Module):
    """Blocks, and parameters of the root's own: a head, a scale, and a tied one."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def sharded(model, **options):
    for block in model.blocks:
        assert md.fully_shard(block, **options) is block
    return md.fully_shard(model, **options)


def over_two_axes(model, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return sharded(model, mesh=mesh, **options)


def both(wrap, **options):
    """On a rank: a sharded model and one alone, equal; and an optimizer of each, by groups."""
    torch.manual_seed(0)
    plain = Model().double()
    model = wrap(copy.deepcopy(plain), **options)
    adam = [
        torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        for m in (model, plain)
    ]
    return model, plain, *adam


def step_of(models, step, clip=0.05):
    """Of both, with clipping by torch. Returns the two norms."""
    model, plain, *optimizers = models
    loss_of(model, [dist.get_rank()], step).backward()
    loss_of(plain, range(dist.get_world_size()), step).backward()
    norms = [whole(torch.nn.utils.clip_grad_norm_(m.parameters(), clip)) for m in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_parity_with_one_process(pools):
    """With clipping, and groups by `p.dim()`. After a step nothing is left but shards."""

    def run(wrap, reshards):
        models = both(wrap, reshard_after_forward=reshards)
        model, plain = models[:2]
        for step in range(3):
            ours, theirs = step_of(models, step)
            torch.testing.assert_close(ours, theirs, rtol=LIMIT, atol=0)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        left = bytes_gathered(model)
        output = {"output": model(share(9))}
        found = apart(model.state_dict(), plain.state_dict()) | apart(
            output, {"output": plain(share(9))}
        )
        return found, len(units), left

    for size, wrap in ((1, sharded), (2, sharded), (4, over_two_axes)):
        for reshards in (None, False):
            assert pools(size)(run, wrap, reshards) == [({}, 4, 0)] * size, (size, reshards)


def test_it_stays_what_it_was(pools):
    def run():
        torch.manual_seed(0)
        model = sharded(Model())
        names = [name for name, _ in model.named_parameters()]
        return (
            isinstance(model, Model) and isinstance(model.blocks[0], Block),
            type(model).__name__,
            names == [name for name, _ in Model().named_parameters()],
            sum(p.numel() for p in model.parameters()),
            sum(p.to_local().numel() for p in model.parameters()),
        )

    elements = sum(p.numel() for p in Model().parameters())
    found = pools(2)(run)
    assert [each[:3] for each in found] == [(True, "FSDPModel", True)] * 2
    assert [each[3] for each in found] == [elements] * 2
    local = [each[4] for each in found]
    assert sum(local) == elements and max(local) - min(local) == 1  # of `scale`, rank 0 has all


def test_state_dict(pools):
    """DTensors of rows, as torch's has them; whole by torch's function. Loaded from either."""

    def run():
        torch.manual_seed(dist.get_rank())
        model, theirs = sharded(Model()), Model()
        state = model.state_dict()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        theirs.load_state_dict(whole)
        found = apart(state, whole, 0)
        for block in theirs.blocks:
            torch_fully_shard(block)
        theirs.scale = nn.Parameter(theirs.scale[None])  # theirs takes no number
        torch_fully_shard(theirs)
        rows = theirs.state_dict()
        for name in state.keys() - {"scale"}:
            if not torch.equal(rows[name].to_local(), state[name].to_local()):
                found[name] = "other rows"
        for given in (whole, state):
            other = sharded(Model())
            other.load_state_dict(given)
            found |= apart(other.state_dict(), whole, 0)
        return found, float(whole["scale"])

    assert pools(2)(run) == [({}, 1.5)] * 2


def test_checkpoints_of_optimizers(pools, tmp_path):
    """On disk, at other numbers of ranks; and in memory, as one process has it."""

    def save(folder):
        models = both(sharded)
        for step in range(2):
            step_of(models, step)
        with md.saving.Checkpoints(folder) as checkpoints:
            checkpoints.save(2, model=models[0], optimizer=models[2])
        return md.fully_sharded.optim_state_dict(models[0], models[2])

    def load(folder, given):
        models = both(sharded)
        model, plain, ours, alone = models
        with md.saving.Checkpoints(folder) as checkpoints:
            assert checkpoints.load(model=model, optimizer=ours) == 2
        plain.load_state_dict(
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        )
        alone.load_state_dict(copy.deepcopy(given))
        step_of(models, 2)
        found = apart(model.state_dict(), plain.state_dict())
        md.fully_sharded.load_optim_state_dict(model, ours, alone.state_dict())
        step_of(models, 3)
        return found | apart(model.state_dict(), plain.state_dict())

    given = pools(4)(save, tmp_path)[0]
    assert pools(2)(load, tmp_path, given) == [{}] * 2


def padded(module, size):
    """Bytes of its parameters, each with as many rows as the ranks divide."""
    return sum(-(-len(p) // size) * size * p[0].numel() * 8 for p in module.parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_that_are_sent_and_held(pools, size):
    """All units are gathered forward, all but the root again backward, and all reduced. At most two
    blocks are whole beside the shards and the root."""

    def run():
        model, _, adam, _ = both(sharded)
        step = partial(loss_of, model, [dist.get_rank()])
        step(0).backward()  # from now on it knows the order
        adam.step()
        adam.zero_grad()
        with md.measure.TrafficCounter() as traffic, md.measure.MemoryTracker(model, adam) as held:
            step(1).backward()
        names = {"gloo": ("broadcast", "reduce"), "shm": ("all_gather", "reduce_scatter")}
        sent = [traffic.calls[name][1] for name in names[dist.get_backend()]]
        rows = sum(p.to_local().nbytes for p in model.parameters())
        live = held.live["parameters"], held.live["gradients"]
        return sent, held.peak_of["parameters"] - live[0], live, rows

    model = Model()
    block, whole = padded(model.blocks[0], size), padded(model, size)
    root = whole - 3 * block
    found = pools(size)(run)
    held = whole / size, whole / size
    wanted = [2 * whole - root, whole], root + 2 * block, held
    assert [each[:3] for each in found] == [wanted] * size
    assert sum(each[3] for each in found) == 8 * sum(p.numel() for p in model.parameters())


def test_accumulation_without_reducing(pools):
    """Until it is reduced, a gradient is whole on each rank; autograd has that of a unit or two."""

    def run():
        model, plain, ours, alone = both(sharded)
        for step in range(3):
            loss_of(plain, range(2), step).backward()
        with md.measure.TrafficCounter() as traffic, md.measure.MemoryTracker(model) as memory:
            for step in range(3):
                if step:
                    p = model.first.weight
                    assert p.grad.placements[0].is_partial() and p.grad.to_local().shape == p.shape
                model.set_requires_gradient_sync(step == 2)
                loss_of(model, [dist.get_rank()], step).backward()
        assert memory.peak_of["other"] < 0.8 * sum(p.nbytes for p in plain.parameters())
        ours.step()
        alone.step()
        ours.zero_grad()
        model.set_requires_gradient_sync(False)  # a pass that fails may leave gradients
        model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        assert "division" in told(lambda: loss_of(model, [dist.get_rank()]).backward())
        assert model.blocks[2].up.weight.grad is not None
        name, each = {"gloo": ("reduce", 2), "shm": ("reduce_scatter", 1)}[dist.get_backend()]
        return apart(model.state_dict(), plain.state_dict()), traffic.calls[name][0] / each

    assert pools(2)(run) == [({}, 4)] * 2  # once for each unit


def test_policies(pools):
    """Casts of inputs, of the output and of gradients; shards on the CPU."""

    def run():
        seen = {}
        torch.manual_seed(0)
        plain = Model()
        model = copy.deepcopy(plain)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            md.fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
        md.fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        model.last.register_forward_hook(lambda _, x, y: seen.update(x=x[0].dtype, y=y.dtype))
        output = model(share(0))
        output.sum().backward()
        plain(share(0).float()).sum().backward()
        close = (output - plain(share(0).float())).abs().max() < 0.1
        kept = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        return seen, output.dtype, kept, bool(close)

    b = torch.bfloat16
    assert pools(2)(run) == [({"x": b, "y": b}, torch.float64, {torch.float32}, True)] * 2


def number():
    model = Model()
    model.blocks[0].scale = nn.Parameter(torch.tensor(1.0))
    md.fully_shard(model)


def data_given():
    model = sharded(Model())
    model.first.weight.data = model.first.weight.data * 0.5
    model(share(0).float())


REFUSED = {  # words: what is told by them
    "one module, not list": lambda: md.fully_shard([nn.Linear(2, 2)]),
    "ModuleList has no forward pass": lambda: md.fully_shard(nn.ModuleList()),
    "is sharded already": lambda: md.fully_shard(md.fully_shard(Model())),
    "reshard_after_forward=2": lambda: md.fully_shard(Model(), reshard_after_forward=2),
    "parameter blocks.0.scale has no dimension": number,
    "full_state_dict=True on every rank": lambda: pickle.dumps(sharded(Model())),
    "parameter first.weight has been given other memory, by p.data": data_given,
}


def test_what_is_refused(pools):
    for words, fault in REFUSED.items():
        for found in pools(2)(told, fault):
            assert words in found, (words, found)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x, expert):
        return self.experts[expert](x)


def test_experts_that_only_some_ranks_reach():
    """Of one size. With gloo nobody can tell."""

    def run():
        model = Experts()
        for expert in model.experts:
            md.fully_shard(expert)
        md.fully_shard(model)
        return told(lambda: model(share(0).float(), dist.get_rank()))

    for found in md.launch(run, world_size=2, backend="shm"):
        assert "every rank of a group must make the same call" in found
        assert "for unit experts.0" in found and "for unit experts.1" in found, found


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from LIBRARY import fully_shard
from model import Model

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Model().double()
policy = MixedPrecisionPolicy(param_dtype=torch.float64, cast_forward_inputs=False)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
fully_shard(model, mesh=mesh, mp_policy=policy)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups, lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
norms = []
for step in range(4):
    tokens = torch.randint(16, (3, 2, 5), generator=generator)
    for number, part in enumerate(tokens):
        model.set_requires_gradient_sync(number == 2)
        logits = model(part)
        (nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten()) / 3).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    logits = model(tokens[0])
full = {name: value.full_tensor() for name, value in model.state_dict().items()}
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if dist.get_rank() == 0:
    assert all(torch.equal(full[name], value) for name, value in state.items())
    torch.save((state, norms, logits), sys.argv[1])
dist.destroy_process_group()
"""


def require_alike(saved_by_ours, saved_by_theirs):
    (ours, *found), (theirs, *wanted) = saved_by_ours, saved_by_theirs
    assert list(ours) == list(theirs) and apart(ours, theirs) == {}
    for a, b in zip(found, wanted, strict=True):
        close = partial(torch.testing.assert_close, rtol=1e-11, atol=0)
        close(torch.as_tensor(a), torch.as_tensor(b))


def test_a_script_for_torchs_function_with_one_line_changed(pools):
    run = partial(saved_by, SCRIPT)
    require_alike(*(pools(2)(run, each)[0] for each in ("minidist", "torch.distributed.fsdp")))
