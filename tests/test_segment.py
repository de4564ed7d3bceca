"""The memory that ranks share: it grows, whoever it is for finds it, and nobody else is touched."""

import ctypes
import gc
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from programs import eventually

import minidist as md
from minidist.machine.backend.group import HEAD, SLOT, STAGE, STAGES, Members
from minidist.machine.backend.segment import KEPT, Arena, Segment, has_ended, hide

SOON = 5  # seconds
MIB = 1 << 20

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def shm():
    """`shm(2)`: two ranks, the same at every call."""
    kept = {}

    def pool(world_size):
        if world_size not in kept:
            kept[world_size] = md.ranks(world_size, backend="shm")
        return kept[world_size]

    yield pool
    for opened in kept.values():
        opened.close()


@pytest.fixture
def pair():
    """A segment: as who made it sees it, and as another rank does."""
    mine, shown = Segment.create(MIB)
    theirs = Segment.attach(shown, MIB)
    hide(shown)
    yield mine, theirs
    mine.close()
    theirs.close()


def mapped():
    """Bytes of this process's addresses at which shared memory lies."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if "memfd:minidist" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def meet(size, store=None, timeout=10, absent=()):
    """The ranks of a group, all in this process; for one that could not join, the error."""
    store = store or dist.HashStore()

    def join(rank):
        try:
            return Members(store, rank, size, timedelta(seconds=timeout))
        except (RuntimeError, OSError) as error:
            return type(error)(*error.args)  # not the one whose traceback holds the files

    there = [rank for rank in range(size) if rank not in absent]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, there))


# ---- it is small, and grows ---------------------------------------------------------------


def grown():
    """What a group costs at first, with a tensor, and when all have seen that."""
    before, group = mapped(), dist.new_group()
    sizes = [mapped()]
    x = md.backend.empty(100 * MIB, dtype=torch.uint8, group=group)
    sizes.append(mapped())
    x[:MIB].fill_(1)
    dist.all_reduce(x[:MIB], group=group)
    sizes.append(mapped())
    assert x[:MIB].unique().tolist() == [dist.get_world_size()]
    dist.destroy_process_group(group)
    del x, group
    end = time.monotonic() + 10
    while mapped() != before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return [size - before for size in (*sizes, mapped())]


def test_a_group_costs_few_addresses_and_a_chunk_more_when_a_tensor_needs_it(shm):
    """However much memory the machine has."""
    size = 3
    begin = HEAD + STAGES * STAGE + 2 * size * SLOT
    assert begin < (13 + size) * MIB
    for group, tensor, reduced, left in shm(size)(grown):
        assert group == size * begin
        assert tensor == group + 128 * MIB  # the smallest chunk for 100 MB
        assert reduced == group + size * 128 * MIB  # everyone's, where all have one
        assert left == 0


def test_all_ranks_of_a_machine_find_each_other():
    before, size = files(), 12
    members = meet(size)
    tensors = [m.arena.empty(5, torch.int64).fill_(m.rank) for m in members]
    assert all([m.share(x) for m, x in zip(members, tensors, strict=True)])
    for m in members:
        found = [m.shared(rank, tensors[0]) for rank in range(size)]
        assert [x.unique().tolist() for x in found] == [[rank] for rank in range(size)]
    slots = [[m.slot(0, 11, 1), m.slot(11, 11, 0)] for m in members]
    ctypes.memset(slots[3][0], 33, SLOT)
    ctypes.memset(slots[4][1], 44, SLOT)
    seen = {tuple(ctypes.string_at(slot, SLOT) for slot in pair) for pair in slots}
    assert seen == {(bytes([33]) * SLOT, bytes([44]) * SLOT)}
    for m in members:
        m.leave()
    del members, m, tensors, found, slots
    assert files() == before


def test_the_place_of_a_tensor_is_found_by_all(pair):
    mine, theirs = pair
    room = Arena(mine)
    x = room.empty(3 * MIB, torch.float32).copy_(torch.arange(3.0 * MIB))
    small = [room.empty(n, torch.bfloat16) for n in (0, 1, 5000)]
    whole = room.empty(2 * MIB, torch.uint8)
    for part in (x, x[7:], x[-1:], x.view(3, MIB)[1], x.view(torch.int16)[5:9], *small[1:], whole):
        place = mine.find(part)
        seen = theirs.at(place, part.numel(), part.dtype)
        assert torch.equal(seen.view(torch.uint8), part.contiguous().view(-1).view(torch.uint8))
        assert theirs.find(seen) == place and mine.find(seen) == 0  # at other addresses
    theirs.at(mine.find(x[9:]), 1, torch.float32).fill_(-3)
    assert x[8:11].tolist() == [8, -3, 10]
    elsewhere = [torch.zeros(9), mine.bytes, mine.bytes[100:], torch.zeros(0), theirs.bytes]
    assert [mine.find(x) for x in elsewhere] == [0] * 5
    assert small[0].shape == (0,)


def test_tensors_of_the_arena_do_not_touch_each_other_and_leave_all_free(pair):
    """Any order of asking and leaving, in four threads."""
    mine, theirs = pair
    room, problems = Arena(mine), []

    def live(seed):
        generator, mine_now = random.Random(seed), []
        for turn in range(200):
            if mine_now and generator.random() < 0.5:
                x, value = mine_now.pop(generator.randrange(len(mine_now)))
                there = theirs.at(mine.find(x), x.numel(), x.dtype)
                if not (x == value).all() or not (there == value).all():
                    problems.append((seed, turn))
            elif sum(x.nbytes for x, _ in mine_now) < 64 * MIB:
                n = int(2 ** generator.uniform(0, 22))
                value = generator.randrange(1, 1000)
                mine_now.append((room.empty(n, torch.int32).fill_(value), value))

    threads = [threading.Thread(target=live, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_memory_of_a_short_lived_tensor_serves_the_next_of_its_size(pair):
    mine, theirs = pair
    room = Arena(mine)
    x = room.empty(MIB, torch.int32, short_lived=True).fill_(5)
    y = room.empty(3 * MIB, torch.int8, short_lived=True).fill_(6)
    places = mine.find(x), mine.find(y)
    del x, y
    other = room.empty(MIB, torch.int32)
    assert mine.find(other) not in places  # which are kept
    again = room.empty(3 * MIB, torch.int8, short_lived=True)
    more = room.empty(MIB, torch.float32, short_lived=True)
    assert (mine.find(more), mine.find(again)) == places
    assert again.unique().tolist() == [6]
    del again, more
    large = room.empty(KEPT // 2, torch.int16, short_lived=True).fill_(7)
    place = mine.find(large)
    del large  # with what is kept already it is too much
    assert theirs.at(place, KEPT // 2, torch.int16).unique().tolist() == [0]
    assert theirs.at(places[1], MIB, torch.int8).unique().tolist() == [6]


# ---- macOS ---------------------------------------------------------------------------------


def test_macos_where_memory_is_a_file_with_a_name_until_all_have_it(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = files()
    mine, shown = Segment.create(MIB)
    assert len(os.listdir(tmp_path)) == 1
    theirs = Segment.attach(shown, MIB)
    hide(shown)
    assert os.listdir(tmp_path) == []
    x = Arena(mine).empty(9, torch.int32).fill_(5)
    assert theirs.at(mine.find(x), 9, torch.int32).tolist() == [5] * 9
    mine.close()
    theirs.close()
    del mine, theirs, x
    assert files() == before


def test_a_process_that_has_ended_is_seen_though_nobody_has_asked_how():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid) and not has_ended(os.getpid())
    child.kill()
    assert eventually(lambda: has_ended(child.pid), SOON)
    child.communicate()
    assert has_ended(child.pid)


# ---- strangers ----------------------------------------------------------------------------


def told(shown, rank=1):
    """The error of a rank that another one shows this."""
    store, before = dist.HashStore(), files()
    store.set(f"segment {rank}, 1", "\n".join(map(str, shown)))
    store.set(f"attached {rank}, 1", "")
    (error,) = meet(2, store, absent=[rank])
    assert isinstance(error, RuntimeError), error
    assert files() == before
    return str(error)


def test_memory_that_is_another_ranks_or_nobodys_is_refused():
    """Another machine or container may have a file, even a process, of the same name."""
    mine, address = Segment.create(MIB)
    path, token = address.split("\t")
    for elsewhere in (f"{path}\t{int(token) + 1}", f"/proc/{os.getpid()}/fd/9999\t{token}"):
        assert "or it runs on another machine or in another container: use backend gloo" in told(
            [os.getpid(), elsewhere]
        )
    mine.close()


# ---- a group that cannot be made leaves nothing --------------------------------------------


def test_a_group_that_a_rank_does_not_join_leaves_no_file_open():
    before = files()
    for error in meet(3, timeout=0.2, absent=[1]):
        assert "to make the group" in str(error)
    assert files() == before
