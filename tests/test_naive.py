"""Each room begins with its idea, in a file that is called naive: short, and it really trains."""

import ast
import copy
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.checkpointing import NaiveCheckpoint
from minidist.distributed_data_parallel.naive import NaiveDDP
from minidist.experts.naive import NaiveExperts, scale_gradients
from minidist.fully_sharded.naive import NaiveFullySharded
from minidist.mixed.naive import NaiveMixedParallel
from minidist.offload.naive import NaiveOffload
from minidist.tensor_parallel.naive import NaiveTensorParallelMLP
from minidist.zero.naive import NaiveZero

NAIVE = sorted(Path(md.__file__).parent.glob("*/naive.py"))
RANKS, STEPS = 3, 3


@pytest.fixture(scope="module")
def ranks():
    with md.ranks(RANKS) as pool:
        yield pool


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def batch(rank, step):
    """Other inputs and targets on each rank, in each step."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=random, dtype=torch.float64).split([4, 2], dim=1)


def adam(of, optimizer_class=torch.optim.Adam, *more):
    return optimizer_class(of, *more, lr=0.1)


def train(model, optimizer, shares):
    """Some steps, on the mean of the losses of so many ranks' batches."""
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(r, step) for r in shares)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()


def apart(ours, theirs):
    """The names of what differs."""
    return [
        name
        for name, value in theirs.items()
        if md.parity.relative_difference(ours[name].detach(), value.detach()) > 1e-12
    ]


def one_process(shares):
    model = net()
    train(model, adam(model.parameters()), shares)
    return dict(model.named_parameters())


def ddp():
    model = NaiveDDP(net(seed=dist.get_rank()))
    train(model, adam(model.parameters()), [dist.get_rank()])
    return apart(dict(model.module.named_parameters()), one_process(range(RANKS)))


def zero():
    model = net()
    optimizer = adam(model.parameters(), NaiveZero, torch.optim.Adam)
    train(model, optimizer, [dist.get_rank()])
    states = sum(s.numel() for s in optimizer.optimizer.state[optimizer.shard].values())
    assert states == 2 * 22 + 1  # a third of 65 parameters, rounded up; and the count of steps
    return apart(dict(model.named_parameters()), one_process(range(RANKS)))


def fully_sharded():
    model = nn.Sequential(NaiveFullySharded(net()[:2]), NaiveFullySharded(net()[2:]))
    train(model, adam(model.parameters()), [dist.get_rank()])
    own = [p.numel() for p in model.parameters()]
    assert own == [15, 7]  # a third of 45 parameters, and of 20
    x, plain = batch(0, 9)[0], net()
    for name, value in one_process(range(RANKS)).items():
        plain.get_parameter(name).data = value.detach()
    return apart({"output": model(x)}, {"output": plain(x)})


def tensor_parallel():
    up, act, down = net()
    model = NaiveTensorParallelMLP(up, down, act)
    train(model, adam(model.parameters()), [0])  # all ranks see the same batch
    part = dist.get_rank()
    whole = one_process([0])
    return apart(
        {"up": model.up, "up_bias": model.up_bias, "down": model.down, "bias": model.bias},
        {
            "up": whole["0.weight"].chunk(RANKS)[part],
            "up_bias": whole["0.bias"].chunk(RANKS)[part],
            "down": whole["2.weight"].chunk(RANKS, 1)[part],
            "bias": whole["2.bias"],
        },
    )


def gradient_of_the_input():
    """Each rank has only its own features' part of it, before the ranks add them up."""
    up, act, down = net()
    given = [batch(0, 0)[0].requires_grad_() for _ in range(2)]
    for x, model in zip(given, (net(), NaiveTensorParallelMLP(up, down, act)), strict=True):
        model(x).square().sum().backward()
    return apart({"x": given[1].grad}, {"x": given[0].grad})


class Dense(nn.Module):
    """Every expert computes every row, and most results are multiplied by 0."""

    def __init__(self, router, experts, k):
        super().__init__()
        self.router, self.experts, self.k = router, experts, k

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k)
        gates = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, chosen, weights)
        return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def with_experts(kind):
    up, _, down = net()
    router, *experts = (nn.Linear(9, n).double() for n in [6] + [9] * 6)
    return nn.Sequential(up, kind(router, nn.ModuleList(experts), 2), down)


def experts():
    """Each rank has two of six experts, and all else; its tokens are its own."""
    model, plain, rank = with_experts(NaiveExperts), with_experts(Dense), dist.get_rank()
    shared = [p for name, p in model.named_parameters() if "experts" not in name]
    optimizer = adam(model.parameters())

    def step():
        scale_gradients(model[1].experts)
        for parameter in shared:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()

    train(model, SimpleNamespace(step=step), [rank])
    train(plain, adam(plain.parameters()), range(RANKS))
    plain[1].experts = plain[1].experts[2 * rank : 2 * rank + 2]
    return apart(dict(model.named_parameters()), dict(plain.named_parameters()))


def offload():
    model = net()
    train(model, adam(model.parameters(), NaiveOffload, torch.optim.Adam), [dist.get_rank()])
    return apart(dict(model.named_parameters()), one_process([dist.get_rank()]))


def checkpointing():
    """Equal gradients; and of two blocks autograd keeps the two inputs alone."""
    blocks = [nn.Sequential(net(seed), nn.Linear(2, 4).double()) for seed in range(2)]
    weights = [p for block in blocks for p in block.parameters()]
    gradients, saved = [], []

    def save(tensor):
        saved.append(tensor)
        return tensor

    for apply in (lambda x, block: block(x), NaiveCheckpoint.apply):
        x = batch(dist.get_rank(), 0)[0].requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            y = apply(apply(x, blocks[0]), blocks[1])
        y.square().sum().backward()
        gradients.append({str(i): t.grad for i, t in enumerate([x, *weights])})
        for weight in weights:
            weight.grad = None
    assert len(saved) == 2
    return apart(gradients[1], gradients[0])


IDEAS = (
    *(ddp, zero, fully_sharded, tensor_parallel, gradient_of_the_input, experts, offload),
    checkpointing,
)


@pytest.mark.parametrize("idea", IDEAS)
def test_the_idea_trains_as_one_process_does(ranks, idea):
    assert ranks(idea) == [[]] * RANKS


def mixed(*sizes):
    """A transformer on a mesh, each replica with rows of its own: what differs from one process."""
    torch.manual_seed(0)
    model = md.zoo.Transformer(16, 6, 8, 2, 2).double()
    plain = copy.deepcopy(model).sequential()
    tokens = torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(1))
    mesh = md.mixed.mesh(*sizes)
    tensor, row = mesh.get_group("tensor"), mesh.get_local_rank("data")
    ours = NaiveMixedParallel(model, mesh, microbatches=2)
    # Not Adam: it divides by gradients, of which one is small enough to show its rounding.
    optimizer, alone = (
        torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (ours.stage, plain)
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = tokens[row :: sizes[0]]
        ours.train_step(
            rows, rows.flip(0), lambda y, t: md.vocab_parallel_cross_entropy(y, t, tensor)
        )
        norm = ours.clip_grad_norm_(0.05)
        optimizer.step()
        alone.zero_grad()
        shares = [tokens[r :: sizes[0]] for r in range(sizes[0])]
        sum(md.parity.cross_entropy(plain(x), x.flip(0)) / sizes[0] for x in shares).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert wanted > 0.1 and md.parity.relative_difference(norm, wanted) < 1e-12
        alone.step()
    found = md.tensor_parallel.full_state_dict(ours.stage.module)
    whole = plain.state_dict()
    assert found and found.keys() <= whole.keys()
    return apart(whole | found, whole)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_a_naive_mesh_trains_as_one_process_does(sizes):
    with md.ranks(4) as four:
        assert four(mixed, *sizes) == [[]] * 4


@pytest.mark.parametrize("file", NAIVE, ids=lambda file: file.parent.name)
def test_the_idea_is_short_and_comes_first(file):
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    words = {
        line
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = file.read_text().splitlines()
    code = [i for i, line in enumerate(lines, 1) if line.strip() and i not in words]
    by_hand = file.parent.name in ("context_parallel", "experts")  # their backward
    most = 70 if by_hand else 60
    assert len(lines) <= most and len(code) <= most - 10
    room = importlib.import_module(f"minidist.{file.parent.name}").__doc__
    first = room.partition("To read, in this order")[2].split()[1]
    assert first.strip("`,") == "naive"
