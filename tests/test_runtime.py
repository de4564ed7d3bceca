"""The processes under the ranks: what goes in, what comes out, and that nothing stays behind."""

import ctypes
import errno
import faulthandler
import gc
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import programs
import pytest
import torch
import torch.distributed as dist
from programs import Family, eventually, few
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import minidist as md
from minidist.runtime import forkserver, output, report, supervisor, worker
from minidist.runtime.cell import run_cell
from minidist.runtime.modules import Modules
from minidist.runtime.system import as_socket, uninterrupted

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


def test_ops_of_torch_go_there_and_back(ranks):
    ops = torch.ops
    named = ops.aten, ops.aten.mm, ops.aten.mm.default, ops.aten.add.Tensor
    for back, same in ranks(lambda given: (given, given == (ops.aten, *given[1:])), named):
        assert same and all(a is b for a, b in zip(back, named, strict=True))


def test_objects_keep_their_type_there_and_back(ranks):
    """cloudpickle sends the class by value, and must recognise it when it comes home."""

    def move(point):
        assert isinstance(point, Point)
        return point.moved()

    assert ranks(move, Point(5)) == [Point(5), Point(6), Point(7)]


def test_closures_carry_their_values_and_lambdas_work(ranks):
    table = {rank: torch.full((2,), 10.0 + rank) for rank in range(3)}
    assert ranks(lambda: table[dist.get_rank()].sum().item()) == [20.0, 22.0, 24.0]


def test_tensors_models_and_none_come_back(ranks):
    def make():
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Linear(3, 2)
        return model, model.weight.detach().clone(), None

    for rank, (model, weight, nothing) in enumerate(ranks(make)):
        torch.manual_seed(rank)
        assert torch.equal(weight, torch.nn.Linear(3, 2).weight)
        assert torch.equal(model.weight, weight)
        assert nothing is None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_tensors_of_newer_dtypes_go_there_and_back(ranks, dtype):
    """torch alone writes what it cannot read."""
    for x in torch.arange(6).to(dtype), torch.empty(0, dtype=dtype):
        for y in ranks(lambda x: x.clone()[1:], x):
            assert y.dtype == dtype and torch.equal(y.float(), x[1:].float())


def test_large_arguments_and_results_pass_at_once(ranks):
    """More than any pipe holds, in both directions."""
    x = torch.arange(10_000_000)
    out = ranks(lambda x: x + dist.get_rank(), x)
    assert all(torch.equal(y, x + rank) for rank, y in enumerate(out))


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((1, (i for i in range(3))), {}, "argument 1 (a generator)"),
        ((), {"lock": threading.Lock()}, "argument 'lock' (a lock)"),
    ],
)
def test_what_cannot_be_sent_is_named_before_any_rank_begins(ranks, args, kwargs, what):
    kind = "generator" if args else "_thread.lock"
    with pytest.raises(TypeError) as raised:
        ranks(print, *args, **kwargs)
    assert str(raised.value) == (
        f"{what} cannot be sent to the ranks: cannot pickle '{kind}' object"
    )
    assert ranks(dist.get_rank) == [0, 1, 2]


def test_arguments_may_have_any_name(ranks):
    def give(self, function, ranks):
        return self, function, ranks

    assert ranks(give, self=1, function=2, ranks=3) == [(1, 2, 3)] * 3
    assert ranks.on([1], give, self=1, function=2, ranks=3) == [(1, 2, 3)]


def test_ranks_within_a_call_are_named(ranks):
    with pytest.raises(TypeError) as raised:
        ranks(lambda: ranks(print))
    assert str(raised.value) == (
        "the function (a function) cannot be sent to the ranks: a pool of ranks stays in the "
        "process that started it. Use it there only"
    )


def test_a_function_that_holds_what_cannot_be_sent_is_named(ranks):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the function .* cannot be sent to the ranks"):
        ranks(lambda: lock)
    with pytest.raises(TypeError, match="the function .* cannot be sent to the ranks"):
        ranks(lambda: ranks)


def test_a_result_that_cannot_be_sent_is_named(ranks):
    assert told(ranks, lambda: (i for i in range(3))) == (
        "every rank raised TypeError: the result, a generator, cannot be sent back: "
        f"cannot pickle 'generator' object\n\n{LASTS}"
    )


class Rebuilt:
    """Comes back as what `expression` says."""

    def __init__(self, expression):
        self.expression = expression

    def __reduce__(self):
        return eval, (self.expression,)


def test_what_cannot_be_rebuilt_is_an_error_on_the_side_that_tries(ranks):
    assert told(ranks, print, Rebuilt("int('x')")).startswith(
        "every rank raised ValueError: invalid literal for int()"
    )
    with pytest.raises(TypeError, match=r"a result cannot be rebuilt here: invalid literal"):
        ranks(lambda: Rebuilt("int('x')"))
    assert ranks(dist.get_rank) == [0, 1, 2]


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

squares, pids = zip(*DataLoader(Squares(), batch_size=None, num_workers=2))
print(squares, len({os.getpid(), *pids}))
"""


@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork" or sys.version_info >= (3, 14),
    reason="here no program's data set of its own main module has workers",
)
def test_a_data_set_of_a_cell_has_workers_within_a_rank(ranks, capsys):
    ranks(run_cell, CELL, "a cell")
    assert capsys.readouterr().out == "".join(f"[rank {r}] (0, 1, 4, 9) 3\n" for r in range(3))


def test_only_a_rank_itself_answers_and_no_child_that_it_forks(ranks, capsys):
    def fork(fails):
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if fails:
            raise ValueError("of the child")
        print("child")

    assert ranks(fork, False) == [0, 0, 0]
    assert ranks(lambda: "second") == ["second"] * 3
    assert capsys.readouterr() == ("".join(f"[rank {r}] child\n" for r in range(3)), "")
    assert ranks(fork, True) == [1, 1, 1]
    assert ranks(lambda: "fourth") == ["fourth"] * 3
    assert capsys.readouterr().err.count("ValueError: of the child\n") == 3


def test_an_answer_to_an_earlier_call_is_none(ranks):
    def answer_before():
        frame = sys._getframe()
        while "pipes" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["pipes"].calls.send_bytes(pickle.dumps((0, "stale", None, 0, [])))
        return "true"

    assert ranks(answer_before) == ["true"] * 3
    assert ranks(answer_before) == ["true"] * 3


def test_ranks_inherit_modules_and_no_threads_or_plots(ranks):
    def look():
        heavy = {"IPython", "matplotlib", "pytest"} & sys.modules.keys()
        return heavy, len(os.listdir(f"/proc/{os.getppid()}/task"))

    assert ranks(look) == [(set(), 1)] * 3


def test_a_rank_may_start_ranks_of_its_own():
    def outer():
        return md.launch(lambda: (dist.get_rank(), os.environ["WORLD_SIZE"]), world_size=3)

    assert md.launch(outer, world_size=1) == [[(0, "3"), (1, "3"), (2, "3")]]


def test_sixty_four_ranks_sum():
    def total():
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x)
        return x.item()

    assert md.launch(total, world_size=64) == [2016] * 64


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


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"caf\xc3", b"\xa9 \xe2\x82", b"\xac"], "[rank 0] café €\n"),
        ([b"a\xff\xfeb\n"], "[rank 0] a\ufffd\ufffdb\n"),
        ([b"cut \xe2\x82"], "[rank 0] cut \ufffd\n"),
        ([b"10%\r", b"20%\r", b"done\n"], "[rank 0] 10%\r[rank 0] 20%\r[rank 0] done\n"),
        ([b"dos\r\n", b"two\r\n"], "[rank 0] dos\r\n[rank 0] two\r\n"),
        ([b"\n\n", b"x"], "\n\n[rank 0] x\n"),
        ([b"", b"a\0b"], "[rank 0] a\0b\n"),
    ],
    ids=["split characters", "not utf-8", "cut", "drawn over", "dos", "empty lines", "nul"],
)
def test_any_bytes_are_shown(ranks, capsys, pieces, shown):
    ranks.on([0], write_bytes, pieces)
    assert capsys.readouterr().out == shown
    ranks.on([0], write_bytes, [b"next"])  # untouched by what came before
    assert capsys.readouterr().out == "[rank 0] next\n"


def test_a_progress_bar_on_rank_0_is_drawn_over_one_line(ranks, capsys):
    def train():
        for _ in tqdm(range(3), bar_format="{n}/{total}", mininterval=0, disable=dist.get_rank()):
            pass

    ranks(train)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "".join(f"\r[rank 0] {n}/3" for n in (0, 1, 2, 3, 3)) + "\n"


def test_a_megabyte_from_each_rank_to_each_stream_comes_through(ranks, capsys):
    def flood():
        line = str(dist.get_rank()) * 99 + "\n"
        for _ in range(10_500):
            sys.stderr.write(line)
            sys.stdout.write(line)
        return dist.get_rank()

    assert ranks(flood) == [0, 1, 2]
    for text in capsys.readouterr():
        assert text == "".join(f"[rank {r}] {str(r) * 99}\n" * 10_500 for r in range(3))


def test_a_pipe_that_is_always_full_does_not_keep_its_reader(monkeypatch):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    stream = output.Stream(ours, "stdout", "")
    monkeypatch.setattr(output.os, "read", lambda fd, size: b"y\n" * (size // 2))
    for _ in range(20):
        assert stream.drain()
    assert sum(map(len, stream.held)) <= output.LIMIT
    theirs.close()
    ours.close()


def test_a_child_that_outlives_the_call_delays_nobody(ranks, capsys):
    def leave():
        if dist.get_rank() == 0:
            subprocess.Popen(["sh", "-c", "sleep 60; echo late"]).returncode = 0
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return os.getpid()

    start = time.monotonic()
    with md.ranks(2) as pool:
        pool(leave)
        assert pool(dist.get_rank) == [0, 1]
    assert time.monotonic() - start < 5
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("close", [lambda: os.close(1), lambda: sys.stdout.close()])
def test_a_call_may_close_its_stdout_and_the_next_one_has_it_again(ranks, capsys, close):
    def speak(close):
        print("before")
        close()
        return dist.get_rank()

    assert ranks(speak, close) == [0, 1, 2]
    ranks(print, "after")
    ranks(os.write, 1, b"at last")
    assert capsys.readouterr().out == "".join(
        f"[rank {r}] {text}\n" for text in ("before", "after", "at last") for r in range(3)
    )


def test_a_letter_that_the_programs_output_does_not_know_is_escaped(tmp_path):
    source = """
import sys
import minidist as md
r = md.ranks(2)
for code in "ascii", "koi8-r":
    sys.stdout.reconfigure(encoding=code, errors="strict")
    r(print, "caf\u00e9\ud55c")
sys.stdout = None
r(print, "unheard")
sys.stdout = sys.__stdout__
print(r(len, []))
"""
    with Program(source, tmp_path) as program:
        line = "caf\\xe9\\ud55c\n"
        out = 2 * f"[rank 0] {line}[rank 1] {line}" + "[0, 0]\n"
        assert program.finish(60) == (0, out, "")


@pytest.mark.parametrize("ask", ["input", "breakpoint"])
def test_a_rank_that_asks_names_the_way_outside_of_cells_too(ask):
    with pytest.raises(md.RankError, match="RuntimeError: a rank cannot ask you anything, unless"):
        md.launch(eval, f"{ask}()", world_size=2)


def test_what_marks_a_message_may_be_printed(ranks, capfd):
    """Noncharacters of Unicode: a line of them takes no long time, and asks nothing."""

    def show():
        print("\ufdd0" * 10**6)
        print("\ufdd2")
        print("after")

    ranks(show)
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if "after" in line) == [
        f"[rank {r}] after" for r in range(3)
    ]


# ---- errors -------------------------------------------------------------------------------


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


def test_advice_about_files_stands_before_the_line_that_was_refused_one():
    try:
        try:
            os.close(10**6)
        except OSError as error:
            raise RuntimeError(os.strerror(errno.EMFILE)) from error
    except RuntimeError as error:
        failure = report.Failure.of(error, 0.0, None)
    message = str(report.rank_error([report.Outcome(0, failure=failure)], 1, False))
    assert message.startswith(
        "rank 0 raised RuntimeError: Too many open files. `ulimit -n` says how many it may open; "
        "raise that before you start Python\n\nThe system had refused a call: OSError: "
    )
    assert "      os.close(10**6)\n\n" in message


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


def test_where_no_line_is_the_readers_the_innermost_is_shown_the_same_everywhere(ranks):
    message = told(ranks, json.loads, "{")
    assert "\n  json/decoder.py, line " in message
    assert os.path.dirname(json.__file__) not in message
    assert told(ranks, int, "x") == (
        f"every rank raised ValueError: invalid literal for int() with base 10: 'x'\n\n{LASTS}"
    )


def set_clock(seconds):
    """When this rank's next error was raised, by the clock that the runtime reads."""
    worker.time = SimpleNamespace(monotonic=lambda: seconds)


def test_the_error_has_the_rank_its_exception_and_all_tracebacks():
    def fail():
        if dist.get_rank() > 0:
            set_clock(100 - 0.1 * dist.get_rank())
            raise ValueError(dist.get_rank(), "was wrong")

    with pytest.raises(md.RankError) as raised:
        md.launch(fail, world_size=3)
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


def test_ranks_do_not_outlive_messages_round_a_ring_that_nobody_took(ranks):
    """All have sent equally much, and the next ring would receive what was left of this one."""

    def owe():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.isend(torch.ones(1), (rank + 1) % world_size)
        raise ValueError("a typo")

    assert told(ranks, owe).endswith(ENDED)


@pytest.mark.parametrize(("apart", "named"), [(0.01, 0), (0.06, 2)])
def test_of_errors_on_one_line_at_one_time_the_lowest_rank_is_named(apart, named):
    """Otherwise the first."""

    def fail():
        set_clock(100 - apart * dist.get_rank())
        raise ValueError(f"on rank {dist.get_rank()}")

    with pytest.raises(md.RankError, match=f"^rank {named} raised ValueError: on rank {named}\n"):
        md.launch(fail, world_size=3)


@pytest.mark.parametrize("subgroup", [False, True], ids=["default group", "new group"])
def test_ranks_do_not_outlive_a_message_that_nobody_took(ranks, subgroup):
    def owe(subgroup):
        group = dist.new_group([0, 1, 2]) if subgroup else None
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1, group=group)
        raise ValueError("a typo")

    assert told(ranks, owe, subgroup).endswith(ENDED)


class OddError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OddExitError(Exception):
    def __str__(self):
        sys.exit("no text")

    __reduce__ = __str__


class OwnInitError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class LockError(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class OnlyThereError(Exception):
    """Can be rebuilt in the rank, and not here."""

    def __reduce__(self):
        return eval, (f"__import__('os').getpid() != {self.args[1]} or 1 / 0",)

    def __str__(self):
        return self.args[0]


class UnequalError(Exception):
    def __eq__(self, other):
        raise RuntimeError("cannot be compared")

    __hash__ = None

    def __bool__(self):
        return False


ODDITIES = [
    (OddError, (), "OddError: <exception str() failed>", True),
    (OddExitError, (), "OddExitError: <exception str() failed>", False),
    (OwnInitError, (1, 2), "OwnInitError: 1 and 2", False),
    (LockError, (), "LockError: locked", False),
    (OnlyThereError, ("far", os.getpid()), "OnlyThereError: far", False),
    (UnequalError, (), "UnequalError", True),
    (ExceptionGroup, ("two", [ValueError(1), KeyError(2)]), "ExceptionGroup: two", True),
    (KeyboardInterrupt, (), "KeyboardInterrupt", True),
    (GeneratorExit, (), "GeneratorExit", True),
    (BaseException, ("base",), "BaseException: base", True),
]


@pytest.mark.parametrize(
    ("kind", "args", "text", "comes_back"), ODDITIES, ids=[kind.__name__ for kind, *_ in ODDITIES]
)
def test_any_exception_is_told(ranks, kind, args, text, comes_back):
    def fail():
        raise kind(*args)

    with pytest.raises(md.RankError) as raised:
        ranks(fail)
    assert str(raised.value).startswith(f"every rank raised {text}")
    assert str(raised.value).endswith(LASTS)
    assert (type(raised.value.__cause__) is kind) == comes_back


def test_an_endless_recursion_is_told_in_few_lines(ranks):
    def deeper():
        return deeper()

    message = told(ranks, deeper)
    assert message.startswith("every rank raised RecursionError: maximum recursion depth exceeded")
    assert len(message.splitlines()) < 50
    assert " more ...\n" in message


def test_a_deep_chain_of_exceptions_is_told_by_its_last(ranks):
    def chain():
        error = None
        for level in range(3000):
            try:
                raise ValueError(level) from error
            except ValueError as e:
                error = e
        raise RuntimeError("the last") from error

    assert told(ranks, chain).startswith("every rank raised RuntimeError: the last\n")


# ---- the life of a pool -------------------------------------------------------------------


def test_a_pool_closes_again_after_an_interrupt(monkeypatch):
    pool = md.ranks(1)
    pool(os.getpid)

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._processes, "_handle_events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    monkeypatch.undo()
    pool.close()


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


def test_a_rank_that_left_its_group_closes_in_peace(capsys):
    with md.ranks(2) as pool:
        pool(dist.destroy_process_group)
        assert pool(os.getcwd) == [os.getcwd()] * 2
    assert capsys.readouterr() == ("", "")


def test_two_pools_live_side_by_side():
    with md.ranks(2) as first, md.ranks(3) as second:
        assert first(dist.get_world_size) == [2, 2]
        assert second(dist.get_world_size) == [3, 3, 3]
        told(second, lambda: os._exit(1))
        assert first(dist.get_rank) == [0, 1]


def test_a_pool_may_be_called_from_any_thread(ranks):
    results = {}

    def call(number):
        results[number] = ranks(lambda: (number, dist.get_rank()))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(n, 0), (n, 1), (n, 2)] for n in range(8)}


def test_threads_that_start_pools_at_once_leave_main_alone():
    main, results = sys.modules["__main__"], []

    def launch(number):
        results.append(md.launch(lambda: number + dist.get_rank(), world_size=2))

    for _ in range(3):
        threads = [threading.Thread(target=launch, args=(10 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sys.modules["__main__"] is main
    assert sorted(results) == sorted([[0, 1], [10, 11], [20, 21], [30, 31]] * 3)


def test_a_start_does_not_take_the_default_timeout_of_sockets(monkeypatch):
    connect, seen = multiprocessing.forkserver.connect_to_new_process, []

    def noted(fds):
        seen.append(socket.getdefaulttimeout())
        return connect(fds)

    monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", noted)
    socket.setdefaulttimeout(5)
    try:
        assert md.launch(len, [], world_size=1) == [0]
        assert socket.getdefaulttimeout() == 5 and seen == [None]
    finally:
        socket.setdefaulttimeout(None)


def test_an_interrupt_while_a_rank_starts_is_put_off_until_it_is_known(monkeypatch):
    """Between the fork and the note of it, an interrupt would leave a process behind."""
    start, started = forkserver.start, []

    def interrupted(*args):
        started.append(start(*args))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(forkserver, "start", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            md.ranks(2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(started) == 1
    with pytest.raises(ValueError, match="process object is closed"):  # it was ended, and joined
        started[0].is_alive()


@pytest.mark.parametrize("what", ["the supervisor", "a pipe"])
def test_what_cannot_be_started_leaves_no_file_open(monkeypatch, what):
    def refused(*_):
        raise OSError(errno.EAGAIN, "refused")

    md.launch(len, [], world_size=1)
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    if what == "a pipe":
        monkeypatch.setattr(supervisor, "request_rank", refused)
    else:
        monkeypatch.setattr(forkserver, "start", refused)
    with pytest.raises(OSError, match="refused"):
        md.ranks(3)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_hanging_up_does_not_wait_for_a_supervisor_that_does_not_read():
    line, theirs = multiprocessing.Pipe()
    with line, theirs, socket.socket(fileno=os.dup(line.fileno())) as full:
        with pytest.raises(BlockingIOError):
            while True:
                full.send(bytes(4096), socket.MSG_DONTWAIT)
        supervisor.hang_up(line)


def test_a_supervisor_that_is_killed_as_ranks_start_leaves_no_folder(monkeypatch):
    start, started = forkserver.start, []

    def noted(*args):
        started.append(start(*args))
        return started[-1]

    def kill_it(line, pipes):
        assert eventually(lambda: os.listdir(folder), 20)  # the supervisor has made its folder
        started[0].kill()
        raise OSError("refused")

    md.launch(len, [], world_size=1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path may be too long for sockets
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(forkserver, "start", noted)
        monkeypatch.setattr(supervisor, "request_rank", kill_it)
        with pytest.raises(OSError, match="refused"):
            md.ranks(2)
        assert len(started) == 1 and os.listdir(folder) == []


@needs_proc
@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_daemon_may_start_ranks(ends, tmp_path):
    """A worker of a multiprocessing.Pool is one. It ends with its program, and so do its ranks."""
    source = f"""
import multiprocessing, os, signal, time
import minidist as md, torch.distributed as dist

def child():
    with md.ranks(2) as ranks:
        print(ranks(dist.get_rank), multiprocessing.current_process().daemon, flush=True)
        {"pass" if ends else "time.sleep(60)"}

daemon = multiprocessing.get_context("fork").Process(target=child, daemon=True)
daemon.start()
if {ends}:
    daemon.join()
    print(daemon.exitcode)
else:
    input()  # and the program kills it
"""
    with Program(source, tmp_path) as program:
        assert program.line() == "[0, 1] True"
        if ends:
            assert program.finish(30) == (0, "0\n", "")
        else:
            program.say("end")
            assert program.process.wait(30) == 0
        assert program.gone_within(5)
        assert program.temporary() == []


@needs_proc
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launches", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_launches_leave_nothing(launches, tmp_path):
    source = """
import gc, os, sys, threading
import minidist as md, torch, torch.distributed as dist

def sum_up():
    x = torch.ones(1); dist.all_reduce(x)
    return x.item()

def count():
    gc.collect()
    print(len(os.listdir("/proc/self/fd")), threading.active_count(), flush=True)
    sys.stdin.readline()  # when it has been looked at

assert md.launch(sum_up, world_size=2) == [2.0, 2.0]
count()
for _ in range(LAUNCHES):
    assert md.launch(sum_up, world_size=2) == [2.0, 2.0]
count()
"""
    with Program(source.replace("LAUNCHES", str(launches)), tmp_path) as program:
        before = program.line()
        family, files = len(program.alive()), program.temporary()
        program.say("go on")
        assert program.line() == before  # file descriptors, threads
        assert len(program.alive()) == family == 3  # itself, forkserver, resource tracker
        assert program.temporary() == files
        program.say("go on")
        assert program.finish(30) == (0, "", "")
        assert program.gone_within(5)
        assert program.temporary() == []


# ---- programs -----------------------------------------------------------------------------

ENDINGS = {
    "falls off its end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL in a call": (
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start(); r(time.sleep, 60)",
        -signal.SIGKILL,
    ),
}


@needs_proc
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", few(ENDINGS, {"falls off its end", "SIGKILL in a call"}))
def test_a_program_with_an_open_pool_ends_at_once_and_leaves_nothing(ending, tmp_path):
    """It has no `if __name__ == "__main__"`, and has used weakref.finalize before anything else."""
    source = f"""
import tempfile
folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r}, ignore_cleanup_errors=True)
folder.cleanup()
import os, signal, sys, threading, time
import minidist as md
r = md.ranks(2)
print(len(set(r(os.getpid))), flush=True)
{ENDINGS[ending][0]}
"""
    with Program(source, tmp_path) as program:
        assert program.line() == "2"
        assert program.finish(10) == (ENDINGS[ending][1], "", "")
        assert program.gone_within(5)
        assert program.temporary() == []


def test_a_program_runs_without_stdin_and_in_a_folder_that_is_gone(tmp_path):
    source = """
import os
os.close(0)
import minidist as md
r = md.ranks(2)
r(print, "heard")
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
try:
    r(lambda: int("x"))
except md.RankError as error:
    print(str(error).split("\\n")[0])
r.close()
try:
    md.ranks(2)
except FileNotFoundError as error:
    print("refused")
"""
    with Program(source, tmp_path) as program:
        out = (
            "[rank 0] heard\n[rank 1] heard\n"
            "every rank raised ValueError: invalid literal for int() with base 10: 'x'\n"
            "refused\n"
        )
        assert program.finish(30) == (0, out, "")
        assert program.temporary() == []


def test_a_forked_child_leaves_the_ranks_of_its_parent_alone_and_may_start_its_own(tmp_path):
    source = """
import os, sys, warnings
import minidist as md, torch.distributed as dist
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
r = md.ranks(2)
r(len, [])

def close():
    with r:
        pass

def call():
    try:
        r(dist.get_rank)
    except RuntimeError as error:
        print(error, flush=True)

def start():
    print(md.launch(dist.get_rank, world_size=2), flush=True)

for action in (close, call, start):
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, r(dist.get_rank), flush=True)
    else:
        action()
        sys.exit(3)
"""
    with Program(source, tmp_path) as program:
        out = (
            "3 [0, 1]\n"
            "these ranks belong to the process that this one was forked from. "
            "Start ranks of its own here: md.ranks\n"
            "3 [0, 1]\n"
            "[0, 1]\n"
            "3 [0, 1]\n"
        )
        assert program.finish(120) == (0, out, "")
        assert program.temporary() == []


@needs_proc
def test_a_forked_child_that_closes_all_files_keeps_those_that_it_opens_next(tmp_path):
    """As a daemon does. They have numbers of files that were its parent's."""
    source = """
import os, warnings
import minidist as md, torch.distributed as dist
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
md.launch(len, [], world_size=1)
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    os.closerange(3, 256)
    opened = [os.open(os.devnull, os.O_WRONLY) for _ in range(40)]
    print(md.launch(dist.get_rank, world_size=2))
    print([os.readlink(f"/proc/self/fd/{file}") for file in opened] == [os.devnull] * 40)
"""
    with Program(source, tmp_path) as program:
        assert program.finish(60) == (0, "[0, 1]\nTrue\n", "")


def test_a_program_may_block_signals_and_use_its_ranks_in_handlers_and_as_it_exits(tmp_path):
    source = """
import atexit, os, signal, sys, threading, time

def refused():
    try:
        print(r(len, []), flush=True)
    except RuntimeError as error:
        print(error, flush=True)

def finish():  # multiprocessing has ended the ranks by now
    refused()
    r.close()

def stop(*_):
    refused()
    r.close()
    sys.exit(5)

atexit.register(finish)
signal.signal(signal.SIGTERM, stop)
# As for signal.sigwait. The second, which would end the program, waits for it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
import minidist as md, torch.distributed as dist
r = md.ranks(2)
try:
    r(lambda: os._exit(3) if dist.get_rank() else dist.barrier())
except md.RankError as error:
    print(error.rank, flush=True)
print(r(len, []), flush=True)
assert r(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())) == 2 * [{signal.SIGINT}]  # as always
if ENDING == "stop":
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    r(time.sleep, 60)
"""
    for ending, code, said in [
        ("exit", 0, "these ranks were closed\n"),
        ("stop", 5, "these ranks are called already, by this thread\nthese ranks were closed\n"),
    ]:
        with Program(f"ENDING = {ending!r}\n" + source, tmp_path) as program:
            assert program.finish(60) == (code, f"1\n[0, 0]\n{said}", "")
            assert program.gone_within(5)
            assert program.temporary() == []


class LateError(Exception):
    pass


def too_long(*_):
    raise LateError


def test_what_signals_do_waits_until_the_block_is_done():
    """All of it, once for each, though the first raises an error."""
    found, handlers = [], {signal.SIGALRM: too_long}
    handlers[signal.SIGUSR2] = lambda _, frame: found.append(frame.f_code.co_name)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(LateError), uninterrupted(), uninterrupted():
            for number in signal.SIGALRM, signal.SIGUSR2, signal.SIGUSR2:
                signal.raise_signal(number)
            assert found == []
        assert found == ["test_what_signals_do_waits_until_the_block_is_done"]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_are_given_back_though_one_that_is_back_raises_its_error(monkeypatch):
    """Python calls it as the next is set, before it sets that."""
    handlers = {signal.SIGUSR1: too_long, signal.SIGUSR2: print, signal.SIGALRM: print}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    errors, set_handler = [LateError], signal.signal

    def interrupted(number, handler):
        if errors and signal.getsignal(signal.SIGUSR1) is too_long and handler is print:
            raise errors.pop()
        set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    try:
        with pytest.raises(LateError), uninterrupted():
            pass
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        monkeypatch.undo()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_c_code_has_set_over_a_handler_stays(tmp_path):
    before = signal.signal(signal.SIGUSR1, too_long)
    try:
        with open(tmp_path / "stacks", "w+") as stacks:
            faulthandler.register(signal.SIGUSR1, stacks)
            with uninterrupted():
                pass
            signal.raise_signal(signal.SIGUSR1)
            faulthandler.unregister(signal.SIGUSR1)
            stacks.seek(0)
            assert "test_what_c_code_has_set" in stacks.read()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_variable_names_what_ranks_have_imported_as_they_start(tmp_path):
    source = """
import sys
import minidist as md
print(md.launch(lambda: "torch._dynamo" in sys.modules, world_size=1))
"""
    with Program(source, tmp_path) as light, programs.Program(source, tmp_path) as usual:
        assert light.finish(60) == (0, "[False]\n", "")
        assert usual.finish(60) == (0, "[True]\n", "")


def test_what_a_rank_starts_takes_no_line_of_the_programs_stdin(tmp_path):
    source = """
import subprocess
import minidist as md
print(md.launch(subprocess.check_output, ["head", "-n", "1"], world_size=2))
print(input())
"""
    with Program(source, tmp_path) as program:
        program.say("for the program")
        assert program.finish(60) == (0, "[b'', b'']\nfor the program\n", "")


@needs_proc
def test_a_program_that_waits_for_no_child_starts_another_forkserver(tmp_path):
    """As servers do: the system does not say how the one before has ended."""
    source = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from multiprocessing.forkserver import _forkserver
import minidist as md, torch.distributed as dist
md.launch(len, [], world_size=1)
os.kill(_forkserver._forkserver_pid, signal.SIGKILL)
while os.path.exists(f"/proc/{_forkserver._forkserver_pid}"):
    time.sleep(0.01)
print(md.launch(dist.get_rank, world_size=2))
"""
    with Program(source, tmp_path) as program:
        assert program.finish(60) == (0, "[0, 1]\n", "")
        assert program.temporary() == []


def test_functions_and_classes_of_a_program_travel(tmp_path):
    source = """
import minidist as md, torch.distributed as dist
print("once")

class Counter:
    def __init__(self, n): self.n = n
    def __add__(self, k): return Counter(self.n + k)

def add(counter): return counter + dist.get_rank()

out = md.launch(add, Counter(10), world_size=3)
print([type(c) is Counter for c in out], [c.n for c in out])
"""
    with Program(source, tmp_path) as program:
        assert program.finish(30) == (0, "once\n[True, True, True] [10, 11, 12]\n", "")


def test_what_c_holds_back_is_shown_with_the_call_that_said_it(tmp_path):
    """To a pipe, C's stdout is sent when its buffer is full."""
    source = """
import ctypes
import minidist as md

r = md.ranks(2)
r(lambda: ctypes.CDLL(None).puts(b"first") and None)
print("between")
r(print, "last")
"""
    with Program(source, tmp_path) as program:
        out = "[rank 0] first\n[rank 1] first\nbetween\n[rank 0] last\n[rank 1] last\n"
        assert program.finish(30) == (0, out, "")


def test_a_program_with_a_long_tmpdir(tmp_path):
    """A socket's path may have 108 characters."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    source = f"""
import multiprocessing.util, os, tempfile
os.environ["TMPDIR"] = {str(folder)!r}
import minidist as md
r = md.ranks(2)
print(r(tempfile.gettempdir) == [{str(folder)!r}] * 2)
print(*set(r(multiprocessing.util.get_temp_dir)), flush=True)
r.close()
"""
    with Program(source, tmp_path) as program:
        assert program.line() == "True"
        sockets = program.line()
        assert program.finish(30) == (0, "", "")
    assert os.path.dirname(sockets) == "/tmp" and not os.path.exists(sockets)
    assert [p for p in os.listdir(folder) if not p.startswith("torchinductor_")] == []


def test_too_few_open_files_are_said_in_a_sentence(tmp_path):
    source = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import minidist as md
try:
    md.ranks(16)
except OSError as error:
    print(error)
print(md.launch(len, [1], world_size=2))
"""
    with Program(source, tmp_path) as program:
        code, out, err = program.finish(60)
        assert (code, err) == (0, "")
        assert out == (
            "[Errno 24] 16 ranks need more open files than the 64 that this process may have. "
            "Raise the limit (`ulimit -n 4096`), then start Python again\n[1, 1]\n"
        )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_host_that_handles_interrupts_in_c(tmp_path):
    """As R does, or another program that embeds Python: here a library, loaded before Python."""
    (tmp_path / "host.c").write_text("""
        #include <signal.h>
        static void handler(int number) {}
        __attribute__((constructor)) static void install(void) { signal(SIGINT, handler); }
    """)
    library = tmp_path / "host.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "host.c")]
    subprocess.run(command, check=True)
    source = """
import os, signal
assert signal.getsignal(signal.SIGINT) is None
del os.environ["LD_PRELOAD"]  # no host of the forkserver, which is a program of its own
import minidist as md
print(md.launch(len, [1], world_size=2))
"""
    program = tmp_path / "program.py"
    program.write_text(source)
    family = Family()
    environ = {**family.environ(), "LD_PRELOAD": str(library)}
    run = subprocess.run([sys.executable, program], env=environ, capture_output=True, timeout=60)
    assert (run.stdout, run.stderr) == (b"[1, 1]\n", b"")
    assert family.gone_within(5)


def test_a_rank_that_takes_long_to_say_what_failed_was_where_it_failed(pools):
    class LongError(Exception):
        def __str__(self):
            time.sleep(20)
            return "at last"

    def fail():
        if dist.get_rank() == 0:
            raise ValueError("at once")
        raise LongError

    with pytest.raises(md.RankError) as caught:
        pools(2)(fail)
    assert "rank 0 raised ValueError: at once" in str(caught.value)
    assert re.search(r"rank 1: at .*, in fail\n +raise LongError\n", str(caught.value))


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
            "the ranks could not be started: why stands in the stderr of this program\n"
        )
        assert "SyntaxError: invalid syntax" in err


def test_modules_edited_since_ranks_imported_them_are_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file, turn = tmp_path / "edited_module.py", itertools.count()

    def write(value):
        file.write_text(f"import json\n\ndef f():\n    return {value!r}\n")
        os.utime(file, (0, next(turn)))  # seconds apart, for any file system

    def call(reloaded=False):
        import edited_module

        if reloaded:
            importlib.reload(edited_module)
        return edited_module.f()

    said = (
        "edited_module.py was edited after the ranks imported it: they run it as it was before. "
        "New ranks run it as it is now (`%%ranks --fresh`, or another pool).\n"
    )
    write("old")
    with md.ranks(2) as pool:
        assert pool(call) == pool(call) == ["old"] * 2
        assert capsys.readouterr().err == ""
        write("new")
        assert pool(call) == ["old"] * 2
        assert capsys.readouterr().err == said
        assert pool(call) == ["old"] * 2
        assert capsys.readouterr().err == ""
        write("newer")
        assert pool.on([1], call, True) == ["newer"]
        assert capsys.readouterr().err == ""
        assert pool(call) == ["old", "newer"]
        assert capsys.readouterr().err == said  # of rank 0
        write("newest")
        with pytest.raises(md.RankError, match="invalid literal"):
            pool(int, "x")
        assert capsys.readouterr().err == said
        file.unlink()
        assert pool(call) == ["old", "newer"]
    assert capsys.readouterr().err == ""


def test_a_module_that_takes_the_place_of_another_is_seen_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "goes", types.ModuleType("goes"))
    file = tmp_path / "comes_instead.py"
    file.write_text("")
    modules = Modules()
    del sys.modules["goes"]
    importlib.import_module("comes_instead")
    assert modules.edited() == []
    os.utime(file, (0, 1))
    assert modules.edited() == [str(file)]


WINDOWS = "minidist starts its ranks with Python's forkserver, which Windows does not have. "


def test_where_there_is_no_forkserver_the_error_names_wsl(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(OSError) as raised:
        md.ranks(2)
    assert str(raised.value) == (
        f"{WINDOWS}Use the Windows Subsystem for Linux (WSL), where everything here works."
    )


def test_an_end_may_be_closed_amid_its_use():
    """As after an interrupt, where the block ends when nobody needs it any more."""
    end, other = multiprocessing.Pipe()
    with as_socket(end):
        end.close()
    other.close()


def test_a_python_without_windows_missing_parts_comes_as_far_as_that_error(tmp_path):
    """Take away what Windows has not, before minidist is imported."""
    source = """
import ctypes, multiprocessing, multiprocessing.context, os, signal
import torch, torch.distributed

class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        super().__init__(name, *args, **kwargs)

ctypes.CDLL = CDLL
multiprocessing.get_all_start_methods = lambda: ["spawn"]
del multiprocessing.context.ForkServerContext
del os.setsid, os.killpg, os.fork, signal.SIGKILL
import minidist as md
try:
    md.ranks(2)
except OSError as error:
    print(error)
"""
    with Program(source, tmp_path) as program:
        code, out, err = program.finish(30)
        assert (code, err) == (0, "")
        assert out.startswith(WINDOWS)
