"""The backend "shm" under torch's more demanding callers: hooks that communicate in callbacks, and
torch.compile."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

import minidist as md

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def shm():
    with md.ranks(2, backend="shm", timeout=20) as ranks:
        yield ranks


class Net(nn.Module):
    """With a forward of its own: Dynamo compiles no file of torch's."""

    def __init__(self, *widths):
        super().__init__()
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(*widths):
    torch.manual_seed(0)
    return Net(*widths)


def train(net, module, hook=lambda work: work, steps=6):
    width = next(net.parameters()).shape[1]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        module(torch.randn(4, width, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


# ---- callbacks that communicate -----------------------------------------------------------


def power(wrap, megabytes):
    """Train with PowerSGD, which all_reduces thrice for a bucket, twice of that in callbacks."""
    net = mlp(64, 64, 80, 96, 128)
    module = wrap(net, bucket_cap_mb=megabytes)
    module.register_comm_hook(
        power_sgd.PowerSGDState(None, start_powerSGD_iter=2), power_sgd.powerSGD_hook
    )
    return train(net, module)


@pytest.mark.parametrize("megabytes", [25, 0.02], ids=["one bucket", "several"])
def test_power_sgd(shm, megabytes):
    """Torch's wrapper hangs with several buckets on gloo, for gloo's threads wait for each other.
    On "shm" it takes one bucket, too."""
    ours, same = shm(power, md.DistributedDataParallel, megabytes)
    assert all(map(torch.equal, ours, same))
    if megabytes == 25:
        theirs, _ = shm(power, nn.parallel.DistributedDataParallel, megabytes)
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y)


def chain(rounds):
    """A call whose callback calls, twice over. Each rank is slow at moments of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    slow, found = random.Random(rank), []

    def more(future):
        time.sleep(slow.uniform(0, 0.003))
        y = future.value()[0] * 3
        return [dist.all_reduce(y, async_op=True).get_future().wait()[0]]

    for n in range(rounds):
        work = dist.all_reduce(torch.full((5,), 10.0 * n + rank), async_op=True)
        time.sleep(slow.uniform(0, 0.003))
        future = work.get_future().then(more).then(more)
        found.append(future.wait()[0].unique().tolist())
    total = [sum(10.0 * n + r for r in range(size)) for n in range(rounds)]
    return found == [[x * (3 * size) ** 2] for x in total]


def test_a_callback_may_communicate(shm):
    assert shm(chain, 40) == [True] * 2


def test_a_callback_that_raises_stops_nobody(shm):
    def run():
        def fail(future):
            raise KeyError("a mistake")

        future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail)
        x = torch.ones(3)
        dist.all_reduce(x)
        try:
            future.wait()
        except RuntimeError as error:
            return "a mistake" in str(error) and x.tolist() == [2.0] * 3

    assert shm(run) == [True] * 2


# ---- torch.compile ------------------------------------------------------------------------


def test_a_compiled_data_parallel_module_trains_as_it_does_without(shm):
    def run():
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        plain = md.DistributedDataParallel(mlp(8, 16, 4))
        expected = train(plain.module, plain)
        wrapped = md.DistributedDataParallel(mlp(8, 16, 4))
        found = train(wrapped.module, torch.compile(wrapped, backend=backend))
        count = len(graphs)
        torch._dynamo.reset()
        inside = md.DistributedDataParallel(torch.compile(mlp(8, 16, 4), backend=backend))
        also = train(inside.module, inside)
        for x, y, z in zip(expected, found, also, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(z, x, rtol=1e-6, atol=1e-7)
        return 0 < count < len(graphs)

    assert shm(run) == [True] * 2


def communicate(x):
    """Every kind of call, with something to compile between them."""
    size, y = dist.get_world_size(), x * 2
    dist.all_reduce(y)
    y = y + 1
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    whole = torch.empty(size * len(y))
    dist.all_gather_into_tensor(whole, y * 2)
    part = torch.empty_like(y)
    dist.reduce_scatter_tensor(part, whole + 1)
    dist.broadcast(part, 0)
    dist.barrier()
    z = md.backend.empty(len(x)).copy_(part)
    dist.all_reduce(z, dist.ReduceOp.MAX)
    other = torch.empty_like(z)
    works = [dist.isend(z * 3, 1 - dist.get_rank()), dist.irecv(other, 1 - dist.get_rank())]
    for work in works:
        work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, 5)
    return other + sum(objects)


@pytest.mark.soak
def test_a_compiled_function_communicates(shm):
    def run(backend):
        torch._dynamo.reset()
        x = torch.arange(4.0) + dist.get_rank()
        compiled = torch.compile(communicate, backend=backend)
        return [compiled(x).tolist() == communicate(x).tolist() for _ in range(3)]

    for backend in ("eager", "aot_eager"):
        assert shm(run, backend) == [[True] * 3] * 2
