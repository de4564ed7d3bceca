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


WRAPPERS = {"torch": nn.parallel.DistributedDataParallel, "minidist": md.DistributedDataParallel}


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


def power(wrap, megabytes, widths, one_by_one=False):
    """Train with PowerSGD, which all_reduces thrice for a bucket, twice of that in callbacks."""
    net = mlp(*widths)
    module = wrap(net, bucket_cap_mb=megabytes)

    def hook(state, bucket):
        future = power_sgd.powerSGD_hook(state, bucket)
        if one_by_one:  # an order that needs no care
            future.wait()
        return future

    module.register_comm_hook(power_sgd.PowerSGDState(None, start_powerSGD_iter=2), hook)
    return train(net, module)


@pytest.mark.parametrize(
    ("megabytes", "widths"),
    [
        (0.02, [64, 64, 80, 96, 128]),
        pytest.param(25, [64] * 4, marks=pytest.mark.soak),
        pytest.param(0.01, [64] * 4, marks=pytest.mark.soak),
    ],
    ids=["several", "one bucket", "several, all messages of one size"],
)
def test_power_sgd_with_any_buckets(shm, megabytes, widths):
    """On gloo it hangs with several, for gloo's threads wait for each other. Where messages are of
    one size, nobody would notice that one is taken for another."""

    def run(wrapper):
        found = power(WRAPPERS[wrapper], megabytes, widths)
        expected = power(WRAPPERS[wrapper], megabytes, widths, one_by_one=True)
        return all(map(torch.equal, found, expected)), [x.sum().item() for x in found]

    for wrapper in WRAPPERS:
        (same, mine), (also, other) = shm(run, wrapper)
        assert same and also and mine == other, wrapper


def chains(seed):
    """Calls whose callbacks call, twice over, while the program goes on calling. Each rank is slow
    at moments of its own. All numbers are of one shape."""
    rank, size = dist.get_rank(), dist.get_world_size()
    slow, plan = random.Random(100 * seed + rank), random.Random(seed)
    futures, expected = [], []

    def dawdle():
        if slow.random() < 0.3:
            time.sleep(slow.uniform(0, 0.003))

    def more(future):
        dawdle()
        y = future.value()[0] * 3
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    def still_more(future):
        dawdle()
        y = future.value() + 1
        work = dist.all_reduce(y, async_op=True)
        work.get_future().then(more).wait()
        return y

    for n in range(40):
        works = [
            dist.all_reduce(torch.full((5,), 10.0 * n + i + rank), async_op=True)
            for i in range(plan.randrange(1, 4))
        ]
        dawdle()
        for i, work in enumerate(works):
            first = sum(10.0 * n + i + r for r in range(size))
            kind = plan.randrange(3)
            future = work.get_future()
            if kind:
                future = future.then(more)
                first *= 3 * size
            if kind == 2:
                future = future.then(still_more)
                first = (first + 1) * size
            futures.append(future)
            expected.append(first)
        x = torch.ones(5) * n
        dist.all_reduce(x, async_op=plan.random() < 0.5)
        dawdle()
    found = [future.wait() for future in futures]
    found = [x[0] if isinstance(x, list) else x for x in found]
    dist.barrier()
    return [x.unique().tolist() for x in found] == [[y] for y in expected]


def test_callbacks_call_in_one_order_on_all_ranks(shm):
    for seed in range(3):
        assert shm(chains, seed) == [True] * 2, seed


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
