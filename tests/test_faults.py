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
from multiprocessing import forkserver as pythons_forkserver

import cloudpickle
import programs
import pytest
import torch
import torch.distributed as dist
from programs import SEED, eventually, few

import minidist as md
from minidist.backend.meeting import life

SOON = 5  # seconds
PYTHON_ENDS = 60  # seconds, on a busy machine: alone it takes one, and that is not ours
TIMEOUT = 1.5  # the ranks' own, where it is what ends a call; elsewhere it must not be
SIZE = 4

KILLED = "was killed by SIGKILL (kill -9, or the system had no memory left)"
ENDED = "The ranks were ended, and what they held is lost; the next call starts new ones."

Program = partial(programs.Program, light=True)

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
    if operation == "broadcast":
        api.broadcast(x, 1)
    elif operation == "all_reduce":
        api.all_reduce(x)
    elif operation == "reduce":
        api.reduce(x, 1)
    elif operation == "all_gather":
        api.all_gather(empty, x)
    elif operation == "gather":
        api.gather(x, empty if rank == 1 else None, 1)
    elif operation == "scatter":
        api.scatter(x, several if rank == 1 else None, 1)
    elif operation == "reduce_scatter":
        api.reduce_scatter(x, several)
    elif operation == "all_to_all":
        api.all_to_all(empty, several)
    elif operation == "all_to_all_single":
        api.all_to_all_single(torch.empty(1000), x)
    elif operation == "barrier":
        api.barrier()
    elif operation == "recv":  # round the ring
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
        raise AssertionError(operation)


def killed_before(library, operation, victim, _):
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    call(md.collectives if library == "minidist" else dist, operation)


def killed_inside(library, operation, victim, pid):
    """The one before the victim comes when that is dead, so it was still in it."""
    rank = dist.get_rank()
    if rank == victim:
        threading.Timer(0.15, os.kill, (pid, signal.SIGKILL)).start()
    while rank == (victim - 1) % SIZE and life(pid):
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
# Each rank has its turn; in an all_reduce, every rank.
VICTIMS = [(*which, turn % SIZE) for turn, which in enumerate(COLLECTIVES)]
VICTIMS += [("minidist", "all_reduce", rank) for rank in range(SIZE)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [killed_before, killed_inside], ids=["before", "inside"])
@pytest.mark.parametrize(
    ("library", "operation", "victim"), list(dict.fromkeys(VICTIMS)), ids=lambda value: str(value)
)
def test_a_killed_rank_is_named_and_where_the_others_were(
    ranks, backend, library, operation, victim, how
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


@pytest.mark.parametrize("victim", range(SIZE))
def test_of_errors_at_different_times_the_first_is_named(ranks, monkeypatch, victim):
    monkeypatch.setattr("minidist.runtime.processes.GRACE", 10)  # each has an error of its own
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
    "sys.exit()": (lambda: sys.exit(), "exited early: sys.exit()"),
    "os._exit(0)": (lambda: os._exit(0), "exited early, with code 0"),
    "os._exit(7)": (lambda: os._exit(7), "exited early, with code 7"),
    "a crash": (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
    "abort": (lambda: os.abort(), "was killed by SIGABRT"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    "no name": (lambda: os.kill(os.getpid(), signal.SIGRTMAX - 1), "was killed by signal 63"),
}


@pytest.mark.parametrize("way", EXITS)
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


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_leaves_after_the_others_are_done_is_named(ranks, way):
    def leave(exits):
        if dist.get_rank() == 1:
            time.sleep(0.2)
            exits()

    exits, text = EXITS[way]
    error = failing(ranks, leave, exits)
    assert str(error).startswith(f"rank 1 {text}")
    assert places(error) == {0: "had finished", 2: "had finished", 3: "had finished"}


def test_all_ranks_killed_at_once_are_told_the_same_each_time(ranks):
    def leave():
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        error = failing(ranks, leave)
        assert str(error) == (
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


@pytest.mark.parametrize("away", AWAY, ids=lambda away: away.__name__)
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


def test_a_rank_that_prints_without_end_ends_with_the_others(ranks, capsys):
    def fail():
        if dist.get_rank() == 0:
            subprocess.Popen(["yes"]).wait()
        time.sleep(0.2)
        raise ValueError("enough")

    assert failing(ranks, fail).rank == 1
    assert capsys.readouterr().out.startswith("[rank 0] y\n[rank 0] y\n")


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_killed_between_two_calls_is_named_by_the_next(ranks, victim):
    os.kill(ranks(os.getpid)[victim], signal.SIGKILL)
    time.sleep(0.1)
    error = failing(ranks, work)
    assert str(error).startswith(f"rank {victim} {KILLED}\n")
    assert set(places(error)) == set(range(SIZE)) - {victim}


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


def kill_the_forkserver():
    pid = pythons_forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["between two calls", "in a call"])
def test_a_killed_forkserver_hurts_nobody_and_a_new_one_is_started(ranks, when):
    pids = ranks(os.getpid)
    if when == "in a call":
        killer = threading.Timer(0.3, kill_the_forkserver)
        killer.start()
        assert ranks(time.sleep, 1) == [None] * SIZE
        killer.join()
    else:
        kill_the_forkserver()
    assert ranks(os.getpid) == pids
    assert md.launch(work, world_size=SIZE) == [10.0] * SIZE


@pytest.mark.parametrize("away", [sleep, hold_the_gil, stop], ids=lambda away: away.__name__)
def test_a_killed_supervisor_ends_the_call_and_the_ranks(ranks, away):
    pids = ranks(os.getpid)

    def kill_it():
        if dist.get_rank() == 2:
            threading.Timer(0.3, os.kill, (os.getppid(), signal.SIGKILL)).start()
        away() if dist.get_rank() == 0 else sleep()

    error = failing(ranks, kill_it)
    ended = "was ended, since the process that supervises the ranks was killed"
    assert str(error) == (
        f"rank 0 {ended}\n\nWhere the other ranks were:\n  ranks 1, 2, 3: {ended}\n\n{ENDED}"
    )
    # Nobody waits for them but the system's first process.
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), SOON)
    assert ranks(work) == [10.0] * SIZE


@pytest.mark.parametrize("dies", ["rank", "pool"])
def test_a_rank_with_ranks_of_its_own_may_die(ranks, dies):
    """What it leaves must not take the program's sockets along."""

    def start_two():
        import __main__

        __main__.inner = md.ranks(2, "gloo")
        return __main__.inner(os.getpid)

    grandchildren = ranks.on([1], start_two)[0]
    if dies == "rank":
        os.kill(ranks(os.getpid)[1], signal.SIGKILL)
    failing(ranks, os._exit, 1)
    assert eventually(lambda: not any(os.path.exists(f"/proc/{p}") for p in grandchildren), SOON)
    assert md.launch(work, world_size=SIZE) == [10.0] * SIZE


def test_a_rank_that_closes_all_its_files_ends_the_call(ranks, backend):
    def close():
        if dist.get_rank() == 1:
            os.closerange(3, 1000)

    told = str(failing(ranks, close))
    # gloo's own thread may find out first, and abort.
    ends = [KILLED, "was killed by SIGABRT"] if backend == "gloo" else [KILLED]
    assert told.startswith(tuple(f"rank 1 {end}\n" for end in ends))


@pytest.mark.parametrize("way", ["the timeout", "an interrupt"])
def test_a_call_that_a_stopped_rank_does_not_take_ends(way):
    seconds = 8 if way == "the timeout" else 3
    with md.ranks(3, timeout=seconds if way == "the timeout" else 60) as ranks:
        os.kill(ranks(os.getpid)[1], signal.SIGSTOP)
        start = time.monotonic()
        if way == "the timeout":
            with pytest.raises(md.RankError) as raised:
                ranks(len, bytes(10_000_000))
            assert str(raised.value).startswith(
                "rank 1 did not take its call within 8 s. "
                "It gave no answer (in native code, or stopped)\n\nWhere the other ranks were:\n"
            )
            assert str(raised.value).endswith(f"rank 2: had not begun\n\n{ENDED}")
        else:
            handler = signal.signal(signal.SIGINT, signal.default_int_handler)
            main = threading.main_thread().ident
            interrupt = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
            interrupt.start()
            try:
                with pytest.raises(KeyboardInterrupt) as raised:
                    ranks(len, bytes(10_000_000))
            finally:
                interrupt.join()
                signal.signal(signal.SIGINT, handler)
            assert str(raised.value) == (
                "The ranks were ended. Where they were:\n  rank 0: had finished\n"
                "  rank 1: gave no answer (in native code, or stopped)\n  rank 2: had not begun"
            )
        assert time.monotonic() - start < seconds + 6  # and not twice the timeout
        assert ranks(dist.get_rank) == [0, 1, 2]


def test_a_rank_that_fails_to_start_is_an_error_at_once(monkeypatch):
    def no_such_card(*_):
        raise RuntimeError("no such card")

    monkeypatch.setattr(md.rank, "_stage", no_such_card)
    with pytest.raises(
        md.RankError, match="every rank raised RuntimeError: no such card"
    ) as raised:
        md.ranks(2)
    assert str(raised.value).endswith(ENDED)


def test_a_rank_that_stops_while_it_sends_its_result_ends_the_call():
    def stop_soon():
        if dist.get_rank() == 1:
            frame = sys._getframe()
            while "pipes" not in frame.f_locals:
                frame = frame.f_back
            calls = frame.f_locals["pipes"].calls
            os.write(calls.fileno(), b"\0\0\1\0half of it")  # 256 bytes are announced
            os.kill(os.getpid(), signal.SIGSTOP)

    with md.ranks(2, timeout=3) as ranks:
        assert str(failing(ranks, stop_soon, within=3 + SOON)).startswith(
            "rank 1 did not send its whole result within 3 s. "
            "It gave no answer (in native code, or stopped)\n"
        )
        assert ranks(dist.get_rank) == [0, 1]


def test_what_a_rank_sent_before_it_died_counts(ranks):
    """The supervisor's note of its end may be seen first."""

    def die_after_the_answer():
        if dist.get_rank() == 1:
            frame = sys._getframe()
            while "pipes" not in frame.f_locals:
                frame = frame.f_back
            number = frame.f_locals["number"]
            answer = cloudpickle.dumps((number, "sent", None, 0, []))
            for _ in range(3):
                frame.f_locals["pipes"].calls.send_bytes(answer)
            os._exit(1)
        time.sleep(0.5)

    assert ranks(die_after_the_answer) == [None, "sent", None, None]
    assert str(failing(ranks, work)).startswith("rank 1 exited early, with code 1\n")


def test_a_rank_that_is_refused_a_call_at_its_start_names_it(monkeypatch):
    def refused(*_):
        try:
            os.close(10**6)
        except OSError as error:
            lost = "Connection closed by peer: rank 1 has died, or runs on another machine"
            raise RuntimeError(lost) from error

    monkeypatch.setattr(md.rank, "_stage", refused)
    with pytest.raises(md.RankError) as raised:
        md.ranks(2)
    line = refused.__code__.co_firstlineno
    here = os.path.relpath(__file__)
    assert str(raised.value) == (
        "every rank raised RuntimeError: Connection closed by peer: rank 1 has died, or runs on "
        "another machine\n\n"
        "The system had refused a call: OSError: [Errno 9] Bad file descriptor\n"
        f"  {here}, line {line + 2}, in refused\n      os.close(10**6)\n\n"
        f"  {here}, line {line + 5}, in refused\n      raise RuntimeError(lost) from error\n\n"
        + ENDED
    )


# ---- the program is interrupted -----------------------------------------------------------

INTERRUPTED = """
import ctypes, os, subprocess, sys, time
import minidist as md, torch, torch.distributed as dist

err = 2

def hang(way):
    dist.barrier()
    if dist.get_rank() == 1:
        if way == "waits":
            while True: time.sleep(0.1)
        if way == "gil":
            ctypes.PyDLL(None).sleep(60)
        if way == "prints":
            subprocess.Popen(["yes", "y" * 9999], stdout=err).wait()
        if way == "ignores":
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(["sleep", "60"]).wait()
    dist.barrier()

with md.ranks(3, timeout=50) as r:
    for way in ["waits", "gil", "prints", "ignores"]:
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
    "waits": f"at {AT} 12, in hang\n      while True: time.sleep(0.1)",
    "gil": "gave no answer (in native code, or stopped)",
    "prints": f"in wait, {AT} 16, in hang\n"
    '      subprocess.Popen(["yes", "y" * 9999], stdout=err).wait()',
    "ignores": f'in wait, {AT} 20, in hang\n      subprocess.Popen(["sleep", "60"]).wait()',
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
                "  ranks 0, 2: in barrier, program.py, line 21, in hang\n      dist.barrier()\n"
                f"  rank 1: {where}"
            )
        assert program.line() == "[3.0, 3.0, 3.0]"
        assert program.process.wait(SOON) == 0
        assert program.gone_within(SOON)
        assert program.temporary() == []


# One round is run again and again, with an interrupt at line after line of its Python.
ROUND = """
import gc, multiprocessing, os, signal, sys, time, warnings
import minidist as md, torch.distributed as dist
from minidist.runtime.processes import Processes

def meet():
    dist.barrier()

def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

class TooLong(Exception):
    pass

def interrupted(action, begins, *numbers, by=signal.SIGINT, raises=KeyboardInterrupt):
    "Run it with a signal at lines, counted from the first for which `begins`. Whether all came."
    left, count = list(numbers), 0

    def trace(frame, event, _):
        nonlocal count
        count += count > 0 or begins(frame)
        if left and count == left[0]:
            left.pop(0)
            signal.raise_signal(by)
        return trace

    sys.settrace(trace)
    try:
        action()
    except raises:
        pass
    finally:
        sys.settrace(None)
    return not left

def lost(what):
    "In a callback of the garbage collector an interrupt can raise nothing."
    if what.exc_type not in (KeyboardInterrupt, TooLong):
        sys.__unraisablehook__(what)

sys.unraisablehook = lost
warnings.simplefilter("ignore", ResourceWarning)  # Python closes what an interrupt leaves open
with md.ranks(2) as r:
    r(meet)
r = None
main, before = sys.modules["__main__"], files()
"""

WHOLE = """
def one_round():
    with md.ranks(2) as r:
        r(meet)

line = 1
while interrupted(one_round, lambda frame: True, line):
    assert sys.modules["__main__"] is main and files() == before, line
    line += 211
assert line > 5000, line
"""

# As SIGALRM ends what takes too long: with another error than KeyboardInterrupt.
ALARM = """
def too_long(*_):
    raise TooLong

signal.signal(signal.SIGALRM, too_long)
""" + WHOLE.replace("True, line", "True, line, by=signal.SIGALRM, raises=TooLong")

ENDING = """
def finalizer(frame):
    "In Finalize.__call__: it strikes itself off first, so what is lost there is never called."
    called = frame.f_locals.get("self") if frame.f_code.co_name == "__call__" else None
    return getattr(getattr(called, "_callback", None), "__module__", "") == Processes.__module__

def close():
    md.ranks(2).close()

def forget():
    md.ranks(2)

# What is lost in a callback of the garbage collector nobody can mend. In the first three lines: the
# supervisor stays until the program ends, without ranks. Later: it goes when its line has closed.
for action, line in ((close, 1), (forget, 4)):
    while line < 60 and interrupted(action, finalizer, line):
        line += 1
    assert line > 9, line
"""

TWICE = """
# The first comes as ranks are called, the second while they are asked where they are, or ended.
def first(processes):
    signal.raise_signal(signal.SIGINT)

r, collect, line = md.ranks(2), Processes._collect, 1
while True:
    Processes._collect = first
    met = interrupted(lambda: r(meet), lambda frame: frame.f_code.co_name == "whereabouts", line)
    Processes._collect = collect
    assert r(dist.get_rank) == [0, 1], line
    if not met:
        break
    line += 73
assert line > 500, line
r = None
"""

ANY_MOMENT = """
import random
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
"""

AFTERWARDS = """
gc.collect()
print("done", flush=True)
sys.stdin.readline()
while multiprocessing.active_children():  # the forkserver says a moment later that one has ended
    time.sleep(0.01)
with md.ranks(2) as r:
    print(r(dist.get_rank), flush=True)
r = None
assert files() == before, (files(), before)
print("closed", flush=True)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(WHOLE, id="at any line"),
        pytest.param(ALARM, id="by a time limit, at any line"),
        pytest.param(ENDING, id="as a pool ends", marks=pytest.mark.soak),
        pytest.param(TWICE, id="twice"),
        pytest.param(ANY_MOMENT, id="at any moment", marks=pytest.mark.soak),
    ],
)
def test_interrupts_leave_nothing_and_the_next_pool_starts(how, tmp_path):
    with Program(ROUND + how.replace("SEED", repr(SEED)) + AFTERWARDS, tmp_path) as program:
        assert program.line() == "done"
        assert eventually(lambda: len(program.alive()) == 3, 3 * SOON)  # with forkserver, tracker
        assert program.temporary() == []
        program.say("go on")
        assert program.line() == "[0, 1]"
        start = time.monotonic()
        assert program.line() == "closed" and time.monotonic() - start < SOON
        assert program.finish(PYTHON_ENDS) == (0, "", "")
        assert program.gone_within(SOON)
        assert program.temporary() == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_pool_that_is_kept_can_be_closed_after_an_interrupt_at_each_of_its_lines(tmp_path):
    """What was raised is kept too, with all frames, as a notebook keeps it."""
    source = """
import os, signal, sys, time
import minidist as md, torch.distributed as dist
from minidist.runtime import pool
signal.signal(signal.SIGINT, signal.default_int_handler)
kept, count = [], 0

def interrupt(frame, event, _):  # at the line that comes after so many of pool.py
    global count
    if frame.f_code.co_filename != pool.__file__:
        return None
    if event == "line":
        count -= 1
        if count == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    return interrupt

def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True

def turn(n, action):
    global count
    r = md.ranks(2)
    pids = r(os.getpid) + r(os.getppid)[:1]
    count = n
    sys.settrace(interrupt)
    try:
        action(r)
    except KeyboardInterrupt as error:
        kept.append(error)
    finally:
        sys.settrace(None)
    kept.append(r)
    r.close()
    end = time.monotonic() + 5
    while not all(map(ended, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    if not all(map(ended, pids)):
        print("left, after line", n, action)
    return count > 0

for action in (lambda r: r(dist.barrier), lambda r: r.close()):
    n = 1
    while not turn(n, action):
        n += 1
    print(n > 5)
"""
    with Program(source, tmp_path) as program:
        assert program.finish(500) == (0, "True\nTrue\n", "")
        assert program.gone_within(SOON)
        assert program.temporary() == []


def test_a_program_that_dies_of_a_closed_pipe_does_not_die_as_it_closes_a_pool(tmp_path):
    """As command-line programs do: here its supervisor is gone already."""
    source = """
import os, signal, time
import minidist as md
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
r = md.ranks(2)
[supervisor] = set(r(os.getppid))
os.kill(supervisor, signal.SIGKILL)
while os.path.exists(f"/proc/{supervisor}"):
    time.sleep(0.01)
r._processes.end()
print("closed")
"""
    with Program(source, tmp_path) as program:
        assert program.finish(30) == (0, "closed\n", "")


def test_a_pool_whose_output_cannot_be_shown_starts_again(tmp_path):
    source = """
import errno, io, os, sys
import minidist as md, torch.distributed as dist

class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

with md.ranks(2) as r:
    there, sys.stdout = sys.stdout, Full()
    try:
        r(print, "a line")
    except OSError as error:
        sys.stdout = there
        print(error)
    print(r(dist.get_rank))
"""
    with Program(source, tmp_path) as program:
        assert program.finish(30) == (0, "[Errno 28] No space left on device\n[0, 1]\n", "")


def test_a_pool_closes_where_no_file_is_left_and_the_next_one_starts(tmp_path):
    source = """
import os, resource
import minidist as md, torch.distributed as dist
r = md.ranks(2)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    r.close()
for each in held:
    os.close(each)
print(md.launch(dist.get_rank, world_size=2))
"""
    with Program(source, tmp_path) as program:
        assert program.finish(30) == (0, "[0, 1]\n", "")
        assert program.temporary() == []


def test_however_few_files_are_left_nothing_stays_open_and_the_next_pool_starts(tmp_path):
    source = """
import os
from multiprocessing.forkserver import _forkserver
import resource
import minidist as md, torch.distributed as dist
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
md.launch(len, [], world_size=1)
def opened():
    return sorted(os.listdir("/proc/self/fd"))
before, server, refused = opened(), _forkserver._forkserver_pid, 0
for free in range(40):
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for each in held[:free]:
            os.close(each)
    try:
        assert md.launch(dist.get_rank, world_size=2) == [0, 1]
    except OSError as error:
        assert "2 ranks need more open files than the 64" in str(error), (free, error)
        assert refused == free
        refused += 1
    for each in held[free:]:
        os.close(each)
    assert opened() == before, (free, opened(), before)
    assert _forkserver._forkserver_pid == server, free
print(8 < refused < 40)
"""
    with Program(source, tmp_path) as program:
        assert program.finish(120) == (0, "True\n", "")
        assert program.temporary() == []


def test_pools_work_where_sockets_have_a_default_timeout(tmp_path):
    source = """
import socket, time
socket.setdefaulttimeout(0.2)
import minidist as md, torch, torch.distributed as dist
r = md.ranks(2)
def slow():
    time.sleep(0.5)
    return torch.ones(1 << 20)
assert [x.numel() for x in r(slow)] == [1 << 20] * 2
assert len(r(lambda x: None, torch.ones(1 << 22))) == 2
r.close()
print("fine")
"""
    with Program(source, tmp_path) as program:
        assert program.finish(60) == (0, "fine\n", "")


# ---- the program is killed ----------------------------------------------------------------

KILLED_WHEN = {
    "idle": "r(leave_children); print('now', flush=True); time.sleep(60)",
    "in a call": "r(leave_children); print('now', flush=True); r(time.sleep, 60)",
    "in a barrier": "print('now', flush=True); r(stay_away)",
    "in a regular expression": "print('now', flush=True); r(hold_the_gil)",
    "with a rank that is stopped": "print('now', flush=True); r(stop)",
    "with no pool open": "r.close(); print('now', flush=True); time.sleep(60)",
    "while ranks start": "print('now', flush=True)\nwhile True: md.launch(len, [], world_size=8)",
}


@pytest.mark.parametrize(
    "when",
    few(KILLED_WHEN, {"in a barrier", "while ranks start"}),
)
def test_a_killed_program_takes_all_with_it(when, tmp_path):
    source = f"""
import os, re, signal, subprocess, sys, time
import minidist as md, torch.distributed as dist

def leave_children():
    subprocess.Popen(["sleep", "60"]).returncode = 0

def hold_the_gil():
    leave_children()
    re.match("(a+)+$", "a" * 40 + "b") if dist.get_rank() == 1 else dist.barrier()

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
            assert eventually(lambda: len(program.alive()) in (9, 10, 11, 12), 30)
        else:
            time.sleep(0.5)
        os.kill(program.process.pid, signal.SIGKILL)
        assert program.gone_within(SOON)
        assert program.temporary() == []


@pytest.mark.parametrize("pidfd", ["pidfd", "no pidfd"])
def test_a_killed_program_takes_its_ranks_with_it_though_a_child_that_it_forked_lives(
    tmp_path, pidfd
):
    """The child has copies of all that the program held open."""
    if pidfd == "no pidfd":  # as a container may refuse it
        (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open")
    source = f"""
import os, time, warnings
os.environ["PYTHONPATH"] = {str(tmp_path)!r} + os.pathsep + os.environ.get("PYTHONPATH", "")
import minidist as md
r = md.ranks(2)
ranks = r(os.getpid)
warnings.simplefilter("ignore")  # Python 3.12 warns of any fork beside threads
if os.fork() == 0:
    time.sleep(60)
print(*ranks, flush=True)
print(r(lambda: hasattr(os, "pidfd_open"))[0], flush=True)
time.sleep(60)
"""
    with Program(source, tmp_path) as program:
        ranks = list(map(int, program.line().split()))
        assert program.line() == str(pidfd == "pidfd" and hasattr(os, "pidfd_open"))
        os.kill(program.process.pid, signal.SIGKILL)
        program.process.wait()
        assert eventually(lambda: not set(ranks) & set(program.alive()), SOON)
        assert eventually(lambda: program.temporary() == [], SOON)
        assert program.alive()  # the child
