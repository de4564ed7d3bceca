"""How a rank of "shm" waits: interrupts, threads, fences; and what lies in the arena."""

import contextlib
import inspect
import random
import signal
import sys
import threading
import time
from array import array

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.backend import words
from minidist.backend.bell import Bell
from minidist.backend.engine import Engine
from minidist.backend.handle import Handle
from minidist.backend.members import STAGE, STAGES
from minidist.backend.queues import Queues, Task, Wait
from minidist.backend.segment import HEAD

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


# ---- an interrupt -------------------------------------------------------------------------


def interrupted(seconds, call):
    """Rank 0 is interrupted after so many seconds, and leaves. How long the last call took on each
    rank, and what it raised."""
    group, rank = dist.new_group(), dist.get_rank()
    x = torch.ones(STAGE // 4 if call == "large" else 1)
    start, seen = time.monotonic(), None
    dist.barrier(group)
    if rank == 0:
        # An alarm, for ranks of a pool never see SIGINT.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        while time.monotonic() < start + SOON:
            begun = time.monotonic()
            if call == "message":
                dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
            else:
                dist.all_reduce(x, group=group)
    except KeyboardInterrupt:
        seen = "interrupt"
    except RuntimeError as error:
        seen = str(error)
    taken = time.monotonic() - begun
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(group)
    return seen, taken


@pytest.mark.parametrize("call", ["small", "large", "message"])
def test_an_interrupt_at_any_moment_ends_the_call_on_every_rank(ranks, call):
    chance = random.Random(0)
    for _ in range(15):
        (mine, short), (theirs, wait) = ranks(2)(interrupted, chance.uniform(0.001, 0.02), call)
        assert mine == "interrupt" and short < SOON
        assert "rank 0 has left" in theirs and wait < SOON


def interrupted_at(known, call):
    """Rank 0 is interrupted in the backend, as soon as it comes to a place that is not yet known.
    Python may do so where a function begins, and after each call of one in C. What the call raised
    on each rank, how long call and farewell took, and the place."""
    group, rank = dist.new_group(), dist.get_rank()
    x, places = torch.ones(1), []
    dist.barrier(group)

    def interrupt(frame, event, _):
        code = frame.f_code
        generates = bool(code.co_flags & inspect.CO_GENERATOR)
        place = code.co_filename[-20:], code.co_name, frame.f_lineno, event, generates
        if event in ("call", "c_return") and "backend" in code.co_filename and place not in known:
            sys.setprofile(None)
            places.append(place)
            raise KeyboardInterrupt

    start, seen = time.monotonic(), None
    time.sleep(0.01 * rank)  # so that rank 0 has to wait
    try:
        sys.setprofile(interrupt if rank == 0 else None)
        if call == "all_reduce":
            dist.all_reduce(x, group=group)
        elif (rank == 0) == (call == "send"):
            dist.send(x, 1 - rank, group=group)
        else:
            dist.recv(x, 1 - rank, group=group)
    except KeyboardInterrupt:
        seen = "interrupt"
    except RuntimeError as error:
        seen = str(error)
    finally:
        sys.setprofile(None)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(group)
    return seen, time.monotonic() - start, places


@pytest.mark.parametrize("call", ["send", "recv", "all_reduce"])
def test_an_interrupt_at_each_place_of_a_call_ends_it_on_every_rank(ranks, call):
    known, calm = [], 0  # how often no new place was found: the way depends on who comes first
    while calm < 5:
        (mine, short, place), (theirs, wait, _) = ranks(2)(interrupted_at, known, call)
        assert max(short, wait) < SOON, place
        assert theirs is None or "rank 0 has left" in theirs
        # Python itself swallows one in a generator that it closes because nobody has it any more.
        assert mine == ("interrupt" if place else None) or place[0][-1]
        known, calm = known + place, 0 if place else calm + 1
    names = {name for _, name, *_ in known}
    assert "submit" in names and (call == "send" or "_left" in names)  # a short send never waits


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
    assert ranks(2)(threads_talk, 200)[0] == []


def test_what_one_thread_has_ended_no_other_ends_again():
    """Between submitting a task and beginning it, the engine's own thread may have done it."""
    queues = Queues()
    task = Task((wait for wait in ()), Handle([], lambda: "a call"), SOON)
    queues.add("queue", task)
    assert queues.round() == (True, [task])
    assert queues.begin("queue", task) == (False, [])


class Flag(Wait):
    """What another rank will do."""

    done = False

    def over(self):
        return self.done


def test_a_callback_on_the_engines_own_thread_may_wait_for_what_it_calls():
    bell, _ = Bell.create(memoryview(array("q", [0] * 8)))
    engine = Engine(bell, lambda *wait: None, farewell=bell.close)
    flag, go, found = Flag(), threading.Event(), []

    def before():
        go.wait(SOON)
        yield from ()

    def short():
        yield flag

    def call_and_wait(_):
        handle = Handle(["here"], lambda: "a short call")
        engine.submit("short", short(), handle, SOON, short=True)
        threading.Timer(0.05, lambda: setattr(flag, "done", True)).start()
        found.append(handle.get_future().wait())  # in C++: this thread does nothing meanwhile

    first = Handle([], lambda: "a call")
    first.get_future().add_done_callback(call_and_wait)
    engine.submit("first", before(), first, SOON)
    go.set()
    deadline = time.monotonic() + SOON
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == [["here"]]
    engine.close()


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


def with_fences():
    words.ORDERED = False
    try:
        total = torch.arange(3.0 * STAGE // 4)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            dist.send(total, 1)
        elif dist.get_rank() == 1:
            dist.recv(total, 0)
        return torch.equal(total, torch.arange(3.0 * STAGE // 4) * dist.get_world_size())
    finally:
        words.ORDERED = True


def test_ranks_with_fences_compute_the_same(ranks):
    assert ranks(3)(with_fences) == [True] * 3


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
    found["all_gather"] = staged(group)
    dist.destroy_process_group(group)

    group = dist.new_group()
    total, parts = torch.empty(n), new(size * n, rank + 1, group)
    dist.reduce_scatter_tensor(total, parts, group=group)
    assert torch.equal(total, row(size * (size + 1) / 2, rank))
    dist.reduce_scatter(total, list(parts.chunk(size)), dist.ReduceOp.MAX, group=group)
    assert torch.equal(total, row(size, rank))
    apart = [part.clone() for part in parts.chunk(size)] if rank == 0 else list(parts.chunk(size))
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


@pytest.mark.parametrize("n", [1000, STAGE // 4 + 5])
def test_collectives_of_tensors_in_the_arena_are_done_in_place(ranks, n):
    assert ranks(3)(in_place, range(3), n) == 3 * [
        {"all_gather": False, "reduce_scatter": False, "broadcast": False}
    ]
    for inside in ([], [1], [0, 2]):
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
