"""Lesson: collectives. Each of them against torch's own on gloo, with other data on each rank."""

import hashlib
import inspect
import itertools
import math
import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import collectives
from minidist.collectives import ALGORITHMS, Cost, algorithms, cost, sent, total
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction

WORLD_SIZES = range(1, 9)
BY_DAY = 1, 3, 4, 5  # a power of two, and such that have ranks beyond one
ALL = [p if p in BY_DAY else pytest.param(p, marks=pytest.mark.soak) for p in WORLD_SIZES]
EVERY = [(operation, name) for operation, names in ALGORITHMS.items() for name in names]
SUM, MAX, AVG = (getattr(dist.ReduceOp, name) for name in ("SUM", "MAX", "AVG"))

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
OPERATIONS = {
    "SUM": (torch.add, [*FLOATS, *INTEGERS, torch.complex64, torch.complex128]),
    "AVG": (torch.add, [*FLOATS, torch.complex64]),
    "PRODUCT": (torch.mul, [*FLOATS, *INTEGERS, torch.complex64]),
    "MIN": (torch.minimum, [*FLOATS, *INTEGERS]),
    "MAX": (torch.maximum, [*FLOATS, *INTEGERS]),
}


def data(rank, shape, dtype=torch.float32, salt=0):
    """The data of a rank, which any rank can work out: other values on each. Whole numbers so
    small that sums and products over 8 ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    low, high = (0, 2 if dtype == torch.bool else 120) if dtype in INTEGERS else (1, 3)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def by_algorithm(operation):
    """The arguments that choose each algorithm; none, where there is no choice."""
    names = ALGORITHMS[operation]
    return [{"algorithm": name} for name in names] if len(names) > 1 else [{}]


def on_ranks(world_size):
    """What follows is a test that runs on each of so many ranks."""

    def made(body):
        def test(pools):
            pools(world_size)(body)

        return test

    return made


# ---- results ------------------------------------------------------------------------------------


ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}


def arguments(operation, shape, group, place, device="cpu"):
    """The tensors that this rank passes, by torch's names, fresh at each call. `place` is the
    root's."""
    r, p = dist.get_rank(group), dist.get_world_size(group)
    own = data(r, shape).to(device)
    several = [data(10 * r + i, shape, salt=1).to(device) for i in range(p)]
    empty, at_root = list(map(torch.zeros_like, several)), several if r == place else None
    return {
        "broadcast": {"tensor": own},
        "reduce": {"tensor": own},
        "all_reduce": {"tensor": own},
        "scatter": {"tensor": own, "scatter_list": at_root},
        "gather": {"tensor": own, "gather_list": at_root},
        "all_gather": {"tensor_list": several, "tensor": own},
        "reduce_scatter": {"output": own, "input_list": several},
        "all_to_all": {"output_tensor_list": empty, "input_tensor_list": several},
        "barrier": {},
    }[operation]


def passed(given):
    """The tensors of a call, those that it reads, too."""
    lists = [value if isinstance(value, list) else [value] for value in given.values()]
    return [x.cpu() for each in lists for x in each if isinstance(x, torch.Tensor)]


def against_gloo(*groups, device="cpu"):
    """Which of our calls, on groups of these ranks, leave anything else than gloo's."""
    wrong = []
    for members in groups or [[*range(dist.get_world_size())]]:
        group, gloo = dist.new_group(members), dist.new_group(members, backend="gloo")
        if dist.get_rank() not in members:
            with pytest.raises(ValueError, match="is not in the group of its collective"):
                collectives.all_reduce(torch.ones(1), group=group)
            continue
        places, shapes = range(len(members)), [(1,), (7,), (5, 3), (0,)]
        for operation, place, shape in itertools.product(ALGORITHMS, places, shapes):
            root = {ROOTS[operation]: members[place]} if operation in ROOTS else {}
            names = ("SUM", "MIN", "MAX", "PRODUCT") if "reduce" in operation else (None,)
            for op in [{"op": getattr(dist.ReduceOp, name)} if name else {} for name in names]:
                theirs = arguments(operation, shape, gloo, place)
                getattr(dist, operation)(**theirs, **root, **op, group=gloo)
                if operation == "reduce" and dist.get_rank(group) != place:
                    theirs = arguments(operation, shape, gloo, place)  # as it was
                for algorithm in by_algorithm(operation):
                    ours = arguments(operation, shape, group, place, device)
                    more = {**root, **op, **algorithm}
                    getattr(collectives, operation)(**ours, **more, group=group)
                    if not same(passed(ours), passed(theirs)):
                        wrong.append((operation, place, shape, op, algorithm, members))
        dist.destroy_process_group(group)
        dist.destroy_process_group(gloo)
    dist.barrier()
    return wrong


@pytest.mark.parametrize("world_size", ALL)
def test_they_leave_what_torchs_leave(pools, world_size):
    assert pools(world_size)(against_gloo) == [[]] * world_size


def test_groups(pools):
    assert pools(5)(against_gloo, [1, 2, 4], [0, 3], [2]) == [[]] * 5


def test_their_arguments_are_torchs():
    for operation in ALGORITHMS:
        ours, theirs = (
            [*inspect.signature(getattr(module, operation)).parameters]
            for module in (collectives, dist)
        )
        more = {"async_op", "device_ids", "timeout", "group_src", "group_dst"}
        assert [n for n in ours if n != "algorithm"] == [n for n in theirs if n not in more]


@on_ranks(3)
def test_every_dtype():
    r, p = dist.get_rank(), dist.get_world_size()
    for op, (function, dtypes) in OPERATIONS.items():
        for dtype in dtypes:
            everyone = [data(rank, (13,), dtype) for rank in range(p)]
            expected = fold(function, everyone)
            tensor = everyone[r].clone()
            collectives.all_reduce(tensor, getattr(dist.ReduceOp, op))
            assert same([tensor], [expected / p if op == "AVG" else expected]), (op, dtype)


@on_ranks(4)
def test_uneven_shapes():
    """A size for each rank, and for each pair: gloo has no such calls."""
    r, p = dist.get_rank(), dist.get_world_size()
    everyone = [data(rank, (rank % 3, 2)) for rank in range(p)]
    gathered = [torch.zeros_like(tensor) for tensor in everyone]
    collectives.all_gather(gathered, everyone[r])
    assert same(gathered, everyone)

    lists = [[data(rank, (i % 3, 2), salt=i) for i in range(p)] for rank in range(p)]
    output = torch.zeros(r % 3, 2)
    collectives.reduce_scatter(output, lists[r])
    assert same([output], [sum(each[r] for each in lists)])

    letters = [[data(i, (i * j, 2), salt=j) for j in range(p)] for i in range(p)]
    arrived = [torch.zeros(i * r, 2) for i in range(p)]
    collectives.all_to_all(arrived, letters[r])
    assert same(arrived, [letters[i][r] for i in range(p)])


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "permuted": lambda x: x.view(3, 2, 4).permute(2, 0, 1),
    "a column of one row": lambda x: x[:1, 1],  # contiguous, with a stride of 4
    "no dimension": lambda x: x[1, 2],
    "a leaf": lambda x: x.requires_grad_(),
}


@on_ranks(3)
def test_layouts_in_memory():
    r, p = dist.get_rank(), dist.get_world_size()
    for name, view in LAYOUTS.items():
        everyone = [view(data(rank, (6, 4))) for rank in range(p)]
        expected = sum(each.detach() for each in everyone)
        found = [view(torch.zeros(6, 4)) for _ in range(p)]
        collectives.all_gather(found, everyone[r])
        assert same(found, everyone), name
        output = view(torch.zeros(6, 4))
        collectives.reduce_scatter(output, [everyone[r]] * p)
        assert same([output], [expected]), name
        collectives.all_reduce(everyone[r])
        assert same([everyone[r]], [expected]), name
    gathered = [torch.zeros(4) for _ in range(p)]
    collectives.all_gather(gathered, torch.full((1,), float(r)).expand(4))  # read, not written
    assert same(gathered, [torch.full((4,), float(rank)) for rank in range(p)])


@on_ranks(5)
def test_all_ranks_hold_the_same_bits():
    """Of data that rounds, with NaN and both zeros."""
    r, digests, everyone = dist.get_rank(), [], [None] * 5
    generator = torch.Generator().manual_seed(r)
    for dtype in FLOATS:
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            tensor = torch.randn(1003, generator=generator).to(dtype)
            tensor[r] = math.nan
            tensor[100:200] = -0.0 if r % 2 else 0.0
            for algorithm in ALGORITHMS["all_reduce"]:
                result = tensor.clone()
                collectives.all_reduce(result, getattr(dist.ReduceOp, op), algorithm=algorithm)
                assert result[: dist.get_world_size()].isnan().all()
                content = bytes(result.view(torch.uint8).tolist())
                name = f"{algorithm} {op} {dtype} "
                digests.append(name + hashlib.sha256(content).hexdigest())
    dist.all_gather_object(everyone, digests)
    assert len(set(digests)) == 100 and everyone == [digests] * 5


@on_ranks(3)
def test_messages_of_the_user_are_not_mixed_with_ours():
    """One stays in flight while a collective runs between the same ranks."""
    r, largest, arrived = dist.get_rank(), torch.full((4,), 100.0), torch.zeros(4)
    sending = dist.isend(torch.full((4,), float(r)), (r + 1) % 3)
    for algorithm in ALGORITHMS["all_reduce"]:
        collectives.all_reduce(largest, MAX, algorithm=algorithm)
    dist.recv(arrived, (r - 1) % 3)
    sending.wait()
    assert arrived.tolist() == [float((r - 1) % 3)] * 4 and largest.tolist() == [100.0] * 4


# ---- costs --------------------------------------------------------------------------------------

ALPHA = 10**9  # of a message; a byte takes 1


class Clocked(Peers):
    """A rank that is a thread, with a clock. A message takes as long of its sender as of its
    receiver, and a rank sends one at a time, and receives one at a time."""

    def __init__(self, rank, size, mail):
        self.rank, self.size, self.mail = rank, size, mail
        self.now, self.device = 0, torch.device("cpu")

    def send(self, tensor, to):
        self._post(tensor, to)
        self.now += ALPHA + tensor.nbytes

    def recv(self, into, source):
        there, tensor = self.mail[source % self.size, self.rank].get(timeout=20)
        into.copy_(tensor)
        self.now = max(self.now + ALPHA + into.nbytes, there)
        return into

    def expect(self, messages):
        return [*messages]

    def exchange(self, outgoing, to, arrival):
        self._post(outgoing, to)
        return self.recv(*arrival)

    def _post(self, tensor, to):
        there = self.now + ALPHA + tensor.nbytes
        self.mail[self.rank, to % self.size].put((there, tensor.clone()))


def run_by_clock(operation, algorithm, peers):
    """Run an algorithm on a vector of 840 elements. Returns this rank's time at its end."""
    whole, root, op = torch.ones(840), peers.size // 2, Reduction("SUM", torch.float32)
    block, empty = (x.tensor_split(peers.size) for x in (whole, torch.zeros(840)))
    own, to_fill = block[peers.rank], empty[peers.rank]
    given = {
        "broadcast": [whole, root],
        "reduce": [whole, root, op],
        "all_reduce": [whole, op],
        "scatter": [to_fill, block, root],
        "gather": [own, empty, root],
        "all_gather": [own, empty],
        "reduce_scatter": [to_fill, block, op],
        "all_to_all": [empty, block],
        "barrier": [],
    }[operation]
    getattr(algorithms, f"{operation}_{algorithm}")(peers, *given)
    return peers.now


def times(operation, algorithm, p, late=()):
    """Those of all ranks, at the end. Who is late starts at 100 α."""
    mail = {pair: queue.SimpleQueue() for pair in itertools.product(range(p), range(p))}
    peers = [Clocked(rank, p, mail) for rank in range(p)]
    for rank in late:
        peers[rank].now = 100 * ALPHA
    with ThreadPoolExecutor(p) as threads:
        return [*threads.map(partial(run_by_clock, operation, algorithm), peers)]


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_the_critical_path_takes_what_the_formula_says(operation, algorithm, p):
    expected = cost(operation, algorithm, p, 4 * 840).seconds(ALPHA, 1)
    assert max(times(operation, algorithm, p)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_a_barrier_waits_for_the_last(p):
    for late in range(p):
        assert min(times("barrier", "dissemination", p, [late])) >= 100 * ALPHA, late


def test_unknown_names_list_the_choices():
    for operation, algorithm in ("x", "ring"), ("broadcast", "ring"):
        for call in lambda *names: cost(*names, 4, 10), lambda *names: sent(*names, 4, 0, 10):
            with pytest.raises(ValueError, match=f"no '{operation}' by 'ring'; there are .*tree"):
                call(operation, algorithm)


def _counted(numel):
    r, p = dist.get_rank(), dist.get_world_size()
    whole, root = torch.ones(numel, dtype=torch.float64), p // 2
    block = list(whole.tensor_split(p))
    empty = [torch.zeros_like(b) for b in block]
    mine = [torch.zeros_like(block[r]) for _ in range(p)]
    calls = {
        "broadcast": [whole, root],
        "reduce": [whole, root],
        "all_reduce": [whole],
        "all_gather": [empty, block[r]],
        "reduce_scatter": [empty[r], block],
        "all_to_all": [mine, block],
        "barrier": [],
    }
    if numel % p == 0:
        calls["scatter"] = [empty[r], block if r == root else None, root]
        calls["gather"] = [block[r], empty if r == root else None, root]
    found = {}
    for operation, given in calls.items():
        for chosen in by_algorithm(operation):
            with md.measure.TrafficCounter() as counter:
                getattr(collectives, operation)(*given, **chosen)
            found[operation, chosen.get("algorithm", ALGORITHMS[operation][0])] = counter
    return found


@pytest.mark.parametrize("world_size", ALL)
def test_what_is_counted_is_what_was_predicted(pools, world_size):
    p = world_size
    for numel in (0, 3, 8 * p, 1001):
        ranks = pools(p)(_counted, numel)
        for operation, algorithm in ranks[0]:
            counters = [found[operation, algorithm] for found in ranks]
            case = f"{operation} {algorithm} of {numel} elements on {p}"
            each = [(counter.sent_messages, counter.sent_bytes) for counter in counters]
            for r, counter in enumerate(counters):
                assert each[r] == sent(operation, algorithm, p, r, numel, 8, p // 2), (case, r)
                assert counter.calls == {}
            if operation != "scatter":  # whose root has another block than rank 0
                added = Cost(*map(sum, zip(*each, strict=True)))
                assert total(operation, algorithm, p, numel, 8) == added, case
            # The agreement: 16 bytes up and down for every rank but the first. An all_to_all
            # agrees twice, and between the two every pair compares its shapes, in 8 bytes.
            up_and_down = 2 * (p - 1) * (2 if operation == "all_to_all" else 1)
            pairs = p * (p - 1) if operation == "all_to_all" else 0
            assert sum(c.control_messages for c in counters) == up_and_down + pairs, case
            assert sum(c.control_bytes for c in counters) == 16 * up_and_down + 8 * pairs, case


# ---- wrong calls --------------------------------------------------------------------------------

ONES = torch.ones
WRONG = [  # what rank r of three calls, and what all of them are told
    ("rank 1: all_reduce(tensor=float32 (4,), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(4 if r == 1 else 3))),
    ("rank 1: all_reduce(tensor=float32 (3, 2), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES((3, 2) if r == 1 else (2, 3)))),
    ("rank 2: all_reduce(tensor=int32 (3,), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(3, dtype=torch.int32 if r == 2 else torch.float32))),
    ("rank 2: all_reduce(tensor=float32 (3,), op=MAX, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(3), MAX if r == 2 else SUM)),
    ("rank 1: all_reduce(tensor=float32 (3,), op=SUM, algorithm=naive)",
     lambda r: collectives.all_reduce(ONES(3), algorithm="naive" if r == 1 else "ring")),
    ("rank 1: broadcast(tensor=float32 (3,), src=0, algorithm=tree)",
     lambda r: collectives.broadcast(ONES(3), 0) if r == 1 else collectives.all_reduce(ONES(3))),
    ("rank 2: broadcast(tensor=float32 (3,), src=2, algorithm=tree)",
     lambda r: collectives.broadcast(ONES(3), 2 if r == 2 else 0)),
    ("rank 1: barrier(algorithm=dissemination)",
     lambda r: collectives.barrier() if r == 1 else collectives.all_reduce(ONES(3))),
    ("<- output_tensor_list[1] is float32 (2,): rank 1 sends another one",
     lambda r: collectives.all_to_all(*2 * [[ONES(2, dtype=torch.int64 if r == 1 else None)] * 3])),
    ("<- the root, 7, is not in this group of ranks [0, 1, 2]",
     lambda r: collectives.broadcast(ONES(3), 7)),
    ("rank 1: all_reduce  <- tensor must be a tensor, not list",
     lambda r: collectives.all_reduce([1.0] if r == 1 else ONES(3))),
    ("<- AVG is not defined for torch.int64",
     lambda r: collectives.reduce(ONES(3, dtype=torch.int64), 0, AVG)),
    ("<- op must be one of SUM, AVG, PRODUCT, MIN, MAX, not sum",
     lambda r: collectives.all_reduce(ONES(3), "sum")),
    ("<- algorithm must be one of ring, naive, tree, recursive_doubling, halving_doubling, not 'x'",
     lambda r: collectives.all_reduce(ONES(3), algorithm="x" if r == 0 else "ring")),
    ("rank 2: all_gather  <- tensor_list must be a list of 3 tensors, one a rank",
     lambda r: collectives.all_gather([ONES(3) for _ in range(2 if r == 2 else 3)], ONES(3))),
    ("rank 0: scatter  <- scatter_list must be a list of 3 tensors",
     lambda r: collectives.scatter(ONES(3))),
    ("rank 0: gather  <- gather_list[2] is float32 (2,), not float32 (3,)",
     lambda r: collectives.gather(ONES(3), [ONES(3), ONES(3), ONES(2)] if r == 0 else None)),
    ("rank 1: all_gather  <- tensor_list[1] is float32 (3,), not float32 (2,)",
     lambda r: collectives.all_gather([ONES(3) for _ in range(3)], ONES(2 if r == 1 else 3))),
    ("<- output_tensor_list[1] is float32 (2,): rank 1 sends another one",
     lambda r: collectives.all_to_all([ONES(2) for _ in range(3)],
                                      [ONES(3 if r == 1 else 2), ONES(2), ONES(2)])),
]  # fmt: skip


@on_ranks(3)
def test_a_wrong_call_is_an_error_on_every_rank():
    for says, call in WRONG:
        with pytest.raises(ValueError) as refusal:
            call(dist.get_rank())
        # Nothing of the refused call is left in flight: the next one is right.
        tensor, everyone = torch.arange(5.0) + dist.get_rank(), [None] * 3
        collectives.all_reduce(tensor)
        assert tensor.tolist() == [3.0, 6.0, 9.0, 12.0, 15.0]
        dist.all_gather_object(everyone, str(refusal.value))
        assert everyone == [str(refusal.value)] * 3, says
        head, *lines = everyone[0].split("\n")
        assert head == "refused: every rank of the group must make the same, valid call", says
        assert [line.split(":")[0] for line in lines] == ["  rank 0", "  rank 1", "  rank 2"], says
        assert says in everyone[0]


@on_ranks(3)
def test_the_table_names_global_ranks():
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        told = r"rank 0: all_reduce\(tensor=float32 \(1,\).*\n  rank 2: .*float32 \(3,\)"
        with pytest.raises(ValueError, match=told):
            collectives.all_reduce(torch.ones(1 + dist.get_rank()), group=group)


# ---- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.gpu(2)
def test_gpu_tensors_over_nccl():
    with md.ranks(min(8, torch.cuda.device_count())) as pool:
        assert not any(pool(lambda: against_gloo(device=md.rank.device())))
