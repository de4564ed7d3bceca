"""Lesson: collectives. Each of them against plain torch on all ranks' data, and gloo's own."""

import hashlib
import math
import time
from contextlib import nullcontext
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import minidist as md
from minidist import collectives
from minidist.collectives import ALGORITHMS, Cost, cost, sent
from minidist.collectives.agreement import HEADER_BYTES
from minidist.collectives.peers import Peers

WORLD_SIZES = range(1, 9)
BY_DAY = 1, 3, 4, 5  # a power of two, and such that have ranks beyond one
ALL = [p if p in BY_DAY else pytest.param(p, marks=pytest.mark.soak) for p in WORLD_SIZES]
SIZES = [0, 1, 7, 10, 1000]
SUM = dist.ReduceOp.SUM

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
OPERATIONS = {
    "SUM": (torch.add, [*FLOATS, *INTEGERS, torch.complex64, torch.complex128]),
    "AVG": (torch.add, [*FLOATS, torch.complex64]),
    "PRODUCT": (torch.mul, [*FLOATS, *INTEGERS, torch.complex64]),
    "MIN": (torch.minimum, [*FLOATS, *INTEGERS]),
    "MAX": (torch.maximum, [*FLOATS, *INTEGERS]),
    "BAND": (torch.bitwise_and, INTEGERS),
    "BOR": (torch.bitwise_or, INTEGERS),
    "BXOR": (torch.bitwise_xor, INTEGERS),
}


def data(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype, salt: int = 0):
    """The data of a rank, which any rank can work out: other values on each. Whole numbers so
    small that sums and products over 8 ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype in INTEGERS:
        high = 2 if dtype == torch.bool else 120
        return torch.randint(
            0, high, torch.Size((shape,) if isinstance(shape, int) else shape), generator=generator
        ).to(dtype)
    values = torch.randint(
        1, 3, torch.Size((shape,) if isinstance(shape, int) else shape), generator=generator
    )
    return values.to(dtype)


def combined(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    total = fold(OPERATIONS[op][0], tensors)
    return total / len(tensors) if op == "AVG" else total


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


# ---- results ------------------------------------------------------------------------------------


def _reductions() -> list[str]:
    r, p, wrong = dist.get_rank(), dist.get_world_size(), []
    cases = [("SUM", torch.float32, n) for n in SIZES]
    for op, (_, dtypes) in OPERATIONS.items():
        # How two tensors are combined does not depend on how many ranks there are: every dtype
        # goes at 3 and at 4 of them.
        some = dtypes if p in (3, 4) else [dtypes[0], dtypes[-1]]
        cases += [(op, dtype, 13) for dtype in some]
    for salt, (op, dtype, n) in enumerate(cases):
        everyone = [data(rank, n, dtype, salt) for rank in range(p)]
        expected = combined(op, everyone)
        kind = getattr(dist.ReduceOp, op)
        for algorithm in ALGORITHMS["all_reduce"]:
            tensor = everyone[r].clone()
            result = collectives.all_reduce(tensor, kind, algorithm=algorithm)
            if result is not None or not same(tensor, expected):
                wrong.append(f"all_reduce {algorithm} {op} {dtype} {n}")
        for algorithm in ALGORITHMS["reduce"]:
            root = salt % p
            tensor = everyone[r].clone()
            collectives.reduce(tensor, root, kind, algorithm=algorithm)
            if not same(tensor, expected if r == root else everyone[r]):
                wrong.append(f"reduce {algorithm} {op} {dtype} {n} to {root}")
        inputs = [data(r, n + i % 3, dtype, 10 * salt + i) for i in range(p)]
        before = [tensor.clone() for tensor in inputs]
        output = torch.empty(n + r % 3, dtype=dtype)
        collectives.reduce_scatter(output, inputs, kind)
        of_mine = [data(rank, n + r % 3, dtype, 10 * salt + r) for rank in range(p)]
        if not same(output, combined(op, of_mine)):
            wrong.append(f"reduce_scatter {op} {dtype} {n}")
        if not all(same(*pair) for pair in zip(inputs, before, strict=True)):
            wrong.append(f"reduce_scatter {op} {dtype} {n} changed its inputs")
    return wrong


@pytest.mark.parametrize("world_size", ALL)
def test_reductions(pools, world_size):
    for rank, wrong in enumerate(pools(world_size)(_reductions)):
        assert wrong == [], f"rank {rank}"


def _movements() -> list[str]:
    r, p, wrong = dist.get_rank(), dist.get_world_size(), []
    dtypes = [*FLOATS, *INTEGERS, torch.complex64]
    cases = [(torch.float32, n, root) for n in SIZES for root in range(p)]
    cases += [(dtype, 6, i % p) for i, dtype in enumerate(dtypes)]
    for salt, (dtype, n, root) in enumerate(cases):
        everyone = [data(rank, n, dtype, salt) for rank in range(p)]
        for algorithm in ALGORITHMS["broadcast"]:
            tensor = everyone[r].clone()
            collectives.broadcast(tensor, root, algorithm=algorithm)
            if not same(tensor, everyone[root]):
                wrong.append(f"broadcast {algorithm} {dtype} {n} from {root}")

        found = [torch.zeros(n, dtype=dtype) for _ in range(p)] if r == root else None
        collectives.gather(everyone[r], found, root)
        if found and not all(same(*pair) for pair in zip(found, everyone, strict=True)):
            wrong.append(f"gather {dtype} {n} to {root}")

        tensor = torch.zeros(n, dtype=dtype)
        collectives.scatter(tensor, everyone if r == root else None, root)
        if not same(tensor, everyone[r]):
            wrong.append(f"scatter {dtype} {n} from {root}")

        uneven = [data(rank, (n + rank % 3, 2), dtype, salt) for rank in range(p)]
        found = [torch.zeros_like(tensor) for tensor in uneven]
        collectives.all_gather(found, uneven[r])
        if not all(same(*pair) for pair in zip(found, uneven, strict=True)):
            wrong.append(f"all_gather {dtype} {n}")

        def letter(source: int, to: int, n=n, dtype=dtype) -> torch.Tensor:
            return data(source, (n + source) * (to % 3), dtype, to)  # a size for every pair

        found = [torch.zeros_like(letter(source, r)) for source in range(p)]
        collectives.all_to_all(found, [letter(r, to) for to in range(p)])
        if not all(same(found[source], letter(source, r)) for source in range(p)):
            wrong.append(f"all_to_all {dtype} {n}")
    return wrong


@pytest.mark.parametrize("world_size", ALL)
def test_movements(pools, world_size):
    for rank, wrong in enumerate(pools(world_size)(_movements)):
        assert wrong == [], f"rank {rank}"


def _as_torch_does() -> list[str]:
    """The same arguments to torch's function and to ours, positionally and by name."""
    r, p, wrong = dist.get_rank(), dist.get_world_size(), []
    generator = torch.Generator().manual_seed(r)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def each(name: str, *args, **kwargs) -> None:
        results = []
        for module in (dist, collectives):
            copies = [
                [t.clone() for t in a] if isinstance(a, list)
                else a.clone() if isinstance(a, torch.Tensor) else a
                for a in args
            ]  # fmt: skip
            getattr(module, name)(*copies, **kwargs)
            tensors = [a for a in copies if isinstance(a, (list, torch.Tensor))]
            results.append([t for a in tensors for t in (a if isinstance(a, list) else [a])])
        if name == "reduce" and r != p - 1:
            return  # torch leaves the values of the others open
        for theirs, ours in zip(*results, strict=True):
            if not torch.allclose(theirs, ours, rtol=1e-14, atol=1e-14):
                wrong.append(name)

    last = p - 1
    each("broadcast", fresh(3, 5), last)
    each("broadcast", fresh(3, 5), group_src=last)
    each("all_reduce", fresh(11))
    each("all_reduce", fresh(11), dist.ReduceOp.MAX)
    each("all_reduce", fresh(11), op=dist.ReduceOp(SUM))  # the object, not the name of the kind
    each("reduce", fresh(11), last, dist.ReduceOp.AVG)
    each("scatter", fresh(4), [fresh(4) for _ in range(p)] if r == 0 else None)
    each("gather", fresh(4), [fresh(4) for _ in range(p)] if r == 0 else None)
    each("gather", fresh(4), [fresh(4) for _ in range(p)] if r == last else [], dst=last)
    each("all_gather", [fresh(2, 2) for _ in range(p)], fresh(2, 2))
    each("reduce_scatter", fresh(4), [fresh(4) for _ in range(p)], dist.ReduceOp.MIN)
    each("all_to_all", [fresh(4) for _ in range(p)], [fresh(4) for _ in range(p)])
    each("barrier")
    return wrong


def test_the_same_calls_give_what_torch_gives(pools):
    for rank, wrong in enumerate(pools(5)(_as_torch_does)):
        assert wrong == [], f"rank {rank}"


def _layouts() -> list[str]:
    r, p, wrong = dist.get_rank(), dist.get_world_size(), []

    def layouts(base: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "transposed": base.clone().t(),
            "every second": base.clone()[:, ::2],
            "one column": base.clone()[:, 1],
            "reversed copy": base.clone().flip(0),
            "permuted": base.clone().view(3, 2, 4).permute(2, 0, 1),
            "no dimension": base.clone()[1, 2],
            "no elements": base.clone()[:, :0],
            "a leaf": base.clone().requires_grad_(),
        }

    everyone = [layouts(data(rank, (6, 4), torch.float32)) for rank in range(p)]
    for name, tensor in everyone[r].items():
        before = [mine[name].detach().clone() for mine in everyone]
        for algorithm in ALGORITHMS["all_reduce"]:
            tensor.detach().copy_(before[r])
            collectives.all_reduce(tensor, algorithm=algorithm)
            if not same(tensor.detach(), combined("SUM", before)):
                wrong.append(f"all_reduce {algorithm} {name}")
        tensor.detach().copy_(before[r])
        collectives.broadcast(tensor, p - 1)
        if not same(tensor.detach(), before[p - 1]):
            wrong.append(f"broadcast {name}")
        tensor.detach().copy_(before[r])
        found = [layouts(torch.zeros(6, 4))[name] for _ in range(p)]
        collectives.all_gather(found, tensor)
        if not all(same(f.detach(), b) for f, b in zip(found, before, strict=True)):
            wrong.append(f"all_gather {name}")
        output = layouts(torch.zeros(6, 4))[name]
        collectives.reduce_scatter(output, [tensor] * p)
        if not same(output.detach(), combined("SUM", before)):
            wrong.append(f"reduce_scatter {name}")
        found = [layouts(torch.zeros(6, 4))[name] for _ in range(p)]
        collectives.all_to_all(found, [tensor] * p)
        if not all(same(f.detach(), b) for f, b in zip(found, before, strict=True)):
            wrong.append(f"all_to_all {name}")

    conjugate = torch.full((3,), complex(r, 1)).conj()
    collectives.all_reduce(conjugate)
    if conjugate.tolist() != [complex(sum(range(p)), -p)] * 3:
        wrong.append("all_reduce of a conjugate view")
    one = torch.full((4,), float(r))[::2][1:]  # contiguous, with a stride of 2
    collectives.all_reduce(one)
    if one.tolist() != [float(sum(range(p)))]:
        wrong.append("all_reduce of one element")
    expanded = torch.full((1,), float(r)).expand(4)  # may be read, not written
    found = [torch.zeros(4) for _ in range(p)]
    collectives.all_gather(found, expanded)
    if [f.tolist() for f in found] != [[float(rank)] * 4 for rank in range(p)]:
        wrong.append("all_gather of an expanded tensor")
    return wrong


def test_layouts_in_memory(pools):
    for rank, wrong in enumerate(pools(3)(_layouts)):
        assert wrong == [], f"rank {rank}"


def _groups() -> list[str]:
    world, wrong = dist.get_rank(), []
    for members in ([1, 2, 4], [0, 3], [2]):
        group = dist.new_group(members)
        if world not in members:
            try:
                collectives.all_reduce(torch.ones(1), group=group)
                wrong.append(f"rank {world} took part in {members}")
            except ValueError as error:
                if f"rank {world} called a collective of a group that it" not in str(error):
                    wrong.append(str(error))
            continue
        everyone = [data(rank, 5, torch.float64) for rank in members]
        mine = members.index(world)
        for algorithm in ALGORITHMS["all_reduce"]:
            tensor = everyone[mine].clone()
            collectives.all_reduce(tensor, group=group, algorithm=algorithm)
            if not same(tensor, combined("SUM", everyone)):
                wrong.append(f"all_reduce {algorithm} {members}")
        for i, root in enumerate(members):
            for given in ({"src": root}, {"group_src": i}):
                tensor = everyone[mine].clone()
                collectives.broadcast(tensor, group=group, **given)
                if not same(tensor, everyone[i]):
                    wrong.append(f"broadcast {given} in {members}")
            found = [torch.zeros(5, dtype=torch.float64) for _ in members]
            collectives.gather(everyone[mine], found if world == root else None, root, group)
            if world == root and not all(same(*x) for x in zip(found, everyone, strict=True)):
                wrong.append(f"gather to {root} in {members}")
            tensor = everyone[mine].clone()
            collectives.reduce(tensor, group=group, group_dst=i)
            if world == root and not same(tensor, combined("SUM", everyone)):
                wrong.append(f"reduce to {root} in {members}")
        collectives.barrier(group)
        dist.destroy_process_group(group)
    dist.barrier()
    return wrong


def test_groups(pools):
    for rank, wrong in enumerate(pools(5)(_groups)):
        assert wrong == [], f"rank {rank}"


def _bits() -> list[str]:
    """A digest of the bits of each result, of data that rounds, with NaN and both zeros."""
    r, digests = dist.get_rank(), []
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
    return digests


def test_all_ranks_hold_the_same_bits(pools):
    first, *others = pools(5)(_bits)
    assert len(set(first)) == len(first) == 100
    for other in others:
        assert other == first


def _beside_own_messages() -> list[float]:
    """A message of the user's stays in flight while a collective runs between the same ranks."""
    r, p = dist.get_rank(), dist.get_world_size()
    mine, total = torch.full((4,), float(r)), torch.full((4,), 100.0)
    sending = dist.isend(mine, (r + 1) % p)
    for algorithm in ALGORITHMS["all_reduce"]:
        collectives.all_reduce(total, dist.ReduceOp.MAX, algorithm=algorithm)
    arrived = torch.zeros(4)
    dist.recv(arrived, (r - 1) % p)
    sending.wait()
    return [*arrived.tolist(), *total.tolist()]


def test_messages_of_the_user_are_not_mixed_with_ours(pools):
    results = pools(3)(_beside_own_messages)
    assert results == [[float((r - 1) % 3)] * 4 + [100.0] * 4 for r in range(3)]


def _late(who: int) -> tuple[float, float]:
    if dist.get_rank() == who:
        time.sleep(0.2)
    start = time.perf_counter()
    collectives.barrier()
    return start, time.perf_counter()


def test_a_barrier_waits_for_the_last(pools):
    for late in range(3):
        times = pools(3)(_late, late)
        last_in = max(start for start, _ in times)
        assert all(end >= last_in for _, end in times), late


# ---- costs --------------------------------------------------------------------------------------


def test_the_total_is_what_all_ranks_send():
    for algorithm in ALGORITHMS["all_reduce"]:
        for p in WORLD_SIZES:
            each = [sent("all_reduce", algorithm, p, rank, 840, itemsize=8) for rank in range(p)]
            total = collectives.total("all_reduce", algorithm, p, 840, itemsize=8)
            assert total == Cost(sum(one.messages for one in each), sum(one.nbytes for one in each))
        with pytest.raises(ValueError, match="world_size"):
            collectives.total("all_reduce", algorithm, 0, 1)


def test_the_costs_are_those_of_the_papers():
    n, alpha, beta = 1e6, 3e-5, 2e-9

    def time_of(operation: str, algorithm: str, p: int) -> float:
        return cost(operation, algorithm, p, n).seconds(alpha, beta)

    for p in (1, 2, 3, 4, 6, 8, 100):
        lg, share = math.ceil(math.log2(p)), (p - 1) / p
        expected = {
            ("all_reduce", "ring"): 2 * (p - 1) * alpha + 2 * share * n * beta,
            ("all_reduce", "naive"): 2 * (p - 1) * (alpha + n * beta),
            ("all_reduce", "tree"): 2 * lg * (alpha + n * beta),
            ("reduce_scatter", "ring"): (p - 1) * alpha + share * n * beta,
            ("all_gather", "ring"): (p - 1) * alpha + share * n * beta,
            ("broadcast", "tree"): lg * (alpha + n * beta),
            ("reduce", "tree"): lg * (alpha + n * beta),
            ("broadcast", "flat"): (p - 1) * (alpha + n * beta),
            ("reduce", "flat"): (p - 1) * (alpha + n * beta),
            ("scatter", "flat"): (p - 1) * alpha + share * n * beta,
            ("gather", "flat"): (p - 1) * alpha + share * n * beta,
            ("all_to_all", "pairwise"): (p - 1) * alpha + share * n * beta,
            ("barrier", "dissemination"): lg * (alpha + beta),
        }
        if 2**lg == p:
            expected["all_reduce", "recursive_doubling"] = lg * (alpha + n * beta)
            expected["all_reduce", "halving_doubling"] = 2 * lg * alpha + 2 * share * n * beta
        for (operation, algorithm), seconds in expected.items():
            assert time_of(operation, algorithm, p) == pytest.approx(seconds), (operation, p)

    # Beyond a power of two: the core's cost, and two whole vectors for the surplus ranks.
    assert cost("all_reduce", "recursive_doubling", 6, 12) == Cost(2 + 2, (2 + 2) * 12)
    assert cost("all_reduce", "halving_doubling", 6, 12) == Cost(4 + 2, 2 * 3 / 4 * 12 + 2 * 12)
    assert {(o, a) for o, names in ALGORITHMS.items() for a in names} == {
        *expected,
        ("all_reduce", "recursive_doubling"),
        ("all_reduce", "halving_doubling"),
    }


def test_what_ranks_send_adds_up():
    """Totals over all ranks, which can be told without following any algorithm."""
    for p in WORLD_SIZES:
        for n in (0, 5, 64, 1001):

            def total(operation, algorithm, root=0, p=p, n=n):
                each = [sent(operation, algorithm, p, r, n, 8, root) for r in range(p)]
                return sum(one.nbytes for one in each) // 8

            assert total("broadcast", "tree", p - 1) == total("broadcast", "flat") == (p - 1) * n
            assert total("reduce", "tree") == total("reduce", "flat", p // 2) == (p - 1) * n
            assert total("all_reduce", "naive") == total("all_reduce", "tree") == 2 * (p - 1) * n
            assert total("all_reduce", "ring") == 2 * (p - 1) * n
            assert total("all_gather", "ring") == total("reduce_scatter", "ring") == (p - 1) * n
            assert total("all_to_all", "pairwise") == (p - 1) * n
            assert total("scatter", "flat") == n - (n // p + (n % p > 0))
            if p & (p - 1) == 0:
                assert total("all_reduce", "halving_doubling") == 2 * (p - 1) * n
                assert total("all_reduce", "recursive_doubling") == p * math.log2(p) * n


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match="operation must be one of broadcast, .*barrier, not 'x'"):
        cost("x", "ring", 4, 10)
    with pytest.raises(ValueError, match="broadcast must be one of tree, flat, not 'ring'"):
        sent("broadcast", "ring", 4, 0, 10)
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        cost("all_reduce", "ring", 0, 10)
    with pytest.raises(ValueError, match="not be negative, as -1"):
        cost("all_reduce", "ring", 2, -1)
    with pytest.raises(ValueError, match=r"rank 4 and root 0 must be in 0\.\.3"):
        sent("all_reduce", "ring", 4, 4, 10)


def _counted(numel: int) -> dict:
    r, p = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(numel, dtype=torch.float64)
    block = list(whole.tensor_split(p))
    root = p // 2
    blocks_like = [torch.zeros_like(b) for b in block]
    calls = {
        "broadcast": lambda **a: collectives.broadcast(whole, root, **a),
        "reduce": lambda **a: collectives.reduce(whole, root, **a),
        "all_reduce": lambda **a: collectives.all_reduce(whole, **a),
        "all_gather": lambda: collectives.all_gather(blocks_like, block[r]),
        "reduce_scatter": lambda: collectives.reduce_scatter(blocks_like[r], block),
        "all_to_all": lambda: collectives.all_to_all(
            [torch.zeros_like(block[r]) for _ in range(p)], block
        ),
        "barrier": collectives.barrier,
    }
    if numel % p == 0:
        calls["scatter"] = lambda: collectives.scatter(
            blocks_like[r], block if r == root else None, root
        )
        calls["gather"] = lambda: collectives.gather(
            block[r], blocks_like if r == root else None, root
        )
    found = {}
    for operation, call in calls.items():
        for algorithm in ALGORITHMS[operation]:
            chosen = {"algorithm": algorithm} if len(ALGORITHMS[operation]) > 1 else {}
            with md.measure.TrafficCounter() as counter:
                call(**chosen)
            found[operation, algorithm] = counter
    return found


@pytest.mark.parametrize("world_size", ALL)
def test_what_is_counted_is_what_was_predicted(pools, world_size):
    p = world_size
    for numel in (0, 3, 8 * p, 1000, 1001):
        ranks = pools(p)(_counted, numel)
        for operation, algorithm in ranks[0]:
            counters = [found[operation, algorithm] for found in ranks]
            case = f"{operation} {algorithm} of {numel} elements on {p}"
            for r, counter in enumerate(counters):
                expected = sent(operation, algorithm, p, r, numel, 8, root=p // 2)
                assert (counter.sent_messages, counter.sent_bytes) == expected, f"{case}, rank {r}"
                assert counter.calls == {}
                received = [c.sent_to[r] for c in counters]
                assert counter.received_from == received, f"{case}, rank {r}"
            # The agreement: a header up and one down for every rank but the first. An all_to_all
            # agrees twice, and between the two every pair compares its shapes.
            control = 2 * (p - 1) if operation != "all_to_all" else 4 * (p - 1) + p * (p - 1)
            assert sum(c.control_messages for c in counters) == control, case
            assert sum(c.control_bytes for c in counters) == control * HEADER_BYTES, case


# ---- wrong calls --------------------------------------------------------------------------------

ONES = torch.ones
ANYWHERE = "refused: every rank of the group must make the same, valid call"


BAND, AVG = dist.ReduceOp.BAND, dist.ReduceOp.AVG
NOT_ALL = "<- {} must be a list of 3 tensors"
WRONG = [  # what rank r of three calls, and what all of them are told
    ("rank 1: all_reduce(tensor=float32 (4,), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(4 if r == 1 else 3))),
    ("rank 1: all_reduce(tensor=float32 (3, 2), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES((3, 2) if r == 1 else (2, 3)))),
    ("rank 2: all_reduce(tensor=int32 (3,), op=SUM, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(3, dtype=torch.int32 if r == 2 else torch.float32))),
    ("rank 2: all_reduce(tensor=float32 (3,), op=MAX, algorithm=ring)",
     lambda r: collectives.all_reduce(ONES(3), dist.ReduceOp.MAX if r == 2 else SUM)),
    ("rank 1: all_reduce(tensor=float32 (3,), op=SUM, algorithm=naive)",
     lambda r: collectives.all_reduce(ONES(3), algorithm="naive" if r == 1 else "ring")),
    ("rank 1: broadcast(tensor=float32 (3,), src=0, algorithm=tree)",
     lambda r: collectives.broadcast(ONES(3), 0) if r == 1 else collectives.all_reduce(ONES(3))),
    ("rank 2: broadcast(tensor=float32 (3,), src=2, algorithm=tree)",
     lambda r: collectives.broadcast(ONES(3), 2 if r == 2 else 0)),
    ("rank 1: barrier()",
     lambda r: collectives.barrier() if r == 1 else collectives.all_reduce(ONES(3))),
    ("src=7, algorithm=tree)  <- src=7 is not in this group of ranks [0, 1, 2]",
     lambda r: collectives.broadcast(ONES(3), 7)),
    ("<- give either src or group_src",
     lambda r: collectives.broadcast(ONES(3), 0, group_src=0)),
    ("rank 1: all_reduce(tensor=[float], op=SUM, algorithm=ring)  <- tensor must be a tensor",
     lambda r: collectives.all_reduce([1.0] if r == 1 else ONES(3))),
    ("rank 1: all_reduce(tensor=float32 (3,), op=SUM, algorithm=ring)  <- tensor is expanded",
     lambda r: collectives.all_reduce(ONES(1).expand(3) if r == 1 else ONES(3))),
    ("<- BAND is not defined for float32", lambda r: collectives.all_reduce(ONES(3), BAND)),
    ("<- AVG is not defined for int64",
     lambda r: collectives.reduce(ONES(3, dtype=torch.int64), 0, AVG)),
    ("<- op must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, not str",
     lambda r: collectives.all_reduce(ONES(3), "sum")),
    ("<- algorithm must be one of ring, naive, tree, recursive_doubling, halving_doubling",
     lambda r: collectives.all_reduce(ONES(3), algorithm="rong" if r == 0 else "ring")),
    ("rank 2: all_gather(tensor=float32 (3,), tensor_list=2 × float32 (3,))  "
     + NOT_ALL.format("tensor_list"),
     lambda r: collectives.all_gather([ONES(3) for _ in range(2 if r == 2 else 3)], ONES(3))),
    ("rank 0: scatter(tensor=float32 (3,))  " + NOT_ALL.format("scatter_list"),
     lambda r: collectives.scatter(ONES(3))),
    ("rank 1: gather(tensor=float32 (3,), gather_list=3 × float32 (3,))"
     "  <- gather_list is for the destination rank only",
     lambda r: collectives.gather(ONES(3), [ONES(3) for _ in range(3)] if r < 2 else None)),
    ("rank 1: all_gather(tensor=float32 (2,), tensor_list=3 × float32 (3,))"
     "  <- tensor_list[1] is float32 (3,), not float32 (2,)",
     lambda r: collectives.all_gather([ONES(3) for _ in range(3)], ONES(2 if r == 1 else 3))),
    ("input_tensor_list=3 × float32 (2,))"
     "  <- output_tensor_list[1] is not of the shape that rank 1 sends",
     lambda r: collectives.all_to_all([ONES(2) for _ in range(3)],
                                      [ONES(3 if r == 1 else 2), ONES(2), ONES(2)])),
]  # fmt: skip


def _refused(call) -> str:
    try:
        call(dist.get_rank())
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing was raised"
    # Nothing of the refused call is left in flight: the next one is right.
    tensor = torch.arange(5.0) + dist.get_rank()
    collectives.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 6.0, 9.0, 12.0, 15.0]
    return message


def test_a_wrong_call_is_an_error_on_every_rank(pools):
    for says, call in WRONG:
        first, *others = pools(3)(_refused, call)
        assert others == [first, first], says
        head, *lines = first.split("\n")
        assert head == ANYWHERE, says
        assert [line.split(":")[0] for line in lines] == ["  rank 0", "  rank 1", "  rank 2"], says
        assert says in first


def test_the_table_names_global_ranks(pools):
    def within_a_group() -> str:
        group = dist.new_group([0, 2])
        message = ""
        if dist.get_rank() != 1:
            try:
                collectives.all_reduce(torch.ones(1 + dist.get_rank()), group=group)
            except ValueError as error:
                message = str(error)
            dist.destroy_process_group(group)
        dist.barrier()
        return message

    first, outside, other = pools(3)(within_a_group)
    assert outside == ""
    assert first == other
    assert "rank 0: all_reduce(tensor=float32 (1,)" in first
    assert "rank 2: all_reduce(tensor=float32 (3,)" in first


# ---- GPUs ---------------------------------------------------------------------------------------


def _on_gpus() -> list[str]:
    r, p, device, wrong = dist.get_rank(), dist.get_world_size(), md.rank.device(), []
    everyone = [data(rank, 1001, torch.float32).to(device) for rank in range(p)]
    expected = everyone[r].clone()
    dist.all_reduce(expected)
    for algorithm in ALGORITHMS["all_reduce"]:
        tensor = everyone[r].clone()
        collectives.all_reduce(tensor, algorithm=algorithm)
        if not same(tensor, expected):
            wrong.append(f"all_reduce {algorithm}")
    for algorithm in ALGORITHMS["broadcast"]:
        tensor = everyone[r].clone()
        collectives.broadcast(tensor, p - 1, algorithm=algorithm)
        if not same(tensor, everyone[p - 1]):
            wrong.append(f"broadcast {algorithm}")
    found = [torch.zeros_like(tensor) for tensor in everyone]
    collectives.all_gather(found, everyone[r])
    if not all(same(*pair) for pair in zip(found, everyone, strict=True)):
        wrong.append("all_gather")
    piece = torch.empty(1, device=device)
    collectives.reduce_scatter(piece, list(everyone[r][:p].split(1)))
    if not same(piece, expected[r : r + 1]):
        wrong.append("reduce_scatter")
    collectives.barrier()
    return wrong


@pytest.mark.gpu(2)
def test_gpu_tensors_over_nccl():
    with md.ranks(min(8, torch.cuda.device_count())) as pool:
        for rank, wrong in enumerate(pool(_on_gpus)):
            assert wrong == [], f"rank {rank}"


def _over_gloo(device):
    """What a message of a tensor on this device says; a fake one, where there is no GPU."""
    peers = Peers()
    neighbour = 1 - dist.get_rank()
    with nullcontext() if torch.cuda.is_available() else FakeTensorMode():
        x = torch.ones(4, device=device)
        for message in peers.send, peers.recv, peers.isend, peers.irecv, peers.expect:
            try:
                message(x, neighbour)
                yield "sent"
            except ValueError as error:
                yield str(error)


def test_a_gpus_memory_does_not_go_over_gloo_and_every_rank_hears_it():
    def refused():
        with FakeTensorMode():
            x = torch.ones(4, device="cuda")
        try:
            collectives.all_reduce(x if dist.get_rank() == 1 else torch.ones(4))
        except ValueError as error:
            return str(error)

    with md.ranks(2, backend="gloo") as pool:
        for said in pool(refused):
            call = "all_reduce(tensor=float32 (4,) on cuda:0, op=SUM, algorithm=ring)"
            assert f"rank 1: {call}  <- gloo sends no message from a GPU" in said
        for said in pool(lambda: list(_over_gloo("cuda"))):
            assert len(said) == 5
            assert all("gloo sends no message from a GPU's memory" in each for each in said)


@pytest.mark.gpu
def test_collectives_and_pipelines_of_gpus_refuse_gloo():
    def calls():
        x = torch.ones(8, 4, device="cuda")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
        step = md.Pipeline(model, 2).train_step
        for call in lambda: collectives.all_reduce(x), lambda: step(x, x, F.mse_loss):
            try:
                call()
            except ValueError as error:
                yield str(error)

    with md.ranks(2, backend="gloo") as pool:
        for said in pool(lambda: list(calls())):
            assert len(said) == 2 and all("GPU's memory" in each for each in said)
