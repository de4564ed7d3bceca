"""The backend "shm", against gloo on the same ranks: collectives, messages, torch's own systems.

Every call is made twice, on a group of "shm" and on one of gloo, with other data on each rank, and
must leave the same bits. Data are whole numbers so small that no reduction rounds.
"""

import gc
import re
import subprocess
import sys
import time
import warnings
from array import array
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import SOAK, Family
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import minidist as md
from minidist.machine.backend.engine import Engine
from minidist.machine.backend.group import SLOT, STAGE
from minidist.machine.backend.queues import Task, Wait
from minidist.machine.backend.words import Bell

SOON = 5  # seconds
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]
OPS = {
    **dict.fromkeys(["SUM"], FLOATS + INTS + COMPLEX),
    **dict.fromkeys(["AVG"], FLOATS + COMPLEX),
    **dict.fromkeys(["PRODUCT", "MIN", "MAX"], FLOATS + INTS),
    **dict.fromkeys(["BAND", "BOR", "BXOR"], INTS),
}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def shm():
    """`shm(4)`: four ranks, the same at every call; or their successors, after a fault."""
    kept = {}

    def pool(world_size, timeout=20):
        key = world_size, timeout
        if key not in kept:
            kept[key] = md.ranks(world_size, backend="shm", timeout=timeout)
        return kept[key]

    yield pool
    for opened in kept.values():
        opened.close()


def data(shape, dtype, salt, rank=None):
    """Whole numbers from 1 to 4 (bits, for bool), which differ from rank to rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randint(1, 5, shape, generator=generator)
    if dtype == torch.bool:
        return values > 2
    if dtype.is_complex:
        values = torch.complex(values.double(), values.double().neg() / 2)
    return values.to(dtype)


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
    "channels_last": lambda x: (
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    ),
    "offset": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
}


class Case:
    """The tensors of one call: where they come from, and all that it may write to."""

    def __init__(self, group, shape, dtype, layout, salt, op, asynchronous):
        self.group, self.shape, self.dtype, self.salt = group, shape, dtype, salt
        self.layout, self.op = LAYOUTS[layout], getattr(dist.ReduceOp, op)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.root, self.asynchronous = salt % self.size, asynchronous
        self.tensors = []

    def new(self, i=0, shape=None):
        shape = self.shape if shape is None else shape
        x = self.layout(data(shape, self.dtype, 100 * self.salt + i))
        self.tensors.append(x)
        return x

    def many(self, n=None, base=0):
        return [self.new(base + i) for i in range(self.size if n is None else n)]

    def rows(self, i=0):
        """As large as one tensor of each rank."""
        return self.new(i, (self.size * (self.shape or (1,))[0], *self.shape[1:]))

    def run(self, call, **options):
        work = call(self, async_op=self.asynchronous, group=self.group, **options)
        if self.asynchronous and work is not None:
            work.wait()
            assert work.is_completed()


def at_root(case, value):
    return value if case.rank == case.root else None


COLLECTIVES = {
    "all_reduce": lambda c, **o: dist.all_reduce(c.new(), c.op, **o),
    "reduce": lambda c, **o: dist.reduce(c.new(), group_dst=c.root, op=c.op, **o),
    "broadcast": lambda c, **o: dist.broadcast(c.new(), group_src=c.root, **o),
    "all_gather": lambda c, **o: dist.all_gather(c.many(), c.new(50), **o),
    "all_gather_into_tensor": lambda c, **o: dist.all_gather_into_tensor(c.rows(), c.new(50), **o),
    "gather": lambda c, **o: dist.gather(c.new(50), at_root(c, c.many()), group_dst=c.root, **o),
    "scatter": lambda c, **o: dist.scatter(c.new(50), at_root(c, c.many()), group_src=c.root, **o),
    "reduce_scatter": lambda c, **o: dist.reduce_scatter(c.new(50), c.many(), c.op, **o),
    "reduce_scatter_tensor": lambda c, **o: dist.reduce_scatter_tensor(
        c.new(50), c.rows(), c.op, **o
    ),
    "all_to_all": lambda c, **o: dist.all_to_all(c.many(), c.many(base=50), **o),
    "all_to_all_single": lambda c, **o: dist.all_to_all_single(c.rows(), c.rows(50), **o),
    "uneven": lambda c, **o: uneven(c, **o),
    "barrier": lambda c, **o: dist.barrier(**o),
}
EVERY_OP = ["all_reduce", "reduce_scatter_tensor"]  # the others reduce by the same code
NO_COMPLEX = ["gather", "scatter"]  # with gloo
NO_0DIM = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]


def uneven(c, **o):
    """Rank r sends r + q rows to rank q (as many as it gets), and none where that is 1."""
    splits = [0 if c.rank + q == 1 else c.rank + q for q in range(c.size)]
    rows = (sum(splits), *c.shape[1:])
    return dist.all_to_all_single(c.new(0, rows), c.new(50, rows), splits, splits, **o)


def differences(cases):
    """Which of the cases (name, shape, dtype, layout, op) end otherwise than gloo's."""
    gloo, wrong = dist.new_group(backend="gloo"), []
    for salt, (name, shape, dtype, layout, op) in enumerate(cases):
        ours = Case(dist.group.WORLD, shape, dtype, layout, salt, op, salt % 2 == 1)
        theirs = Case(gloo, shape, dtype, "plain", salt, op, False)
        for case in (ours, theirs):
            case.run(COLLECTIVES[name])
        for i, (x, y) in enumerate(zip(ours.tensors, theirs.tensors, strict=True)):
            scratch = name == "reduce" and ours.rank != ours.root  # gloo leaves partial sums
            if not torch.equal(x, y) and not scratch:
                wrong.append((name, shape, dtype, layout, op, i))
    dist.destroy_process_group(gloo)
    return wrong


SHAPES = [(), (0, 3), (5,), (2, 3, 4, 5)]
CASES = {
    "dtypes": [
        (name, (7, 3), dtype, "plain", op)
        for name in COLLECTIVES
        for op, dtypes in (OPS.items() if name in EVERY_OP else [("SUM", OPS["SUM"])])
        for dtype in dtypes
        if not (dtype.is_complex and name in NO_COMPLEX)
    ],
    "shapes": [
        (name, shape, torch.float32, layout, "SUM")
        for name in COLLECTIVES
        for shape in SHAPES
        for layout in LAYOUTS
        if shape or name not in [*NO_0DIM, "uneven"]
    ],
    "large": [
        (name, (STAGE // 4 + 13,), torch.float32, "strided", "SUM")
        for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
    ]
    + [("uneven", (1, 300_001), torch.float32, "plain", "SUM")],
}


@pytest.mark.parametrize("which", CASES)
def test_collectives_leave_what_gloo_leaves(shm, which):
    for rank, wrong in enumerate(shm(3)(differences, CASES[which])):
        assert wrong == [], f"rank {rank}"


def reduced_in_inference_mode():
    """As a loss is, while one evaluates."""
    with torch.inference_mode():
        x, parts = torch.full((3,), dist.get_rank() + 1.0), [torch.empty(2) for _ in range(3)]
        dist.all_reduce(x)
        dist.all_gather(parts, torch.full((2,), float(dist.get_rank())))
    return x.tolist(), [part.tolist() for part in parts]


def test_tensors_of_inference_mode_are_filled(shm):
    assert shm(3)(reduced_in_inference_mode) == [([6.0] * 3, [[0.0] * 2, [1.0] * 2, [2.0] * 2])] * 3


# ---- any sequence of calls, on any groups -------------------------------------------------

MEMBERS = [[0, 1, 2, 3], [0, 2, 3], [3, 1], [1, 2], [2]]


def make_groups():
    """Pairs of groups, of "shm" and of gloo, by name; kept by the rank from call to call."""
    if not hasattr(dist, "of_this_test"):
        pairs = {str(m): (dist.new_group(m), dist.new_group(m, backend="gloo")) for m in MEMBERS}
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name in ("a", "b"):
            theirs = [
                dist.new_group(m, backend="gloo")
                for m in ([[0, 2], [1, 3]] if name == "a" else [[0, 1], [2, 3]])
            ]
            mine = next(g for g in theirs if g != dist.GroupMember.NON_GROUP_MEMBER)
            pairs[name] = mesh.get_group(name), mine
            assert dist.get_backend(mesh.get_group(name)) == "shm"
        dist.of_this_test = pairs
    return dist.of_this_test


def sequence(steps):
    """Which steps end otherwise than gloo's. Several are in flight at once."""
    pairs, flying, wrong = make_groups(), [], []

    def land():
        while flying:
            step, ours, theirs, work = flying.pop()
            if work is not None:
                work.wait()
            equal = map(torch.equal, ours.tensors, theirs.tensors)
            if not all(equal) and (step[1] != "reduce" or ours.rank == ours.root):
                wrong.append(step)

    for salt, step in enumerate(steps):
        which, name, shape, dtype, layout, op, later = step
        ours, theirs = pairs[which]
        if ours == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        ours = Case(ours, shape, dtype, layout, salt, op, later)
        theirs = Case(theirs, shape, dtype, "plain", salt, op, False)
        options = {"group": ours.group, "async_op": later}
        flying.append((step, ours, theirs, COLLECTIVES[name](ours, **options)))
        theirs.run(COLLECTIVES[name])
        if not later:
            land()
    land()
    return wrong


STEPS = st.tuples(
    st.sampled_from([*map(str, MEMBERS), "a", "b"]),
    st.sampled_from(list(COLLECTIVES)),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple) | st.just((400_001,)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]),
    st.booleans(),
)


sequences = partial(
    settings,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failure shows the step; to shrink it would take minutes
    suppress_health_check=list(HealthCheck),
)


@sequences(max_examples=1)  # 200 in tests/test_soak.py
@given(steps=st.lists(STEPS, min_size=60, max_size=70))
def test_any_sequence_of_collectives_on_any_groups_leaves_what_gloo_leaves(shm, steps):
    assert shm(4)(sequence, steps) == [[]] * 4


# ---- objects, and forms of their own ------------------------------------------------------


def objects(backend):
    group = dist.new_group(backend=backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank, "tensor": torch.full((rank,), rank)}
    everyone, gathered = [None] * size, [None] * size if rank == 1 else None
    broadcast, scattered, sent = [mine, rank], [None], [mine]
    dist.all_gather_object(everyone, mine, group=group)
    dist.gather_object(mine, gathered, dst=1, group=group)
    dist.broadcast_object_list(broadcast, src=2, group=group)
    dist.scatter_object_list(scattered, [mine] * size if rank == 1 else None, src=1, group=group)
    if rank == 0:
        dist.send_object_list(sent, dst=2, group=group)
    if rank == 2:
        dist.recv_object_list(sent, src=0, group=group)
    return str([everyone, gathered, broadcast, scattered, sent])


def test_objects_arrive_as_with_gloo(shm):
    assert shm(3)(objects, "shm") == shm(3)(objects, "gloo")


# ---- messages -----------------------------------------------------------------------------


def ring(n, dtype, how):
    """To the next one, from the one before; both ways at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    out = [data((n,), dtype, i) for i in range(2)]
    back = [torch.zeros(n, dtype=dtype) for _ in range(2)]
    if how == "isend":
        works = [dist.isend(out[0], after), dist.isend(out[1], before, tag=1)]
        works += [dist.irecv(back[1], after, tag=1), dist.irecv(back[0], before)]
        for work in works:
            work.wait()
    elif how == "batch":
        calls = [(dist.irecv, back[0], before), (dist.isend, out[0], after)]
        for work in dist.batch_isend_irecv([dist.P2POp(*call) for call in calls]):
            work.wait()
    else:
        sending = dist.isend(out[0], after)
        dist.recv(back[0], before)
        sending.wait()
    if how != "isend":
        back[1] = data((n,), dtype, 1, after)
    return torch.equal(back[0], data((n,), dtype, 0, before)) and torch.equal(
        back[1], data((n,), dtype, 1, after)
    )


def test_messages_arrive(shm):
    for n in (0, 1, SLOT // 4, SLOT // 4 + 1, 5 * SLOT // 4 + 7):
        for how in ("isend", "recv", "batch"):
            assert shm(3)(ring, n, torch.float32, how) == [True] * 3, (n, how)
    for dtype in FLOATS + INTS + COMPLEX:
        assert shm(3)(ring, 9, dtype, "isend") == [True] * 3, dtype


def out_of_order():
    """Tags are received in another order than they were sent; from whom, as they come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tags, n = [3, 1, 4, 0], 3 * SLOT // 4  # so large that they do not fit all at once
    if rank:
        for work in [dist.isend(torch.full((n,), 10.0 * rank + tag), 0, tag=tag) for tag in tags]:
            work.wait()
        return True
    for source in reversed(range(1, size)):
        for tag in sorted(tags)[1:]:
            x = torch.zeros(size, n).T[:, 1]  # not contiguous
            assert dist.recv(x, source, tag=tag) == source
            assert x.unique().tolist() == [10 * source + tag]
    left = set()
    for _ in range(1, size):
        x = torch.zeros(n)
        left.add(source := dist.recv(x))
        assert x.unique().tolist() == [10 * source]
    return left == set(range(1, size))


def many_small():
    """400 each way, all asynchronous, of three tags; each tag keeps its order."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    works = [dist.isend(torch.tensor([i]), other, tag=i % 3) for i in range(400)]
    boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(400)]
    order = [i for tag in (2, 0, 1) for i in range(400) if i % 3 == tag]
    works += [dist.irecv(boxes[i], other, tag=i % 3) for i in order]
    for work in works:
        work.wait()
    return rank >= 0 and [int(box) for box in boxes] == list(range(400))


def test_messages_of_any_tag_source_and_number(shm):
    assert shm(3)(out_of_order) == [True] * 3
    assert shm(2)(many_small) == [True] * 2


# ---- torch's own systems, and minidist's --------------------------------------------------


def model():
    torch.manual_seed(0)
    return md.zoo.mlp(8, 16, 4).double()


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 8, generator=generator, dtype=torch.float64)


def train(net, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()


def full(net):
    return [
        getattr(x, "full_tensor", lambda x=x: x)().detach().clone()
        for x in net.state_dict().values()
    ]


def with_plain_ddp(group):
    net = nn.parallel.DistributedDataParallel(model(), process_group=group)
    with net.no_sync():
        net(batch(9)).sum().backward()
    train(net, torch.optim.Adam(net.parameters()))
    return full(net)


def with_fully_shard(group):
    net, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.Adam(net.parameters(), lr=0.1))
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return [*full(net), norm.full_tensor()]


def with_tensor_parallel(group):
    net, mesh = model(), DeviceMesh.from_group(group, "cpu")
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8)
        net(x).square().mean().backward()
        optimizer.step()
    return full(net)


SYSTEMS = [
    (with_plain_ddp, 3),
    (with_fully_shard, 3),
    (with_tensor_parallel, 2),
]


def test_a_system_of_torchs_does_what_it_does_on_gloo(shm):
    def run(system, backend):
        warnings.simplefilter("ignore", FutureWarning)
        return system(dist.new_group(backend=backend))

    for system, size in SYSTEMS:
        ours, theirs = shm(size)(run, system, "shm"), shm(size)(run, system, "gloo")
        for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert len(mine) == len(other) > 0
            for x, y in zip(mine, other, strict=True):
                same = torch.allclose(x, y, rtol=1e-12, atol=1e-14)
                assert same and x.dtype == y.dtype, (system.__name__, rank)


# ---- while the main thread does something else --------------------------------------------


def overlap(how):
    """Nobody waits for it, and it ends."""
    x = data((5 * STAGE // 4,), torch.float32, 0)
    expected = sum(data(x.shape, x.dtype, 0, rank) for rank in range(dist.get_world_size()))
    before, end = x.clone(), time.monotonic() + 20
    seen = torch.ones(1)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.recv(seen, other)
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank():
        time.sleep(0.05)
        assert not work.is_completed() and torch.equal(x, before)
        dist.send(seen, 0)
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01) if how == "sleeps" else sum(range(1000))
    return torch.equal(x, expected) and work.wait() and work.wait() and work.is_success()


def test_a_collective_goes_on_while_the_main_thread_sleeps_or_computes(shm):
    for how in "sleeps", "computes":
        assert shm(3)(overlap, how) == [True] * 3, how


def futures():
    x, done = torch.ones(3), []
    work = dist.all_reduce(x, async_op=True)
    twice = work.get_future().then(lambda future: future.value()[0] * 2)
    work.get_future().add_done_callback(lambda future: done.append(future.value()))
    assert twice.wait().tolist() == [2.0 * dist.get_world_size()] * 3
    for _ in range(300):  # who has waited finds a future that is done, at once
        work = dist.all_reduce(x.clone(), async_op=True)
        later = work.get_future()
        work.wait()
        assert later.done() and later.value()
    return len(done)


def failing_group():
    """Each rank learns of the mistake, by wait and by the future; other groups go on."""
    rank, group, told = dist.get_rank(), dist.new_group(), []
    x = torch.ones(3 + rank)
    work = dist.all_reduce(x, group=group, async_op=True)
    child = work.get_future().then(lambda future: future.value()[0] * 2)
    following = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    for wait in (work.wait, work.wait, work.get_future().wait, child.wait, following.wait):
        try:
            wait()
        except RuntimeError as error:
            told.append("every rank of a group must make the same call" in str(error))
    assert work.is_completed() and not work.is_success()
    try:
        dist.barrier(group)
    except RuntimeError:
        told.append(True)
    y = torch.ones(1)
    dist.all_reduce(y)
    dist.destroy_process_group(group)
    return told == [True] * 6 and y.item() == dist.get_world_size()


def test_futures_and_errors_of_work_in_flight(shm):
    assert shm(3)(futures) == [1] * 3
    assert shm(3)(failing_group) == [True] * 3


def waiting():
    """CPU seconds of a rank that waits a second for another."""
    if dist.get_rank() == 0:
        time.sleep(1)
    before = time.process_time()
    dist.barrier()
    return time.process_time() - before


def test_ranks_are_idle_while_they_wait(shm):
    assert max(shm(3)(waiting)) < 0.25


def test_what_came_just_before_the_other_left_is_taken():
    class Message(Wait):
        here = False

        def over(self):
            return self.here

    def explain(wait, what, seconds):  # while it is asked, the message comes
        wait.here = True
        return RuntimeError("the other has left")

    def operation():
        yield Message()

    bell = Bell(memoryview(array("q", [0] * 16)))
    engine = Engine(bell, explain, on_close=lambda: None)
    task = Task(operation(), 5, lambda: "a call", [], engine)
    engine.submit("a lane", task)
    assert task.wait()
    engine.close()


# ---- tensors in shared memory -------------------------------------------------------------


def shared_kib():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssShmem:\s*(\d+)", file.read())[1])


def arena(backend):
    rank, size, n = dist.get_rank(), dist.get_world_size(), STAGE // 2 + 1
    group = dist.new_group(backend=backend)
    for dtype, op in [(torch.float32, "SUM"), (torch.bfloat16, "SUM"), (torch.int64, "MAX")]:
        xs = [data((3, n // 3), dtype, 1, r) for r in range(size)]
        expected = sum(xs) if op == "SUM" else torch.stack(xs).amax(0)
        for inside in (range(size), [1], []):  # the ranks whose tensor is in it
            for cut in (slice(None), slice(1, 2)):
                x = md.backend.empty(3, n // 3, dtype=dtype, group=group)
                assert x.shape == (3, n // 3) and x.dtype == dtype and x.is_contiguous()
                x = x.copy_(xs[rank]) if rank in inside else xs[rank].clone()
                dist.all_reduce(x[cut], getattr(dist.ReduceOp, op), group=group)
                assert torch.equal(x[cut], expected[cut])
                assert torch.equal(x[2], (expected if cut == slice(None) else xs[rank])[2])
    x = md.backend.empty(4, group=group).fill_(rank)  # twice, one after another, and in flight
    works = [dist.all_reduce(x, group=group, async_op=backend == "shm") for _ in range(2)]
    assert all([work is None or work.wait() for work in works])  # (gloo's may overtake)
    assert x.tolist() == [sum(range(size)) * size] * 4
    assert md.backend.empty(0, group=group).shape == (0,)
    assert md.backend.empty(group=group).shape == ()
    assert md.backend.empty(2, 3, dtype=torch.bool, group=group).dtype == torch.bool
    mean = md.backend.empty(4, group=group).fill_(rank)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    dist.destroy_process_group(group)
    return x.sum().item() > 0 and mean.tolist() == [(size - 1) / 2] * 4  # the memory is still there


def test_all_reduce_of_tensors_in_shared_memory(shm):
    for backend in "shm", "gloo":
        assert shm(3)(arena, backend)[1:] == [True] * 2, backend


def given_back():
    gc.collect()
    before, mib = shared_kib(), 2**20
    xs = [md.backend.empty(8 * mib, dtype=torch.uint8).fill_(i) for i in range(4)]
    places = [x.data_ptr() for x in xs]
    assert shared_kib() - before > 31 * 1024
    view, gradient = xs[1][5:7], torch.ones(8 * mib, requires_grad=True)
    bytes_of_two = xs[2].view(torch.float32).fill_(3.0)
    product = gradient[: 2 * mib] * bytes_of_two  # only C++ holds it from here on
    del bytes_of_two
    xs.clear()
    kept = shared_kib() - before
    assert 15 * 1024 < kept < 17 * 1024, kept
    assert view.tolist() == [1, 1]
    product.sum().backward()
    assert gradient.grad[: 2 * mib].unique().tolist() == [3.0]
    del view, product, gradient
    assert shared_kib() - before < 1024
    with open("/proc/self/maps") as file:
        maps = file.read().count("memfd:minidist")
    again = md.backend.empty(6 * mib, dtype=torch.uint8)
    with open("/proc/self/maps") as file:
        assert file.read().count("memfd:minidist") == maps
    return again.data_ptr() in places


def test_shared_memory_is_given_back(shm):
    assert shm(3)(given_back) == [True] * 3


# ---- faults -------------------------------------------------------------------------------


def failing(ranks, function, *args, within=SOON):
    """The error of a call, which comes soon; and the next call works."""
    start = time.monotonic()
    with pytest.raises(md.RankError) as raised:
        ranks(function, *args)
    assert time.monotonic() - start < within
    assert ranks(ring, 5, torch.float32, "recv") == [True] * ranks.world_size
    return raised.value


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def in_a_group(call):
    """What each rank hears of a call that fails, on a group made for it: the ranks go on."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    try:
        call(dist.get_rank(), group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def swapped(rank, group):
    for n in (3, 4) if rank == 1 else (4, 3):
        dist.all_reduce(zeros(n), group=group)


def either(rank, group, others, of_rank_1):
    call, *arguments = of_rank_1 if rank == 1 else others
    getattr(dist, call)(*arguments, group=group)


MAX, INT = dist.ReduceOp.MAX, torch.int32
DIFFER = {  # what each rank calls; what rank 0 and rank 1 are told to call
    "numbers": (lambda r, g: dist.all_reduce(zeros(3 + r), group=g),
                "all_reduce(float32(3,), op=SUM)", "(4,)"),
    "shapes": (lambda r, g: dist.all_reduce(zeros(2, 3) if r == 1 else zeros(1, 6), group=g),
               "(1, 6)", "(2, 3)"),
    "int and float": (lambda r, g: dist.all_reduce(zeros(3, dtype=INT) if r == 1 else zeros(3),
                                                   group=g), "(float32(3,)", "(int32(3,)"),
    "float and double": (lambda r, g: dist.broadcast(zeros(3).double() if r == 1 else zeros(3), 0,
                                                     group=g),
                         "(float32(3,), src=0", "(float64(3,), src=0"),
    "operations": (lambda r, g: dist.all_reduce(zeros(3), *[MAX] * (r == 1), group=g),
                   "op=SUM", "op=MAX"),
    "roots": (lambda r, g: dist.broadcast(zeros(3), r, group=g), "src=0", "src=1"),
    "order": (swapped, "float32(4,)", "float32(3,)"),
    "calls": (partial(either, others=("all_reduce", zeros(3)),
                      of_rank_1=("broadcast", zeros(3), 0)), "all_reduce(", "broadcast("),
    "a barrier": (partial(either, others=("all_reduce", zeros(3)), of_rank_1=("barrier",)),
                  "all_reduce(", "barrier("),
    "scattered": (lambda r, g: dist.reduce_scatter_tensor(zeros(2 + r), zeros(6 + 3 * r), group=g),
                  "float32(2,)", "float32(3,)"),
}  # fmt: skip


def test_ranks_that_make_different_calls_are_all_shown(shm):
    for what, (call, *told) in DIFFER.items():
        heard = shm(3)(in_a_group, call)
        shown = [each for each in heard if "every rank of a group must make the same" in str(each)]
        assert shown and None not in heard, (what, heard)  # the others may only hear who has left
        for rank, text in enumerate(told):
            line = re.search(rf"^  rank {rank}: (.*), .*, line \d+$", shown[0], re.MULTILINE)
            assert text in line[1], what


def test_a_pool_shows_the_line_of_each_rank_that_makes_another_call(shm):
    def differ():
        if dist.get_rank() == 1:
            dist.broadcast(zeros(3), 0)
        else:
            dist.all_reduce(zeros(3))

    error = str(failing(shm(3), differ))
    assert "raised RuntimeError: every rank of a group must make the same call\n" in error
    for rank, call in enumerate(("all_reduce", "broadcast", "all_reduce")):
        assert re.search(rf"^  rank {rank}: {call}\(.*, .*test_shm.py, line \d+$", error, re.M)


def test_messages_that_do_not_fit_and_rows_that_do_not_match_are_told(shm):
    def message(rank, group, x, y):
        if rank < 2:
            dist.send(x, 0, group=group) if rank == 1 else dist.recv(y, 1, group=group)

    def rows(rank, group):
        splits = [2, 2, 2] if rank else [1, 2, 3]
        dist.all_to_all_single(zeros(6), zeros(6), [2, 2, 2], splits, group=group)

    for call, text in [
        (partial(message, x=zeros(3), y=zeros(4)),
         "rank 1 sends 3 elements of torch.float32, rank 0 waits for 4 of"),
        (partial(message, x=zeros(300_000), y=zeros(3)), "rank 1 sends 300000 elements of"),
        (partial(message, x=zeros(3), y=zeros(3, dtype=INT)), "rank 0 waits for 3 of torch.int32"),
        (rows, "all_to_all: rank 0 gives 1 elements to rank 0, which expects 2"),
    ]:  # fmt: skip
        assert any(text in str(heard) for heard in shm(3)(in_a_group, call)), text


def told_at_once():
    """A rank sees by itself that the call is wrong: nobody is disturbed."""
    x, size = zeros(6), dist.get_world_size()
    three = [zeros(2) for _ in range(size)]
    wrong = [
        lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)),
        lambda: dist.all_reduce(torch.empty(3, device="meta")),
        lambda: dist.all_gather([zeros(3) for _ in three], zeros(2)),
        lambda: dist.all_gather(three[1:], zeros(2)),
        lambda: dist.all_gather_into_tensor(zeros(7), zeros(2)),
        lambda: dist.all_gather_into_tensor(x.double(), zeros(2)),
        lambda: dist.reduce_scatter(zeros(1), three),
        lambda: dist.reduce_scatter(zeros(2), three[1:]),
        lambda: dist.reduce_scatter_tensor(zeros(3), x),
        lambda: dist.gather(zeros(3), three if dist.get_rank() == 0 else None, 0),
        lambda: dist.scatter(zeros(3), three if dist.get_rank() == 0 else None, 0),
        lambda: dist.all_to_all(three, three[1:]),
        lambda: dist.all_to_all_single(zeros(6), x, [6], [6]),
        lambda: dist.all_to_all_single(zeros(6), x, [2, 2, 2], [2, 2, 3]),
        lambda: dist.all_to_all_single(zeros(5), zeros(5)),
    ]
    told = []
    for i, call in enumerate(wrong):
        try:
            if i in (9, 10) and dist.get_rank():  # only the root sees it
                raise ValueError
            call()
        except ValueError:
            told.append(i)
    dist.all_reduce(x.fill_(1))
    return told == list(range(len(wrong))) and x.tolist() == [size] * 6 or told


def test_what_a_rank_can_see_to_be_wrong_is_told_at_the_call(shm):
    assert shm(3)(told_at_once) == [True] * 3


def test_a_message_that_nobody_sends_is_named(shm):
    def wait_in_vain():
        group = dist.new_group(timeout=timedelta(seconds=1))
        try:
            if dist.get_rank() == 0:
                dist.recv(zeros(3), 1, group=group, tag=7)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier()
            dist.destroy_process_group(group)

    said, *others = shm(3)(wait_in_vain)
    assert "Timed out waiting 1 s for rank 1 in recv(float32(3,), src=1, tag=7), " in said
    assert others == [None, None]


def test_a_rank_that_does_not_come_to_a_new_group_is_named(shm):
    def absent():
        if dist.get_rank() != 1:
            dist.new_group([0, 1, 2], use_local_synchronization=True)

    error = failing(shm(3, 2), absent, within=2 + SOON)
    assert "rank 1 did not join new_group within 2 s. It had finished" in str(error)
    assert "Timed out waiting 2 s for rank 1 to make the group" in error.tracebacks[2]


def test_a_rank_learns_of_anothers_failure_from_the_group_alone(shm):
    """Without the pool's help, as in a program of one's own: soon, not after the timeout."""

    def learn():
        rank, group = dist.get_rank(), dist.new_group()
        start, told = time.monotonic(), ""
        if rank == 1:
            dist.send(zeros(2), 0, group=group)
        try:
            if rank == 0:
                dist.recv(zeros(3), 1, group=group)  # a mistake of this rank alone
            dist.all_reduce(zeros(3), group=group)
        except RuntimeError as error:
            told = str(error)
        assert time.monotonic() - start < SOON
        dist.barrier()
        return told

    told = shm(3)(learn)
    assert "rank 1 sends 2 elements" in told[0]
    assert "rank 0 has left" in told[1] and "in all_reduce(float32(3,), op=SUM)" in told[2]


# ---- programs of their own ----------------------------------------------------------------


SCRIPT = """
import atexit, os, sys, threading
import minidist as md, torch, torch.distributed as dist

def farewell():
    threads = threading.active_count()
    os.write(2, f"rank {os.environ['RANK']} ends: {threads} thread\\n".encode())  # in one piece

atexit.register(farewell)
for turn in range(3):  # begin, end, begin again
    dist.init_process_group("shm")
    x = torch.full((5,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3] * 5
    if turn < 2:
        dist.destroy_process_group()
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
if "atexit" in sys.argv:
    atexit.register(dist.destroy_process_group)
if "in flight" in sys.argv and dist.get_rank() == 0:
    works = [dist.irecv(x, 1), dist.all_reduce(x, async_op=True)]
"""


@pytest.mark.soak
@pytest.mark.parametrize("end", ["atexit", "in flight"])
def test_a_script_under_torchrun_ends_well_with_or_without_farewell(tmp_path, end):
    family = Family()
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-W", "error", "-m", "torch.distributed.run"]
    command = [*torchrun, "--nproc-per-node=2", "--standalone"]
    command += [str(tmp_path / "script.py"), end]
    ended = subprocess.run(
        command, env=family.environ() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stderr.splitlines()) == [f"rank {rank} ends: 1 thread" for rank in range(2)]
    assert family.gone_within(SOON)
