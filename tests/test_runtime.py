"""The processes under the ranks: what goes in, what comes out, and that nothing stays behind."""

import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import cloudpickle
import programs
import pytest
import torch
import torch.distributed as dist
from programs import eventually
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import minidist as md
from minidist.machine.runtime import forkserver, pickling, worker
from minidist.machine.runtime.cell import run_cell

Program = partial(programs.Program, light=True)

needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/environ"), reason="finds processes by /proc"
)

LASTS = "The ranks are still there, with all that they hold."
ENDED = "The ranks were ended, and what they held is lost; the next call starts new ones."


@pytest.fixture
def ranks(pools):
    return pools(3)


def told(ranks, function, *args):
    """What a failing call says."""
    with pytest.raises(md.RankError) as raised:
        ranks(function, *args)
    return str(raised.value)


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


# ---- what goes in and what comes out ------------------------------------------------------


@dataclass
class Point:
    x: int

    def moved(self):
        return Point(self.x + dist.get_rank())


def test_objects_keep_their_type_there_and_back(ranks):
    """cloudpickle sends the class by value, and must recognise it when it comes home."""

    def move(point):
        assert isinstance(point, Point)
        return point.moved()

    assert ranks(move, Point(5)) == [Point(5), Point(6), Point(7)]


def test_closures_carry_their_values_and_lambdas_work(ranks):
    table = {rank: torch.full((2,), 10.0 + rank) for rank in range(3)}
    assert ranks(lambda: table[dist.get_rank()].sum().item()) == [20.0, 22.0, 24.0]


def test_tensors_of_newer_dtypes_go_there_and_back(ranks):
    """torch alone writes what it cannot read."""
    for dtype in torch.uint16, torch.float8_e4m3fn:
        x = torch.arange(6).to(dtype)
        for y in ranks(lambda x: x.clone()[1:], x):
            assert y.dtype == dtype and torch.equal(y.float(), x[1:].float()), dtype


def test_large_arguments_and_results_pass_at_once(ranks):
    """More than any pipe holds, in both directions."""
    x = torch.arange(1_000_000)
    out = ranks(lambda x: x + dist.get_rank(), x)
    assert all(torch.equal(y, x + rank) for rank, y in enumerate(out))


def test_what_cannot_be_sent_is_named_before_any_rank_begins(ranks):
    for args, kwargs, what, kind in [
        ((1, (i for i in range(3))), {}, "argument 1 (a generator)", "generator"),
        ((), {"lock": threading.Lock()}, "argument 'lock' (a lock)", "_thread.lock"),
    ]:
        with pytest.raises(TypeError) as raised:
            ranks(print, *args, **kwargs)
        assert str(raised.value) == (
            f"{what} cannot be sent to the ranks: cannot pickle '{kind}' object"
        )
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the function .* cannot be sent to the ranks"):
        ranks(lambda: lock)
    assert ranks(dist.get_rank) == [0, 1, 2]


def test_ranks_within_a_call_are_named(ranks):
    with pytest.raises(TypeError) as raised:
        ranks(lambda: ranks(print))
    assert str(raised.value) == (
        "the function (a function) cannot be sent to the ranks: a pool of ranks stays in the "
        "process that started it. Use it there only"
    )


def test_a_result_that_cannot_be_sent_is_named(ranks):
    assert told(ranks, lambda: (i for i in range(3))) == (
        "every rank raised TypeError: the result, a generator, cannot be sent back: "
        f"cannot pickle 'generator' object\n\n{LASTS}"
    )


def test_some_ranks_are_called_in_the_order_asked_for(ranks):
    assert ranks.on([2, 0], dist.get_rank) == [2, 0]
    assert ranks.on([], dist.get_rank) == []
    assert ranks.on([1, 1], lambda: "once") == ["once", "once"]
    assert ranks(dist.get_rank) == [0, 1, 2]  # and not what is left of the call before
    with pytest.raises(ValueError, match="there is no rank 3 among 3 ranks"):
        ranks.on([0, 3], dist.get_rank)


def test_state_is_kept_between_calls_and_brought_back_by_name(ranks):
    def keep(value):
        import __main__

        __main__.kept = [value, dist.get_rank()]

    ranks(keep, "a")
    assert ranks.get("kept", rank=1) == ["a", 1]
    assert ranks.get("kept") == [["a", 0], ["a", 1], ["a", 2]]
    with pytest.raises(md.RankError) as raised:
        ranks.get("lost", rank=2)
    assert str(raised.value) == (
        f"rank 2 raised NameError: name 'lost' is not defined on this rank\n\n{LASTS}"
    )


def test_ranks_see_the_environment_the_folder_and_the_path_of_the_moment(tmp_path, monkeypatch):
    forkserver.warm_up()  # it is older than what follows
    monkeypatch.setenv("MINIDIST_NEW", "yes")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fresh_module.py").write_text("value = 42\n")

    def see():
        import fresh_module

        return os.environ.get("MINIDIST_NEW"), "HOME" in os.environ, fresh_module.value, os.getcwd()

    assert md.launch(see, world_size=2) == [("yes", False, 42, str(tmp_path))] * 2


def test_a_data_loader_has_workers_within_a_rank(ranks):
    def load():
        data = TensorDataset(torch.arange(8) + 100 * dist.get_rank())
        loader = DataLoader(data, batch_size=4, num_workers=2)
        return [batch.tolist() for (batch,) in loader]

    assert ranks(load) == [
        [[100 * r + i for i in range(4)], [100 * r + i for i in range(4, 8)]] for r in range(3)
    ]


CELL = """
import os
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * i, os.getpid()

squares, pids = zip(*DataLoader(Squares(), None, num_workers=2, multiprocessing_context=START))
print(squares, len({os.getpid(), *pids}))
"""


@pytest.mark.parametrize(
    "start", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.soak)]
)
def test_a_data_set_of_a_cell_has_workers_within_a_rank(ranks, capsys, start):
    ranks.on([1], run_cell, CELL.replace("START", repr(start)), "a cell")
    assert capsys.readouterr().out == "[rank 1] (0, 1, 4, 9) 3\n"


def test_ranks_inherit_modules_and_no_threads_or_plots(ranks):
    def look():
        heavy = {"IPython", "matplotlib", "pytest"} & sys.modules.keys()
        return heavy, len(os.listdir(f"/proc/{os.getppid()}/task"))

    assert ranks(look) == [(set(), 1)] * 3


# ---- output -------------------------------------------------------------------------------


def test_lines_come_in_rank_order_whatever_the_ranks_do(ranks, capsys):
    def speak():
        time.sleep(0.05 * (2 - dist.get_rank()))  # the last rank is the first to speak
        print("one\n\nthree")
        print("no end", end="")
        print("to stderr", file=sys.stderr)

    shown = set()
    for _ in range(3):
        ranks(speak)
        shown.add(tuple(capsys.readouterr()))
    out = "".join(f"[rank {r}] one\n\n[rank {r}] three\n[rank {r}] no end\n" for r in range(3))
    err = "".join(f"[rank {r}] to stderr\n" for r in range(3))
    assert shown == {(out, err)}


def test_rank_0_is_heard_while_it_speaks(ranks, capsys):
    heard = []

    def speak():
        for i in range(10):
            print(i)
            time.sleep(0.05)

    caller = threading.Thread(target=ranks, args=(speak,))
    caller.start()
    while caller.is_alive():
        heard.append(capsys.readouterr().out)
        time.sleep(0.01)
    caller.join()
    heard.append(capsys.readouterr().out)
    assert sum("[rank 0]" in piece for piece in heard) > 3
    assert "".join(heard) == "".join(f"[rank {r}] {i}\n" for r in range(3) for i in range(10))


def test_output_that_python_never_sees_is_caught(ranks, capsys):
    def speak():
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")  # buffered in C's own stdout
        os.write(2, b"from the system\n")
        subprocess.run(["echo", "from a child"], check=True)
        sys.stdout.buffer.write(b"from a buffer")

    ranks(speak)
    out, err = capsys.readouterr()
    for rank in range(3):
        mine = {line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")}
        said = {line.removeprefix(f"[rank {rank}] ") for line in mine}
        assert said == {"from C", "from a child", "from a buffer"}
    assert err == "".join(f"[rank {r}] from the system\n" for r in range(3))


def write_bytes(pieces):
    for piece in pieces:
        os.write(1, piece)
        time.sleep(0.03)


def test_any_bytes_are_shown(ranks, capsys):
    for pieces, shown in [
        ([b"caf\xc3", b"\xa9 \xe2\x82", b"\xac"], "[rank 0] café €\n"),
        ([b"a\xff\xfeb\n"], "[rank 0] a\ufffd\ufffdb\n"),
        ([b"10%\r", b"20%\r", b"done\n"], "[rank 0] 10%\r[rank 0] 20%\r[rank 0] done\n"),
    ]:
        ranks.on([0], write_bytes, pieces)
        assert capsys.readouterr().out == shown
        ranks.on([0], write_bytes, [b"next"])  # untouched by what came before
        assert capsys.readouterr().out == "[rank 0] next\n", pieces


def test_a_progress_bar_on_rank_0_is_drawn_over_one_line(ranks, capsys):
    def train():
        for _ in tqdm(range(3), bar_format="{n}/{total}", mininterval=0, disable=dist.get_rank()):
            pass

    ranks(train)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "".join(f"\r[rank 0] {n}/3" for n in (0, 1, 2, 3, 3)) + "\n"


def test_a_rank_that_asks_names_the_way_outside_of_cells_too(ranks):
    for ask in "input()", "breakpoint()":
        assert "RuntimeError: a rank cannot ask you anything, unless" in told(ranks, eval, ask)


# ---- errors -------------------------------------------------------------------------------


def test_a_function_that_is_sent_keeps_the_name_of_its_file(monkeypatch):
    reducers, kind = cloudpickle.Pickler._dispatch_table, type(told.__code__)
    reduce = reducers[kind]  # cloudpickle 3.1.3 leaves it out
    monkeypatch.setitem(reducers, kind, lambda code: reduce(code.replace(co_filename="<dynamic>")))
    outer = pickle.loads(pickling.dumps(lambda: lambda: None))
    assert outer.__code__.co_filename == outer().__code__.co_filename == __file__


def test_one_ranks_error_is_told_with_its_line_and_where_the_others_were(ranks):
    def fail():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    here = os.path.relpath(__file__)
    assert told(ranks, fail) == (
        "rank 1 raised KeyError: 'lost'\n\n"
        f"  {here}, line {line_of(fail, 2)}, in fail\n"
        '      raise KeyError("lost")\n\n'
        "Where the other ranks were:\n"
        f"  ranks 0, 2: in barrier, {here}, line {line_of(fail, 3)}, in fail\n"
        f"      dist.barrier()\n\n{ENDED}"
    )
    assert ranks(dist.get_rank) == [0, 1, 2]


def test_the_readers_lines_are_shown_and_the_libraries_are_not(ranks):
    def outer():
        inner(torch.nn.Linear(2, 3))

    def inner(model):
        model(torch.ones(3))

    here = os.path.relpath(__file__)
    assert told(ranks, outer) == (
        "every rank raised RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (1x3 and 2x3)\n\n"
        f"  {here}, line {line_of(outer, 1)}, in outer\n"
        "      inner(torch.nn.Linear(2, 3))\n"
        f"  {here}, line {line_of(inner, 1)}, in inner\n"
        f"      model(torch.ones(3))\n\n{LASTS}"
    )


def set_clock(seconds):
    """When this rank's next error was raised, by the clock that the runtime reads."""
    worker.time = SimpleNamespace(monotonic=lambda: seconds)


def restore_clock():
    worker.time = time


def test_the_error_has_the_rank_its_exception_and_all_tracebacks(ranks):
    def fail():
        if dist.get_rank() > 0:
            set_clock(100 - 0.1 * dist.get_rank())
            raise ValueError(dist.get_rank(), "was wrong")

    with pytest.raises(md.RankError) as raised:
        ranks(fail)
    error = raised.value
    assert error.rank == 2
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == (2, "was wrong")
    assert list(error.tracebacks) == [1, 2]
    for rank, text in error.tracebacks.items():
        assert text.startswith("Traceback (most recent call last):\n")
        assert text.endswith(f"ValueError: ({rank}, 'was wrong')\n")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.tracebacks) == (str(error), 2, error.tracebacks)


def test_the_same_error_on_all_ranks_is_told_once(ranks):
    def fail():
        time.sleep(0.05 * (2 - dist.get_rank()))
        raise ValueError("the same")

    for _ in range(3):
        message = told(ranks, fail)
        assert message.startswith("every rank raised ValueError: the same\n\n  ")
        assert message.count("the same") == 2  # the second time in the line of code


def test_ranks_outlive_a_typo(ranks):
    before = ranks(os.getpid)
    told(ranks, lambda: undefined)  # noqa: F821
    assert ranks(os.getpid) == before


def test_of_errors_on_one_line_at_one_time_the_lowest_rank_is_named(ranks):
    """Otherwise the first."""

    def fail(apart):
        set_clock(100 - apart * dist.get_rank())
        raise ValueError(f"on rank {dist.get_rank()}")

    for apart, named in (0.01, 0), (0.06, 2):
        message = told(ranks, fail, apart)
        assert message.startswith(f"rank {named} raised ValueError: on rank {named}\n")
    ranks(restore_clock)


def test_ranks_do_not_outlive_a_message_that_nobody_took(ranks):
    def owe():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1)
        raise ValueError("a typo")

    assert told(ranks, owe).endswith(ENDED)


class OddError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OwnInitError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class LockError(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


def test_any_exception_is_told(ranks):
    def fail(kind, args):
        raise kind(*args)

    for kind, args, text, comes_back in [
        (OddError, (), "OddError: <exception str() failed>", True),
        (OwnInitError, (1, 2), "OwnInitError: 1 and 2", False),
        (LockError, (), "LockError: locked", False),
        (ExceptionGroup, ("two", [ValueError(1), KeyError(2)]), "ExceptionGroup: two", True),
        (KeyboardInterrupt, (), "KeyboardInterrupt", True),
    ]:
        with pytest.raises(md.RankError) as raised:
            ranks(fail, kind, args)
        assert str(raised.value).startswith(f"every rank raised {text}"), kind
        assert str(raised.value).endswith(LASTS), kind
        assert (type(raised.value.__cause__) is kind) == comes_back, kind


def test_an_endless_recursion_is_told_in_few_lines(ranks):
    def deeper():
        return deeper()

    message = told(ranks, deeper)
    assert message.startswith("every rank raised RecursionError: maximum recursion depth exceeded")
    assert len(message.splitlines()) < 50
    assert " more ...\n" in message


# ---- the life of a pool -------------------------------------------------------------------


def test_a_pool_closes_twice_and_then_refuses_calls():
    pool = md.ranks(2)
    pids = pool(os.getpid)
    assert repr(pool) == "<2 ranks>"
    pool.close()
    pool.close()
    assert repr(pool) == "<2 ranks, closed>"
    with pytest.raises(RuntimeError, match="these ranks were closed"):
        pool(dist.get_rank)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_that_is_forgotten_ends():
    pids = md.ranks(2)(os.getpid)
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5)


def test_two_pools_live_side_by_side():
    with md.ranks(2) as first, md.ranks(3) as second:
        assert first(dist.get_world_size) == [2, 2]
        assert second(dist.get_world_size) == [3, 3, 3]
        told(second, lambda: os._exit(1))
        assert first(dist.get_rank) == [0, 1]


def test_an_interrupt_while_ranks_start_ends_them(monkeypatch):
    """It is put off until they are known, or it would leave processes behind."""
    started = []

    def interrupted(*args):
        started.append(line := start(*args))
        signal.raise_signal(signal.SIGINT)
        assert not line.closed
        return line

    start = forkserver.start
    monkeypatch.setattr(forkserver, "start", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            md.ranks(2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [line.closed for line in started] == [True]


def test_a_pool_takes_one_call_at_a_time(ranks, tmp_path):
    def wait():
        while not (tmp_path / "go on").exists():
            time.sleep(0.01)

    caller = threading.Thread(target=ranks, args=(wait,))
    caller.start()
    assert eventually(lambda: ranks.is_called, 5)
    with pytest.raises(RuntimeError, match="these ranks are called already"):
        ranks(dist.get_rank)
    (tmp_path / "go on").touch()
    caller.join()
    assert ranks(dist.get_rank) == [0, 1, 2]


def test_a_forked_process_starts_ranks_of_its_own(ranks):
    """And its end is not theirs."""
    before = ranks(os.getpid)
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            same = set(ranks(os.getpid)) & set(before)
            ranks.close()
            os.write(writes, str(same).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as said:
        assert said.read() == "set()"
    os.wait()
    assert ranks(os.getpid) == before


# ---- programs -----------------------------------------------------------------------------

ENDINGS = {
    "falls off its end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
}
ROUNDS = [
    (2, "falls off its end"),
    *(pytest.param(2, ending, marks=pytest.mark.soak) for ending in ("sys.exit", "SIGTERM")),
    pytest.param(200, "falls off its end", marks=pytest.mark.soak),
]


@needs_proc
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launches", "ending"), ROUNDS)
def test_launches_and_a_program_with_an_open_pool_leave_nothing(launches, ending, tmp_path):
    """It has no `if __name__ == "__main__"`, and its functions and classes travel."""
    source = f"""
import gc, os, signal, sys, threading
import minidist as md, torch, torch.distributed as dist
print("once", flush=True)

class Counter:
    def __init__(self, n): self.n = n
    def __add__(self, k): return Counter(self.n + k)

def add(counter): return counter + dist.get_rank()

def count():
    gc.collect()
    print(len(os.listdir("/proc/self/fd")), threading.active_count(), flush=True)
    sys.stdin.readline()  # when it has been looked at

def launch():
    out = md.launch(add, Counter(10), world_size=2)
    assert [type(c) is Counter for c in out] == [True, True] and [c.n for c in out] == [10, 11]

launch()
count()
for _ in range({launches}):
    launch()
count()
r = md.ranks(2)
print(r(dist.get_rank), flush=True)
{ENDINGS[ending][0]}
"""
    with Program(source, tmp_path) as program:
        assert program.line() == "once"
        before = program.line()
        family, files = len(program.alive()), program.temporary()
        program.say("go on")
        assert program.line() == before  # file descriptors, threads
        assert len(program.alive()) == family == 2  # itself, forkserver
        assert program.temporary() == files
        program.say("go on")
        assert program.line() == "[0, 1]"
        assert program.finish(10) == (ENDINGS[ending][1], "", "")
        assert program.gone_within(5)
        assert program.temporary() == []


@pytest.mark.soak
def test_ranks_run_the_files_of_minidist_as_they_are_now(tmp_path):
    """Though what they import is imported before they start."""
    copy = tmp_path / "minidist"
    shutil.copytree(os.path.dirname(md.__file__), copy)
    source = f"""
import minidist as md

def see():
    return md.rank.__file__, getattr(md.rank, "EDITED", None)

with md.ranks(2) as kept:
    for number in (None, 1, 2):
        if number:
            with open({str(copy / "rank.py")!r}, "a") as file:
                file.write(f"\\nEDITED = {{number}}  # {{'again' * number}}\\n")
        print(md.launch(see, world_size=2) == [(str(md.rank.__file__), number)] * 2)
    print(kept(see)[0][1], md.rank.__file__)
    with open({str(copy / "rank.py")!r}, "a") as file:
        file.write("def = 1\\n")
    try:
        md.launch(see)
    except RuntimeError as error:
        print(error)
"""
    with Program(source, tmp_path) as program:  # its own folder comes first in sys.path
        code, out, err = program.finish(60)
        assert code == 0
        assert out == (
            f"True\nTrue\nTrue\nNone {copy / 'rank.py'}\n"
            "the process that supervises the ranks has ended. If by an error, it stands in the "
            "stderr of this program\n"
        )
        assert "SyntaxError: invalid syntax" in err


def test_where_nothing_can_be_forked_the_error_names_wsl(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(OSError) as raised:
        md.ranks(2)
    assert str(raised.value) == (
        "minidist forks its ranks, which Windows cannot. "
        "Use the Windows Subsystem for Linux (WSL), where everything here works."
    )
