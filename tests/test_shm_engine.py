"""How a rank of "shm" waits: threads, fences; and what lies in the arena."""

import itertools
import threading
import time
from array import array

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import minidist as md
from minidist.instruments.measure.storages import Ledger
from minidist.machine.backend import empty, words
from minidist.machine.backend.group import STAGE, STAGES
from minidist.machine.backend.queues import Queues, Task
from minidist.machine.backend.segment import HEAD

SOON = 5  # seconds

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ranks():
    """`ranks(3)`: the same ranks at every call."""
    kept = {}

    def pool(world_size):
        if world_size not in kept:
            kept[world_size] = md.ranks(world_size, backend="shm", timeout=20)
        return kept[world_size]

    yield pool
    for opened in kept.values():
        opened.close()


# ---- several threads ----------------------------------------------------------------------


def threads_talk(rounds):
    """Each thread sends its own messages, and waits for their answers."""
    rank, wrong = dist.get_rank(), []

    def talk(tag):
        for i in range(rounds):
            x = torch.tensor([float(i * tag)])
            if rank == 0:
                dist.send(x, 1, tag=tag)
                dist.recv(x, 1, tag=tag)
            else:
                dist.recv(x, 0, tag=tag)
                dist.send(x + 1, 0, tag=tag)
            if rank == 0 and x.item() != i * tag + 1:
                wrong.append((tag, i, x.item()))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_threads_that_wait_at_once_each_get_their_own(ranks):
    assert ranks(2)(threads_talk, 50)[0] == []


def called(result=()):
    return Task(iter(()), SOON, lambda: "a call", list(result), None)


def test_what_one_thread_has_ended_no_other_ends_again():
    """Between submitting a task and beginning it, the engine's own thread may have done it."""
    queues, task = Queues(), called()
    queues.add("queue", task)
    assert queues.round() == (True, [task])
    assert queues.begin("queue", task) == (False, [])


def test_a_call_does_not_overtake_one_that_has_not_begun():
    """Of two receives, the first that begins gets the first message."""
    queues, first, second = Queues(), called(), called()
    queues.add("one", first)
    queues.add("another", second)
    assert queues.begin("another", second) == (False, [])
    assert queues.round() == (True, [first])
    assert queues.begin("another", second) == (True, [second])


def test_completing_a_task_a_second_time_changes_nothing():
    task, found = called(["here"]), []
    task.get_future().add_done_callback(lambda future: found.append(future.value()))
    task.complete()
    task.complete(RuntimeError("too late"))
    assert task.wait() and found == [["here"]]


# ---- fences -------------------------------------------------------------------------------


class Notes(list):
    """A word of shared memory, and a lock, that note what is done with them."""

    def __init__(self, value=0):
        self.value = value

    def __enter__(self):
        self.append("take")

    def __exit__(self, *_):
        self.append("give back")

    def __getitem__(self, at):
        self.append("read")
        return self.value

    def __setitem__(self, at, value):
        self.append("write")


FENCE = ["take", "give back", "take", "give back"]


def test_a_fence_stands_before_what_is_published_and_after_what_is_reached(monkeypatch):
    notes = Notes(value=7)
    monkeypatch.setattr(words, "_lock", notes)
    monkeypatch.setattr(words, "ORDERED", False)
    words.publish(notes, 0, 1)
    assert list.copy(notes) == [*FENCE, "write"]
    notes.clear()
    assert words.reached([notes, notes], 0, 7)
    assert list.copy(notes) == ["read", "read", *FENCE]
    notes.clear()
    assert not words.reached([notes], 0, 8)
    assert list.copy(notes) == ["read"]
    monkeypatch.setattr(words, "ORDERED", True)
    notes.clear()
    words.publish(notes, 0, 1)
    assert list.copy(notes) == ["write"]


@pytest.mark.parametrize("futex", [words.FUTEX, None])
def test_a_bell_that_rang_before_somebody_waits_is_heard(monkeypatch, futex):
    monkeypatch.setattr(words, "FUTEX", futex)
    bell = words.Bell(memoryview(array("q", [0] * 16)))
    bell.expect(words.WAITER)
    bell.ring()
    start = time.monotonic()
    bell.wait(words.WAITER, 60)
    assert time.monotonic() - start < SOON


def as_on_macos():
    """With fences, as on its processors, and without the system call by which a rank is woken."""
    ordered, futex = words.ORDERED, words.FUTEX
    words.ORDERED, words.FUTEX = False, None
    try:
        total = torch.arange(3.0 * STAGE // 4)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            dist.send(total, 1)
        elif dist.get_rank() == 1:
            dist.recv(total, 0)
        return torch.equal(total, torch.arange(3.0 * STAGE // 4) * dist.get_world_size())
    finally:
        words.ORDERED, words.FUTEX = ordered, futex


def test_ranks_compute_the_same_as_on_macos(ranks):
    assert ranks(3)(as_on_macos) == [True] * 3


# ---- messages -----------------------------------------------------------------------------


def with_new_tags():
    """What a rank still has of messages that it has received, one of them before its turn."""
    group, rank, x = dist.new_group(), dist.get_rank(), torch.zeros(3)
    for tag in range(0, 100, 2):
        for each in (tag, tag + 1) if rank else (tag + 1, tag):
            dist.recv(x, 1, group, tag=each) if not rank else dist.send(x, 0, group, tag=each)
    return len(group._post._aside)


def test_nothing_is_kept_of_messages_that_were_received(ranks):
    assert ranks(2)(with_new_tags) == [0, 0]


# ---- tensors in the arena -----------------------------------------------------------------


def staged(group):
    """Whether anything has gone through this rank's staging areas."""
    mine = group.members.mine.bytes[HEAD : HEAD + STAGES * STAGE]
    return bool(mine.any())


def in_place(inside, n):
    """all_gather, reduce_scatter and broadcast, where the tensors of the ranks `inside` lie in the
    arena: which of them went through a staging area."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}

    def new(numel, value, group):
        x = md.backend.empty(numel, group=group) if rank in inside else torch.empty(numel)
        return x.copy_(torch.arange(1.0, numel + 1)).mul_(value)

    def row(value, part=0):
        return torch.arange(1.0 + part * n, n + 1 + part * n) * value

    group = dist.new_group()
    mine = new(n, rank + 1, group)
    whole = torch.empty(size * n)
    dist.all_gather_into_tensor(whole, mine, group=group)
    assert torch.equal(whole.view(size, n), torch.stack([row(r + 1) for r in range(size)]))
    own = new(size * n, 0, group)
    own[rank * n : (rank + 1) * n] = row(rank + 1)  # its part lies where it belongs
    dist.all_gather_into_tensor(own, own[rank * n : (rank + 1) * n], group=group)
    assert torch.equal(own, whole)
    cuts = [0, 3, 3, n // 2 + 1, n]  # several at once, that lie one behind another
    several = [mine[a:b] for a, b in itertools.pairwise(cuts)]
    wholes = [torch.empty(size * len(each)) for each in several]
    group.all_gather_single_coalesced(wholes, several).wait()
    gathered = torch.cat([each.view(size, -1) for each in wholes], 1)
    assert torch.equal(gathered, whole.view(size, n))
    found["all_gather"] = staged(group)
    if rank == 1:  # and here and there, on one rank
        several = [each.clone() for each in several]
    group.all_gather_single_coalesced([each.zero_() for each in wholes], several).wait()
    gathered = torch.cat([each.view(size, -1) for each in wholes], 1)
    assert torch.equal(gathered, whole.view(size, n))
    dist.destroy_process_group(group)

    group = dist.new_group()
    total, parts = torch.empty(n), new(size * n, rank + 1, group)
    dist.reduce_scatter_tensor(total, parts, group=group)
    assert torch.equal(total, row(size * (size + 1) / 2, rank))
    dist.reduce_scatter(total, list(parts.chunk(size)), dist.ReduceOp.MAX, group=group)
    assert torch.equal(total, row(size, rank))
    apart = [part.clone() for part in parts.chunk(size)] if rank == 0 else list(parts.chunk(size))
    own = new(size * n, rank + 1, group)
    its = own[rank * n : (rank + 1) * n]  # the sum goes where this rank's part is
    dist.reduce_scatter_tensor(its, own, group=group)
    assert torch.equal(its, row(size * (size + 1) / 2, rank))
    found["reduce_scatter"] = staged(group)
    dist.reduce_scatter(total, apart, group=group)  # on rank 0 the parts lie here and there
    assert torch.equal(total, row(size * (size + 1) / 2, rank))
    dist.destroy_process_group(group)

    group = dist.new_group()
    for root in range(size):
        x = new(n, rank + 1, group)
        dist.broadcast(x, root, group=group)
        assert torch.equal(x, row(root + 1))
        x.fill_(-1)  # while others might still read
    found["broadcast"] = staged(group)
    dist.destroy_process_group(group)
    return found


def test_collectives_of_tensors_in_the_arena_are_done_in_place(ranks):
    n = STAGE // 4 + 5
    assert ranks(3)(in_place, range(3), n) == 3 * [
        {"all_gather": False, "reduce_scatter": False, "broadcast": False}
    ]
    for inside in ([], [0, 2]):
        found = ranks(3)(in_place, inside, n)
        for rank, each in enumerate(found):
            assert each["all_gather"] and each["reduce_scatter"]
            assert each["broadcast"] == (rank not in inside)


def two_of_one_rank_differ(n):
    """What is in the arena is read by the others until all have: so it may change after a call."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), 0
    mine, whole = md.backend.empty(n), torch.empty(size * n)
    for i in range(30):
        mine.fill_(i + rank)
        dist.all_gather_into_tensor(whole, mine)
        mine.fill_(-1)
        wrong += whole.view(size, n)[:, 0].tolist() != [i + r for r in range(size)]
        wrong += not torch.equal(whole.view(size, n)[:, -1], whole.view(size, n)[:, 0])
    return wrong


def test_nobody_changes_what_another_still_reads(ranks):
    assert ranks(3)(two_of_one_rank_differ, 200_000) == [0, 0, 0]


# ---- what else is taken -------------------------------------------------------------------------


def summed_twice():
    """What torch's functional collectives give has its memory elsewhere, once it has come."""
    x = functional.all_reduce(torch.full((4,), 1.0 + dist.get_rank()), "sum", dist.group.WORLD)
    assert type(x) is not torch.Tensor
    dist.all_reduce(x)
    return x.tolist()


def test_what_a_functional_collective_gives_is_taken(ranks):
    assert ranks(2)(summed_twice) == [[6.0] * 4] * 2


def reduced(sizes):
    """What a reduce leaves on this rank, of tensors of torch's and of the arena."""
    found = []
    for n in sizes:
        for x in (torch.empty(n), empty(n)):
            dist.reduce(x.fill_(1.0 + dist.get_rank()), 1)
            found.append(x.unique().tolist())
    return found


def test_a_reduce_leaves_the_tensors_of_those_who_receive_nothing(ranks):
    sizes = [5, STAGE // 8, STAGE]
    assert ranks(3)(reduced, sizes) == [6 * [[total]] for total in (1, 6, 3)]


def test_a_call_that_has_returned_holds_no_tensor(ranks):
    """Our own thread does the work where a mode is active; lessons count tensors by such a mode."""

    def left_over():
        left = 0
        with Ledger(torch.device("cpu")) as ledger:
            for _ in range(100):
                whole = [torch.empty(1000) for _ in range(dist.get_world_size())]
                dist.all_gather(whole, whole[0].clone())
                del whole
                left = max(left, ledger.live())
        return left

    assert ranks(3)(left_over) == [0] * 3
