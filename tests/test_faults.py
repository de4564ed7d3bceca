"""Real faults: ranks are killed, leave, hang and raise; programs are interrupted and killed.

After each one the bar is the same: an error within 5 seconds that names the rank to blame and
where the others were, no process left behind, and a next call that works.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import programs
import pytest
import torch
import torch.distributed as dist
from programs import SEED, eventually, few

import minidist as md
from minidist.machine.backend.segment import has_ended

SOON = 5  # seconds
PYTHON_ENDS = 60  # seconds, on a busy machine: alone it takes one, and that is not ours
TIMEOUT = 1.5  # the ranks' own, where it is what ends a call; elsewhere it must not be
SIZE = 4

KILLED = "was killed by SIGKILL (kill -9, or the system had no memory left)"
ENDED = "The ranks were ended, and what they held is lost; the next call starts new ones."

Program = partial(programs.Program, light=True)

soak = pytest.mark.soak
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds processes by /proc"),
]


@pytest.fixture
def backend(pools, request):
    """That of the pools."""
    return request.node.callspec.params["pools"]


@pytest.fixture
def ranks(pools):
    """Four ranks; whatever a test does to them, they or their successors work afterwards, and
    nothing of those before is left."""
    kept = pools(SIZE)
    pids = kept(os.getpid)
    yield kept
    assert kept(work) == [10.0] * SIZE
    left = set(pids) - set(kept(os.getpid))
    assert left in (set(), set(pids))  # all of them, or none
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)


def work():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def failing(ranks, function, *args, within=SOON):
    """The error of a call, which comes soon."""
    start = time.monotonic()
    with pytest.raises(md.RankError) as raised:
        ranks(function, *args)
    assert time.monotonic() - start < within
    return raised.value


def places(error):
    """Where the error says that the other ranks were: by rank."""
    listed = str(error).split("\n\nWhere the other ranks were:\n")[1].split("\n\n")[0]
    where = {}
    for numbers, place in re.findall(r"^  ranks? ([\d, ]+): (.*)", listed, re.MULTILINE):
        where |= {int(number): place for number in numbers.split(", ")}
    return where


# ---- kill -9 before and inside every collective -------------------------------------------


def call(api, operation):
    """One collective of torch.distributed or of minidist.collectives, other data on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), float(rank))
    several = [torch.full((1000,), float(rank * size + i)) for i in range(size)]
    empty = [torch.empty(1000) for _ in range(size)]
    if operation == "recv":  # round the ring
        sending = api.isend(x, (rank + 1) % size)
        api.recv(empty[0], (rank - 1) % size)
        sending.wait()
    elif operation == "send":
        large = torch.zeros(10_000_000)  # more than a socket holds
        if rank % 2:
            api.recv(large, rank - 1)
        api.send(large, (rank + 1) % size)
        if rank % 2 == 0:
            api.recv(large, (rank - 1) % size)
    else:
        arguments = {
            "broadcast": [x, 1],
            "all_reduce": [x],
            "reduce": [x, 1],
            "all_gather": [empty, x],
            "gather": [x, empty if rank == 1 else None, 1],
            "scatter": [x, several if rank == 1 else None, 1],
            "reduce_scatter": [x, several],
            "all_to_all": [empty, several],
            "all_to_all_single": [torch.empty(1000), x],
            "barrier": [],
        }
        getattr(api, operation)(*arguments[operation])


def killed_before(library, operation, victim, _):
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    call(md.collectives if library == "minidist" else dist, operation)


def killed_inside(library, operation, victim, pid):
    """The one before the victim comes when that is dead, so it was still in it."""
    rank = dist.get_rank()
    if rank == victim:
        threading.Timer(0.15, os.kill, (pid, signal.SIGKILL)).start()
    while rank == (victim - 1) % SIZE and not has_ended(pid):
        time.sleep(0.01)
    call(md.collectives if library == "minidist" else dist, operation)
    if rank == victim:  # a victim that waits for nobody: a root that sends
        time.sleep(10)


NINE = [
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
]
TORCHS = [*(name for name in NINE if name != "all_to_all"), "all_to_all_single", "recv", "send"]
COLLECTIVES = [("torch", name) for name in TORCHS] + [("minidist", name) for name in NINE]
BY_DAY = [
    (killed_before, "torch", "all_reduce"),
    (killed_before, "torch", "recv"),
    (killed_before, "minidist", "barrier"),
    (killed_inside, "torch", "barrier"),
    (killed_inside, "torch", "send"),
    (killed_inside, "minidist", "all_reduce"),
]
KILLS = [
    pytest.param(how, *which, turn % SIZE, marks=() if (how, *which) in BY_DAY else soak)
    for how in (killed_before, killed_inside)
    for turn, which in enumerate(COLLECTIVES)  # each rank has its turn
]


@pytest.mark.parametrize(
    ("how", "library", "operation", "victim"), KILLS, ids=lambda of: getattr(of, "__name__", of)
)
def test_a_killed_rank_is_named_and_where_the_others_were(
    ranks, backend, how, library, operation, victim
):
    error = failing(ranks, how, library, operation, victim, ranks(os.getpid)[victim])
    assert str(error).startswith(f"rank {victim} {KILLED}\n\nWhere the other ranks were:\n")
    assert str(error).endswith(f"\n\n{ENDED}")
    assert error.rank == victim
    told = places(error)
    assert sorted(told) == [rank for rank in range(SIZE) if rank != victim]
    # (A wait() for what was sent is a call into C++, of which Python knows only the line.)
    name = {"recv": "(in isend,|in recv,|at)", "send": "in (send|recv),"}
    inside = name.get(operation, f"in {operation},") + r" .*test_faults.py, line \d+, in call"
    for place in told.values():
        assert re.fullmatch(f"{inside}|had finished", place)
    # All need all. What a rank sent before it died still arrives, so some may have finished then;
    # not all: nothing went through the dead. (In shared memory the others fetch all from it.)
    if operation in ("all_reduce", "all_gather", "reduce_scatter", "barrier"):
        if how is killed_before:
            assert "had finished" not in told.values()
        elif (backend, library) != ("shm", "torch"):
            assert set(told.values()) != {"had finished"}


# ---- other ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [2, *(pytest.param(each, marks=soak) for each in (0, 1, 3))])
def test_of_errors_at_different_times_the_first_is_named(ranks, monkeypatch, victim):
    monkeypatch.setattr(
        "minidist.machine.runtime.processes.GRACE", 10
    )  # each has an error of its own
    start = time.monotonic()  # one clock for all processes

    def fail():
        rank = dist.get_rank()
        time.sleep(max(0, start + 0.3 + 0.3 * ((rank - victim) % SIZE) - time.monotonic()))
        raise ValueError(f"of rank {rank}")

    error = failing(ranks, fail)
    assert str(error).startswith(f"rank {victim} raised ValueError: of rank {victim}\n")
    assert str(error.__cause__) == f"of rank {victim}"
    assert all(place.startswith("raised ValueError too, ") for place in places(error).values())
    assert sorted(error.tracebacks) == list(range(SIZE))


def test_an_own_error_comes_before_what_it_does_to_others(ranks):
    """The others' lost connections come later, and are no cause."""

    def fail():
        if dist.get_rank() == 2:
            time.sleep(0.2)
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(3))

    error = failing(ranks, fail)
    assert (error.rank, str(error.__cause__)) == (2, "the cause")
    assert all(place.startswith("in all_reduce, ") for place in places(error).values())


EXITS = {
    "sys.exit(0)": (lambda: sys.exit(0), "exited early: sys.exit(0)"),
    "os._exit(0)": (lambda: os._exit(0), "exited early, with code 0"),
    "os._exit(7)": (lambda: os._exit(7), "exited early, with code 7"),
    "a crash": (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
}


@pytest.mark.parametrize("way", few(EXITS, {"sys.exit(0)", "os._exit(7)", "a crash"}))
def test_a_rank_that_leaves_early_is_named(ranks, way):
    def leave(exits):
        if dist.get_rank() == 2:
            exits()
        dist.barrier()

    exits, text = EXITS[way]
    error = failing(ranks, leave, exits)
    assert str(error).startswith(f"rank 2 {text}\n")
    assert set(places(error)) == {0, 1, 3}
    assert all(place.startswith("in barrier, ") for place in places(error).values())


def test_a_rank_that_leaves_after_the_others_are_done_is_named(ranks):
    def leave():
        if dist.get_rank() == 1:
            time.sleep(0.2)
            os._exit(0)

    error = failing(ranks, leave)
    assert str(error).startswith("rank 1 exited early, with code 0")
    assert places(error) == {0: "had finished", 2: "had finished", 3: "had finished"}


def test_all_ranks_killed_at_once_are_told(ranks):
    def leave():
        os.kill(os.getpid(), signal.SIGKILL)

    assert str(failing(ranks, leave)) == (
        f"rank 0 {KILLED}\n\nWhere the other ranks were:\n  ranks 1, 2, 3: {KILLED}\n\n{ENDED}"
    )


def sleep():
    time.sleep(60)


def compute():
    while True:
        pass


def hold_the_gil():
    ctypes.PyDLL(None).sleep(60)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


AWAY = {
    sleep: r"It was at .*test_faults.py, line \d+, in sleep\n",
    compute: r"It was at .*test_faults.py, line \d+, in compute\n",
    hold_the_gil: r"It gave no answer \(in native code, or stopped\)\n",
    stop: r"It gave no answer \(in native code, or stopped\)\n",
    os.getpid: r"It had finished\.\n",
}


@pytest.mark.parametrize(
    "away",
    [
        *(pytest.param(away, marks=soak) for away in (sleep, compute, hold_the_gil)),
        stop,
        os.getpid,  # it skips the call
    ],
    ids=lambda away: away.__name__,
)
def test_a_rank_that_does_not_join_is_named_after_the_timeout(away, backend):
    def absent():
        if dist.get_rank() == 1:
            return away()
        dist.all_reduce(torch.ones(2))

    with md.ranks(SIZE, backend=backend, timeout=TIMEOUT) as ranks:
        error = failing(ranks, absent, within=TIMEOUT + SOON)
        assert ranks(work) == [10.0] * SIZE
    assert re.match(
        rf"rank 1 did not join all_reduce within {TIMEOUT} s\. {AWAY[away]}", str(error)
    )
    assert set(places(error)) == {0, 2, 3}
    assert all(place.startswith("in all_reduce, ") for place in places(error).values())


def test_a_rank_killed_between_two_calls_is_named_by_the_next(ranks):
    os.kill(ranks(os.getpid)[3], signal.SIGKILL)
    time.sleep(0.1)
    error = failing(ranks, work)
    assert str(error).startswith(f"rank 3 {KILLED}\n")
    assert set(places(error)) == {0, 1, 2}


def test_a_killed_ranks_children_go_with_it(ranks):
    def leave():
        child = subprocess.Popen(["sleep", "60"])
        child.returncode = 0  # it shall outlive the call, without a warning
        return child.pid

    children = ranks(leave)
    assert all(os.path.exists(f"/proc/{child}") for child in children)
    os.kill(ranks(os.getpid)[1], signal.SIGKILL)
    failing(ranks, work)

    def gone(pid):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return not file.read()  # a zombie, whose parent is gone as well
        except OSError:
            return True

    assert eventually(lambda: all(map(gone, children)), SOON)


def test_a_rank_that_fails_to_start_is_an_error_at_once(monkeypatch):
    def no_such_card(*_):
        raise RuntimeError("no such card")

    monkeypatch.setattr(md.rank, "_stage", no_such_card)
    with pytest.raises(
        md.RankError, match="every rank raised RuntimeError: no such card"
    ) as raised:
        md.ranks(2)
    assert str(raised.value).endswith(ENDED)


# ---- the program is interrupted -----------------------------------------------------------

INTERRUPTED = """
import ctypes, os, time
import minidist as md, torch, torch.distributed as dist

def hang(way):
    dist.barrier()
    if dist.get_rank() == 1:
        if way == "waits":
            while True: time.sleep(0.1)
        if way == "gil":
            ctypes.PyDLL(None).sleep(60)
    dist.barrier()

with md.ranks(3, timeout=50) as r:
    for way in ["waits", "gil"]:
        try:
            print(r(os.getcwd) and way, flush=True)
            r(hang, way)
        except KeyboardInterrupt as told:
            print(repr(str(told)), flush=True)
    def total():
        x = torch.ones(1); dist.all_reduce(x)
        return x.item()
    print(r(total), flush=True)
"""

AT = "program.py, line"
WHERE = {
    "waits": f"at {AT} 10, in hang\n      while True: time.sleep(0.1)",
    "gil": "gave no answer (in native code, or stopped)",
}


TO = ["the program", "its whole process group"]


@pytest.mark.parametrize("to", few(TO, {"the program"}))
def test_an_interrupted_call_ends_soon_and_tells_each_ranks_line(to, tmp_path):
    with Program(INTERRUPTED, tmp_path) as program:
        for way, where in WHERE.items():
            assert program.line() == way
            time.sleep(0.5)
            start = time.monotonic()
            if to == "the program":
                os.kill(program.process.pid, signal.SIGINT)
            else:
                os.killpg(program.process.pid, signal.SIGINT)
            text = eval(program.line())
            assert time.monotonic() - start < SOON
            assert text == (
                "The ranks were ended. Where they were:\n"
                "  ranks 0, 2: in barrier, program.py, line 13, in hang\n      dist.barrier()\n"
                f"  rank 1: {where}"
            )
        assert program.line() == "[3.0, 3.0, 3.0]"
        assert program.process.wait(SOON) == 0
        assert program.gone_within(SOON)
        assert program.temporary() == []


INTERRUPTS = """
import gc, os, random, signal, sys, time, warnings
import minidist as md, torch.distributed as dist

def meet():
    dist.barrier()

def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def lost(what):
    "In a callback of the garbage collector an interrupt can raise nothing."
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)

sys.unraisablehook = lost
warnings.simplefilter("ignore", ResourceWarning)  # Python closes what an interrupt leaves open
with md.ranks(2) as r:
    r(meet)
r = None
main, before = sys.modules["__main__"], files()
random, count = random.Random(SEED), 0
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
for _ in range(200):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.15))
            with md.ranks(2) as r:
                r(meet)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        count += 1
    r = None
    assert sys.modules["__main__"] is main
assert count > 50, count
gc.collect()
print("done", flush=True)
sys.stdin.readline()
with md.ranks(2) as r:
    print(r(dist.get_rank), flush=True)
r = None
assert files() == before, (files(), before)
print("closed", flush=True)
"""


@soak
@pytest.mark.timeout(600)
def test_interrupts_at_any_moment_leave_nothing_and_the_next_pool_starts(tmp_path):
    with Program(INTERRUPTS.replace("SEED", repr(SEED)), tmp_path) as program:
        assert program.line() == "done"
        assert eventually(lambda: len(program.alive()) == 2, 3 * SOON)  # with its forkserver
        assert program.temporary() == []
        program.say("go on")
        assert program.line() == "[0, 1]"
        start = time.monotonic()
        assert program.line() == "closed" and time.monotonic() - start < SOON
        assert program.finish(PYTHON_ENDS) == (0, "", "")
        assert program.gone_within(SOON)
        assert program.temporary() == []


# ---- the program is killed ----------------------------------------------------------------

KILLED_WHEN = {
    "idle": "r(leave_children); print('now', flush=True); time.sleep(60)",
    "in a barrier": "print('now', flush=True); r(stay_away)",
    "with a rank that is stopped": "print('now', flush=True); r(stop)",
    "while ranks start": "print('now', flush=True)\nwhile True: md.launch(len, [], world_size=8)",
}


@pytest.mark.parametrize(
    "when",
    few(KILLED_WHEN, {"with a rank that is stopped"}),
)
def test_a_killed_program_takes_all_with_it(when, tmp_path):
    source = f"""
import os, signal, subprocess, time
import minidist as md, torch.distributed as dist

def leave_children():
    subprocess.Popen(["sleep", "60"]).returncode = 0

def stop():
    os.kill(os.getpid(), signal.SIGSTOP) if dist.get_rank() == 1 else dist.barrier()

def stay_away():
    time.sleep(60) if dist.get_rank() == 2 else dist.barrier()

r = md.ranks(3)
{KILLED_WHEN[when]}
"""
    with Program(source, tmp_path) as program:
        assert program.line() == "now"
        if when == "while ranks start":
            assert eventually(lambda: len(program.alive()) in (8, 9, 10, 11), 30)
        else:
            time.sleep(0.5)
        os.kill(program.process.pid, signal.SIGKILL)
        assert program.gone_within(SOON)
        assert program.temporary() == []
