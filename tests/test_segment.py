"""The memory that ranks share: it grows, whoever it is for finds it, and nobody else is touched."""

import ctypes
import errno
import gc
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import Family, Program, eventually

import minidist as md
from minidist.backend import meeting
from minidist.backend.arena import SPARE, Arena, available
from minidist.backend.meeting import life, machine
from minidist.backend.members import HEAD, SLOT, STAGE, STAGES, Members
from minidist.backend.segment import TOKEN, Segment, hide, process

SOON = 5  # seconds
MIB, GIB = 1 << 20, 1 << 30

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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_group_costs_few_addresses_and_a_chunk_more_when_a_tensor_needs_it(shm, size):
    """However much memory the machine has."""
    begin = HEAD + STAGES * STAGE + 2 * size * SLOT
    assert begin < (13 + size) * MIB
    for group, tensor, reduced, left in shm(size)(grown):
        assert group == size * begin
        assert tensor == group + 128 * MIB  # the smallest chunk for 100 MB
        assert reduced == group + size * 128 * MIB  # everyone's, where all have one
        assert left == 0


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
import minidist as md, torch, torch.distributed as dist

def reduce():
    groups = [dist.new_group() for _ in range(10)]
    x = md.backend.empty(10_000_000).fill_(dist.get_rank())
    dist.all_reduce(x)
    try:
        md.backend.empty(6 << 30, dtype=torch.uint8)
    except MemoryError as error:
        assert "8,589,934,592 bytes more of shared memory: " in str(error), error
    else:
        raise AssertionError("there are no 8 GB of addresses")
    return x.unique().tolist()

print(md.launch(reduce, world_size=4))
"""


def test_eight_gigabytes_of_addresses_are_enough(tmp_path):
    """`ulimit -v`, for four ranks and eleven groups; and the memory that does not fit is named."""
    with Program(LIMITED, tmp_path) as program:
        code, out, err = program.finish(50)
    assert (code, out) == (0, f"{[[6.0]] * 4}\n"), err


def opened():
    """The files that three groups keep open; with tensors in the arena too; when they are gone."""
    before, groups = files(), [dist.new_group() for _ in range(3)]
    counts = [files()]
    xs = [
        md.backend.empty(n, group=group).fill_(1)
        for n, group in zip((9, 10**7), groups, strict=False)
    ]
    for x, group in zip(xs, groups, strict=False):
        dist.all_reduce(x, group=group)
    counts.append(files())
    for group in groups:
        dist.destroy_process_group(group)
    counts.append(files())
    assert [x[-1].item() for x in xs] == [dist.get_world_size()] * 2
    return [count - before for count in counts]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_group_costs_one_open_file_however_many_ranks_and_tensors(shm, size):
    assert shm(size)(opened) == [[3, 3, 0]] * size


FEW_FILES = """
import resource
import minidist as md, torch, torch.distributed as dist

def reduce():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    groups, totals = [dist.new_group() for _ in range(60)], []
    for group in groups:
        x = md.backend.empty(10, group=group).fill_(dist.get_rank())
        dist.all_reduce(x, group=group)
        totals.append(x[0].item())
    return set(totals)

print(md.launch(reduce, world_size=4))
"""


@pytest.mark.timeout(300)
def test_sixty_groups_of_four_ranks_need_less_than_256_files(tmp_path):
    """`ulimit -n 256`, as on macOS."""
    with Program(FEW_FILES, tmp_path) as program:
        code, out, err = program.finish(250)
    assert (code, out) == (0, f"{[{6.0}] * 4}\n"), err


@pytest.mark.parametrize("how", ["left", "died"])
def test_a_rank_that_is_gone_before_its_tensor_is_mapped_is_named(how):
    """Which happens only if the call has failed on it."""
    before, (mine, other) = files(), meet(2)
    x = other.arena.empty(5, torch.int64)
    for each in (mine, other):
        each.share(x)
    other.leave() if how == "left" else other.mine.close()  # as the kernel does for the dead
    how = how.replace("died", "died or given up")
    with pytest.raises(RuntimeError, match=f"Connection closed by peer: rank 1 has {how}$"):
        mine.shared(1, x)
    mine.leave()
    assert files() == before


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
        for turn in range(400):
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
    last = room.empty(1, torch.uint8)  # what has been given back is taken back here
    chunks = {place.bit_length() - 1 for place, _ in room._free}
    assert len(room._free) == len(chunks) >= 4  # each in one piece
    assert sum(end - start for start, end in room._free) == sum(1 << k for k in chunks) - 4096
    assert last.nbytes == 1


def test_a_larger_chunk_may_come_first_and_a_closed_segment_grows_no_more(pair):
    mine, theirs = pair
    room = Arena(mine)
    large = room.empty(40 * MIB, torch.uint8)
    small = room.empty(30 * MIB, torch.uint8)  # beside it is no room: a chunk before it
    assert mine.find(large) == 64 * MIB and mine.find(small) == 32 * MIB
    large[-1], small[-1] = 4, 3
    assert theirs.at(104 * MIB - 1, 1, torch.uint8) == 4
    mine.close()
    theirs.close()
    with pytest.raises(RuntimeError, match="the process group has been closed"):
        room.empty(80 * MIB, torch.uint8)
    with pytest.raises(RuntimeError, match="the process group has been closed"):
        theirs.at(32 * MIB, 1, torch.uint8)
    room.empty(5, torch.uint8).fill_(1)  # there is room
    assert (large[-1], small[-1]) == (4, 3)


def test_scratch_memory_serves_the_next_of_its_size(pair):
    mine, theirs = pair
    room = Arena(mine)
    x, y = room.scratch(MIB, torch.int32).fill_(5), room.scratch(3 * MIB, torch.int8).fill_(6)
    places = mine.find(x), mine.find(y)
    del x, y
    other = room.empty(MIB, torch.int32)
    assert mine.find(other) not in places  # which are kept
    again, more = room.scratch(3 * MIB, torch.int8), room.scratch(MIB, torch.float32)
    assert (mine.find(more), mine.find(again)) == places
    assert again.unique().tolist() == [6] and mine.find(room.scratch(MIB, torch.int32)) != places[0]
    del again, more
    large = room.scratch(SPARE // 2, torch.int16).fill_(7)
    place = mine.find(large)
    del large  # with what is kept already it is too much
    assert theirs.at(place, SPARE // 2, torch.int16).unique().tolist() == [0]
    assert theirs.at(places[1], MIB, torch.int8).unique().tolist() == [6]


def test_a_segment_made_in_inference_mode_is_written_to_outside_of_it():
    with torch.inference_mode():
        mine, shown = Segment.create(MIB)
    theirs = Segment.attach(shown, MIB)
    mine.bytes[HEAD : HEAD + 3].fill_(1)
    assert theirs.bytes[HEAD : HEAD + 4].tolist() == [1, 1, 1, 0]
    mine.close()
    theirs.close()


def test_what_is_made_in_inference_mode_serves_outside_of_it(shm):
    def reduce():
        with torch.inference_mode():
            group = dist.new_group()
            kept = md.backend.empty(10, group=group)
        x, y = md.backend.empty(1000, group=group).fill_(2), torch.ones(40_000)
        assert not x.is_inference() and kept.is_inference()
        for z in (x, y):
            dist.all_reduce(z, group=group)
        other = 1 - dist.get_rank()
        sent = dist.isend(x, other, group=group)
        dist.recv(x.clone(), other, group=group)
        sent.wait()
        dist.destroy_process_group(group)
        return x.unique().tolist() + y.unique().tolist()

    assert shm(2)(reduce) == [[4, 2]] * 2


# ---- a child that is forked ---------------------------------------------------------------


def forked(x, child):
    """Run it in a child: its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child(x)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_neither_takes_nor_gives_back_its_parents_memory(shm):
    def here():
        holder = [md.backend.empty(1_000_000).fill_(7)]
        place = holder[0].data_ptr()
        view = holder[0][5:]

        def child(_):
            nonlocal view
            del view
            holder.clear()
            theirs = md.backend.empty(1_000_000).fill_(3)
            return 0 if theirs.data_ptr() != place and theirs.sum() == 3_000_000 else 2

        free = md.backend.empty(2_000_000)  # where a child might take its own from
        free.fill_(5)
        kept = free.data_ptr()
        del free
        assert forked(None, child) == 0
        again = md.backend.empty(2_000_000)
        return holder[0].unique().tolist(), again.data_ptr() == kept, again.unique().tolist()

    assert shm(2)(here) == [([7.0], True, [0.0])] * 2


# ---- core dumps, macOS, and systems that refuse --------------------------------------------


def test_no_crash_writes_shared_memory_into_its_core(pair):
    mine, theirs = pair
    x = Arena(mine).empty(MIB, torch.uint8)
    theirs.at(mine.find(x), 1, torch.uint8)
    with open("/proc/self/smaps") as file:
        maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)
    flags = [re.search(r"VmFlags: (.*)", m)[1].split() for m in maps if "memfd:minidist" in m]
    assert len(flags) >= 4 and all("dd" in of for of in flags)


def test_macos_which_does_not_say_how_much_memory_is_free(monkeypatch, pair):
    asked, real = [], os.sysconf

    def sysconf(name):
        asked.append(name)
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return real(name)

    def no_proc(path, *args):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr("builtins.open", no_proc)
    assert available() == real("SC_PHYS_PAGES") * real("SC_PAGE_SIZE")
    assert asked == ["SC_AVPHYS_PAGES", "SC_PHYS_PAGES"]
    assert Arena(pair[0]).empty(5, torch.int32).fill_(2).sum() == 10


@pytest.mark.parametrize("most", [GIB, None])
def test_what_files_occupy_in_a_control_group_is_free(monkeypatch, most):
    """A container that has read many files is at its limit by the kernel's count."""
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{most or 'max'}\n",
        "/sys/fs/cgroup/memory.current": f"{GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 9\nshmem 9\nactive_file {GIB // 8}\n"
        f"inactive_file {GIB // 2}\n",
    }
    monkeypatch.setattr("builtins.open", lambda path, *args: io.StringIO(files[path]))
    assert available() == (GIB // 8 * 5 if most else 8 * GIB)


def refuse(monkeypatch, what, error):
    def refused(*args, **options):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, what, refused, raising=False)


def test_where_memfd_create_is_refused_a_nameless_file_will_do(monkeypatch):
    refuse(monkeypatch, "memfd_create", errno.EPERM)
    before = files()
    mine, shown = Segment.create(MIB)
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    there = [link for link in links if link.startswith("/dev/shm/")]
    assert there and all(link.endswith("(deleted)") for link in there)  # it has no name
    theirs = Segment.attach(shown, MIB)
    hide(shown)
    room = Arena(mine)
    x = room.empty(MIB, torch.int32).fill_(5)
    assert theirs.at(mine.find(x), MIB, torch.int32).unique().tolist() == [5]
    place = mine.find(x)
    del x
    assert theirs.at(place, MIB, torch.int32).unique().tolist() == [0]  # it has been given back
    there = mine.room()
    assert 0 < there < 1 << 50
    statvfs = os.fstatvfs

    def full(file):
        return os.statvfs_result([4096, 4096, 100, 3, 3, *statvfs(file)[5:]])

    monkeypatch.setattr(os, "fstatvfs", full)
    with pytest.raises(MemoryError, match="100,000 bytes .*has 12,288 left"):
        room.empty(100_000, torch.uint8)
    mine.close()
    theirs.close()
    del mine, theirs, room
    assert files() == before


def test_where_everything_is_refused_the_calls_are_named(monkeypatch):
    before = files()
    refuse(monkeypatch, "memfd_create", errno.ENOSYS)
    refuse(monkeypatch, "posix_fallocate", errno.ENOSPC)
    with pytest.raises(OSError, match="memfd_create: .*not implemented; /dev/shm: .*No space left"):
        Segment.create(MIB)
    assert files() == before


def test_macos_where_memory_is_a_file_with_a_name_until_all_have_it(monkeypatch, tmp_path):
    refuse(monkeypatch, "memfd_create", errno.ENOSYS)
    monkeypatch.setattr(os.path, "isdir", lambda path: not path.startswith("/proc"))
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


@pytest.mark.parametrize("proc", [True, False], ids=["linux", "macos"])
def test_a_process_has_one_life(monkeypatch, proc):
    """Its number may be another's afterwards."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if not proc:
        monkeypatch.setattr(os.path, "isdir", lambda path: False)
        monkeypatch.setattr(meeting, "open", lambda path: os.stat("/nowhere"), raising=False)
    born = life(child.pid)
    assert born and life(child.pid) == born
    assert (life(os.getpid()) != born) == proc
    child.kill()
    if proc:
        assert eventually(lambda: life(child.pid) == "", SOON)  # though nobody has asked how
    child.communicate()
    assert life(child.pid) == ""


WITHOUT = """
import errno, os, signal, sys, time
from datetime import timedelta
import minidist as md, torch, torch.distributed as dist

def refused(*args):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

os.pidfd_open = os.memfd_create = refused
pid = os.fork()
store = dist.FileStore(sys.argv[0] + ".store", 2)
options = {"store": store, "rank": int(pid == 0), "world_size": 2}
dist.init_process_group("shm", timeout=timedelta(seconds=30), **options)
x = torch.ones(100_000)
dist.all_reduce(x)
assert x.sum() == 200_000
if pid == 0:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    dist.all_reduce(x)
except RuntimeError as error:
    print(error, flush=True)
assert time.monotonic() - start < 5
os.waitpid(pid, 0)
dist.destroy_process_group()
"""


def test_a_death_is_seen_where_pidfd_open_and_memfd_create_are_refused(tmp_path):
    with Program(WITHOUT, tmp_path) as program:
        code, out, err = program.finish(50)
        assert (code, err) == (0, ""), err
        assert "Connection closed by peer: rank 1 has died, and rank 0 waits for it in all" in out


# ---- strangers ----------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path):
    """A process that has a file open: with the number of that."""
    path = tmp_path / "precious"
    path.write_bytes(b"precious " * 20_000)
    process = subprocess.Popen(
        [sys.executable, "-uc", "f = open('precious', 'r+b'); print(f.fileno()); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    process.file = int(process.stdout.readline())
    yield process
    assert path.read_bytes() == b"precious " * 20_000
    process.communicate("")


def told(shown, rank=1):
    """The error of a rank that another one shows this."""
    store, before = dist.HashStore(), files()
    store.set(f"segment {rank}, 1", "\n".join(map(str, shown)))
    store.set(f"attached {rank}, 1", "")
    (error,) = meet(2, store, absent=[rank])
    assert isinstance(error, RuntimeError), error
    assert files() == before
    return str(error)


def where(of, file):
    """The address of another process's file, as that process would show it."""
    there = os.stat(f"/proc/{of.pid}/fd/{file}")
    return f"/proc/{of.pid}/fd/{file}:{there.st_dev}:{there.st_ino}"


def test_a_rank_of_another_machine_or_container_is_refused_and_nobody_is_touched(stranger):
    pid, memory = stranger.pid, f"{where(stranger, stranger.file)}\t5"
    boot, namespace = machine().split()
    for elsewhere in (f"another {namespace}", f"{boot} pid:[1]"):
        assert told([elsewhere, pid, life(pid), memory]) == (
            "rank 1 runs on another machine or in another container: shared memory does not reach "
            "it; use backend gloo"
        )


def test_a_strangers_file_is_not_taken_for_a_ranks(stranger):
    """On this machine: the rank has ended, and its number, or its files' numbers, are another's."""
    pid, file = stranger.pid, stranger.file
    gone = "Connection closed by peer: rank 1 has died"
    mine, shown = Segment.create(HEAD + STAGES * STAGE + 4 * SLOT)
    token = shown.split("\t")[1]
    for born, memory in [
        ("1", f"{where(stranger, file)}\t5"),  # another life
        (life(pid), f"/proc/{pid}/fd/{file}:1:2\t5"),  # another file
        (life(pid), f"{where(stranger, file)}\t5"),  # and one that has no token
        (life(pid), f"/proc/{pid}/fd/99:1:2\t5"),  # none
        (life(pid), shown.replace(token, "7")),  # a segment, not that one
    ]:
        assert told([machine(), pid, born, memory]) == gone + " or given up" * (born != "1")
    mine.close()
    assert mine.words[TOKEN] == int(token)


def test_a_file_that_may_not_be_opened_is_named(monkeypatch):
    mine, shown = Segment.create(MIB)
    refuse(monkeypatch, "pread", errno.EACCES)
    error = told([machine(), process(), life(process()), shown])
    assert error == "the memory of rank 1 cannot be opened: [Errno 13] Permission denied"
    mine.close()


CONTAINERS = """
import sys
from datetime import timedelta
import torch.distributed as dist

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
try:
    options = {"store": store, "rank": rank, "world_size": 2}
    dist.init_process_group("shm", timeout=timedelta(seconds=10), **options)
except RuntimeError as error:
    print(error)
"""


def test_two_containers_that_share_a_store(tmp_path):
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"]).returncode:
        pytest.skip("may not make a PID namespace")
    source = "import minidist\n" + CONTAINERS
    command = [sys.executable, "-W", "error", "-c", source]
    family, store = Family(), str(tmp_path / "store")
    ranks = [
        subprocess.Popen(
            [*alone, *command, str(rank), store],
            stdout=subprocess.PIPE,
            text=True,
            env=family.environ(),
        )
        for rank in range(2)
    ]
    start = time.monotonic()
    for rank, started in enumerate(ranks):
        out, _ = started.communicate(timeout=40)
        assert out.startswith(f"rank {1 - rank} runs on another machine or in another container")
    assert time.monotonic() - start < 30
    assert family.gone_within(SOON)


# ---- a group that cannot be made leaves nothing --------------------------------------------


def test_a_group_that_a_rank_does_not_join_leaves_no_file_open():
    before = files()
    for absent in ([1], [0, 2]):
        for error in meet(3, timeout=0.2, absent=absent):
            assert "to make the group" in str(error)
    assert files() == before


def test_a_group_for_which_there_are_too_few_files_leaves_none_open(monkeypatch):
    before, most = files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    messages = set()
    taken = os.listdir("/proc/self/fd")
    free = [n for n in range(4096) if str(n) not in taken]
    for spare in range(20):  # numbers of files below the limit; there may be holes
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], most[1]))
        try:
            found = meet(2, timeout=0.2)
            if not any("Too many open" in str(one) for one in found):
                for one in found:  # ranks that a busy machine kept too long
                    if isinstance(one, Members):
                        one.leave()
                found = meet(2, timeout=20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        errors = [str(one) for one in found if isinstance(one, Exception)]
        for one in found:
            if isinstance(one, Members):
                one.leave()
        del found, one
        assert files() == before, spare
        messages |= {re.sub(r"\d+", "N", error) for error in errors}
        if not errors:
            break
    assert not errors and spare > 0
    # The other rank comes before this one gives up, waits for it in vain, or finds it gone.
    gone = "Connection closed by peer: rank N has died or given up"
    seen = rf"Too many open|Timed out waiting .* to make the group|^{gone}$"
    assert messages and all(re.search(seen, message) for message in messages), messages


def test_a_machine_is_not_taken_for_another_because_no_file_is_left():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            machine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_a_rank_that_dies_while_the_group_is_made_leaves_no_file_open():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    before = files()
    born = life(pid)
    os.kill(pid, signal.SIGKILL)
    mine, shown = Segment.create(MIB)
    try:
        error = told([machine(), pid, born, shown])
        assert error == "Connection closed by peer: rank 1 has died"
    finally:
        os.waitpid(pid, 0)
        mine.close()
        del mine
    assert files() == before
