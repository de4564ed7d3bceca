"""`%%ranks` in real kernels: what a reader types, sees, interrupts and restarts."""

import os
import re
import time
from dataclasses import dataclass, field

import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from programs import Family, eventually

SOON = 5  # seconds

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds processes by /proc"),
]


@dataclass
class Shown:
    """What a cell shows."""

    stdout: str = ""
    stderr: str = ""
    results: list[str] = field(default_factory=list)
    error: str = ""  # as nbval compares it: ename and evalue
    traceback: str = ""  # as the reader sees it
    pictures: int = 0


class Kernel(Family):
    """A notebook's kernel, which pytest does not know of unless `environ` says so."""

    def __init__(self, tmp_path, **environ: str) -> None:
        super().__init__()
        self.manager = KernelManager(kernel_name="python3", transport="ipc")
        self.manager.connection_file = str(tmp_path / "kernel.json")
        there = {k: v for k, v in self.environ().items() if k != "PYTEST_CURRENT_TEST"}
        there["PYTHONWARNINGS"] = "error::UserWarning"
        self.manager.start_kernel(env={**there, **environ}, cwd=str(tmp_path))
        self.client = self._connect()

    def _connect(self) -> BlockingKernelClient:
        client = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        return client

    def restart(self, *, now: bool) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self.client = self._connect()

    def begin(self, source: str) -> str:
        return self.client.execute(source)

    def end_of(self, cell: str, timeout: float = 60) -> Shown:
        """Collect what a cell shows until it is done."""
        shown = Shown()
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
            elif kind == "display_data":
                shown.stdout += "<picture>\n"
                shown.pictures += content["data"].get("image/png", "").startswith("iVBOR")
            elif kind == "execute_result":
                shown.results.append(content["data"]["text/plain"])
            elif kind == "error":
                shown.error = f"{content['ename']}: {content['evalue']}"
                shown.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def run(self, source: str) -> Shown:
        return self.end_of(self.begin(source))

    def answer(self, *lines: str) -> list[str]:
        """Answer what a cell asks: its prompts."""
        prompts = []
        for line in lines:
            prompts.append(self.client.get_stdin_msg(timeout=30)["content"]["prompt"])
            self.client.input(line)
        return prompts

    def wait_for(self, text: str) -> None:
        """Until a cell prints this."""
        while True:
            message = self.client.get_iopub_msg(timeout=30)
            if message["msg_type"] == "stream" and text in message["content"]["text"]:
                return

    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.end()


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


@pytest.fixture
def kept(one_kernel):
    """The kernel, with three ranks, which may hold what the test before has defined."""
    one_kernel.run("%load_ext minidist")
    words = "-n 3 --nodes 1 --timeout 20 --backend auto"
    assert one_kernel.run(f"%%ranks {words}\n{IMPORTS}") == Shown()
    return one_kernel


@pytest.fixture
def kernel(kept):
    """The kernel, with three new ranks in which nothing is defined but `dist`."""
    assert kept.run("%%ranks --fresh\n" + IMPORTS) == Shown()
    return kept


IMPORTS = "import torch, torch.distributed as dist, os, sys, time"


def by_rank(text, ranks=(0, 1, 2)):
    """The same line from each rank; `{r}` is its number."""
    return "".join(f"[rank {r}] {text.format(r=r)}\n" for r in ranks)


# ---- what a cell does ---------------------------------------------------------------------


def test_a_cell_runs_on_every_rank_and_shows_its_last_expression(kept):
    shown = kept.run("%%ranks\nprint('hello')\ndist.get_rank() * 10 + 7")
    assert shown == Shown("".join(f"[rank {r}] hello\n[rank {r}] {r}7\n" for r in range(3)).replace(
        "[rank 0] 07", "[rank 0] 7"
    ))  # fmt: skip


def test_what_is_no_value_is_not_shown(kept):
    for source in "x = 5", "5;", "None", "# nothing", "'text';\n\n":
        assert kept.run(f"%%ranks\n{source}") == Shown(), source


def test_names_are_kept_from_cell_to_cell_on_each_rank_and_not_in_the_kernel(kept):
    kept.run("%%ranks\nx = [dist.get_rank()]")
    kept.run("%%ranks\nx.append('more')\ndef double(): return x + x")
    assert kept.run("%%ranks\ndouble()").stdout == by_rank("[{r}, 'more', {r}, 'more']")
    assert kept.run("x").error == "NameError: name 'x' is not defined"


def test_only_some_ranks_run_the_cell(kept):
    kept.run("%%ranks\nx = 'all'")
    assert kept.run("%%ranks --only 2,0\nx = 'some'; print('ran')").stdout == by_rank("ran", (0, 2))
    assert kept.run("%%ranks --only 1\nx").stdout == by_rank("'all'", (1,))
    assert kept.run("%%ranks\nx").stdout == ("[rank 0] 'some'\n[rank 1] 'all'\n[rank 2] 'some'\n")


def test_what_makes_no_sense_is_told_and_the_ranks_stay(kept):
    kept.run("%%ranks\nx = 1")
    for words, told in [
        ("--only 3", "--only 3: rank 3 is none of 0, 1, 2"),
        ("--only a", "--only takes ranks such as 0,2, not 'a'"),
        ("--debug 3", "--debug 3: rank 3 is none of 0, 1, 2"),
        ("--only 0,2 --debug 1", "--debug 1: rank 1 is none of 0, 2"),
        ("-n 0", "world_size must be 1 or more, not 0"),
        ("--nodes 2", "3 ranks cannot be spread evenly over 2 nodes"),
    ]:
        assert kept.run(f"%%ranks {words}\nprint('ran')") == Shown(stderr=f"UsageError: {told}\n")
    for words, told in [
        ("3", "unrecognized arguments: 3"),
        ("-n three", "argument -n: invalid int value: 'three'"),
        ("--only 1", "--only and --debug are for %%ranks, at the head of a cell"),
    ]:
        assert kept.run(f"%ranks {words}") == Shown(stderr=f"UsageError: {told}\n")
    assert kept.run("%%ranks\nx").stdout == by_rank("1")


def test_fresh_ranks_know_nothing_and_another_number_makes_fresh_ones(kernel):
    kernel.run("%%ranks\nx = 1")
    assert kernel.run("%%ranks -n 3\n'x' in globals()").stdout == by_rank("True")
    assert kernel.run("%%ranks --fresh\n'x' in globals()").stdout == by_rank("False")
    place = "import os\nos.environ['WORLD_SIZE'] + os.environ['GROUP_RANK']"
    assert kernel.run(f"%%ranks -n 2 --nodes 2\n{place}").stdout == (
        "[rank 0] '20'\n[rank 1] '21'\n"
    )
    assert kernel.run("%%ranks\n1 + 1").stdout == by_rank("2", (0, 1))
    assert eventually(lambda: len(kernel.alive()) == 5, SOON)  # with forkserver, supervisor


def test_the_kernel_calls_the_ranks_and_fetches_values(kept):
    kept.run("%%ranks\nx = torch.full((2,), float(dist.get_rank()))")
    kept.run("%%ranks\nclass Point:\n    def __init__(self, x): self.x = x\np = Point(x)")
    kept.run("r = %ranks")
    assert kept.run("r.get('x', rank=2)").results == ["tensor([2., 2.])"]
    assert kept.run("[x.tolist() for x in r.get('x')]").results == [
        "[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]"
    ]
    assert kept.run("r.get('p', rank=1).x").results == ["tensor([1., 1.])"]
    assert kept.run("import torch.distributed as dist\nr(dist.get_rank)").results == ["[0, 1, 2]"]
    kept.run("scale = 100\ndef scaled(k):\n    return (dist.get_rank() + k) * scale")
    assert kept.run("r(scaled, 1)").results == ["[100, 200, 300]"]
    assert kept.run("r.get('y', 1)").error == (
        "RankError: rank 1 raised NameError: name 'y' is not defined on this rank\n\n"
        "The ranks are still there, with all that they hold."
    )


# ---- errors name the reader's line --------------------------------------------------------

LASTS = "\n\nThe ranks are still there, with all that they hold."
ENDED = "\n\nThe ranks were ended, and what they held is lost; the next call starts new ones."


def again(n):
    """What follows `ENDED`, where the cell `n` was the first to define a name."""
    return f"\n\nRun Cell In[{n}] again, and the cells after it whose names you need."


def number(kernel):
    """The number that the next cell will have."""
    return int(kernel.run("len(In)").results[0])


def test_an_error_names_the_line_of_the_cell(kernel):
    n = number(kernel)
    shown = kernel.run(
        "%%ranks\n\nx = 1\nif dist.get_rank() == 1:\n    x / 0  # here\ndist.barrier()"
    )
    told = (
        f"RankError: rank 1 raised ZeroDivisionError: division by zero\n\n"
        f"  Cell In[{n}], line 5\n      x / 0  # here\n\n"
        f"Where the other ranks were:\n"
        f"  ranks 0, 2: in barrier, Cell In[{n}], line 6\n      dist.barrier(){ENDED}{again(n - 2)}"
    )
    assert shown.error == told
    assert shown.traceback == told
    assert (shown.stdout, shown.stderr) == ("", "")
    assert kernel.run("%%ranks\n2 + 2").stdout == by_rank("4")  # new ranks


def test_an_error_names_the_lines_of_functions_from_other_cells(kept):
    n = number(kept)
    kept.run("%%ranks\ndef inner():\n    return undefined")
    kept.run("def outer():\n    import __main__\n    return __main__.inner()\n\nr = %ranks")
    assert kept.run("r(outer)").error == (
        "RankError: every rank raised NameError: name 'undefined' is not defined\n\n"
        f"  Cell In[{n + 1}], line 3, in outer\n      return __main__.inner()\n"
        f"  Cell In[{n}], line 3, in inner\n      return undefined{LASTS}"
    )
    assert kept.run("%%ranks\ninner.__name__").stdout == by_rank("'inner'")


def test_a_table_of_calls_names_the_lines_of_the_cell(kept):
    n = number(kept)
    told = kept.run(
        "%%ranks\nimport torch\nx = torch.zeros(2 + dist.get_rank() // 2)\ndist.all_reduce(x)"
    ).error
    assert "every rank of a group must make the same call\n" in told
    for rank, length in enumerate((2, 2, 3)):
        call = f"all_reduce(float32({length},), op=SUM)"
        assert f"  rank {rank}: {call}, Cell In[{n}], line 4\n" in told


def test_a_syntax_error_is_told_once_with_its_line(kernel):
    n = number(kernel)
    shown = kernel.run("%%ranks\nx = 1\ny = = 2")
    assert shown.error == f"SyntaxError: invalid syntax (Cell In[{n}], line 3)"
    assert f"Cell In[{n}]:3\n    y = = 2\n" in shown.traceback
    assert shown.stdout == shown.stderr == ""
    assert kernel.run("%%ranks\n'x' in globals()").stdout == by_rank("False")


def test_what_a_rank_draws_is_shown_under_it(kept):
    plot = (
        "import matplotlib.pyplot as plt\nprint('one', end='')\nplt.plot([1, 2]); plt.show()\n"
        "print('two')\nplt.bar(1, 2); None"
    )
    shown = kept.run(f"%%ranks --only 2,0\n{plot}")
    assert shown == Shown(
        "".join(
            f"[rank {r}] one\n[rank {r}]\n<picture>\n[rank {r}] two\n[rank {r}]\n<picture>\n"
            for r in (0, 2)
        ),
        pictures=4,
    )
    assert kept.run("%%ranks\n'none' if dist.get_rank() else None").pictures == 0
    shown = kept.run(f"%%ranks --only 1\n{plot}\n1 / 0")
    assert (shown.stdout, shown.pictures) == (
        "[rank 1] one\n[rank 1]\n<picture>\n[rank 1] two\n",
        1,
    )
    assert "ZeroDivisionError" in shown.error
    kept.run(
        "def draw():\n    import matplotlib.pyplot as plt\n    plt.plot([1, 2])\n    plt.show()"
    )
    assert kept.run("r = %ranks\nr.on([1], draw)") == Shown(
        "[rank 1]\n<picture>\n", results=["[None]"], pictures=1
    )


def test_a_progress_bar_is_one_line_a_rank(kept):
    """As tqdm draws it. Rank 0's is live; of the others only the last state is sent."""
    bar = (
        "for n in range(4):\n    print(f'\\r{n}/3 of {dist.get_rank()}', end='', file=sys.stderr)\n"
        "    time.sleep(0.02 * (3 - dist.get_rank()))\n"
        "print(file=sys.stderr); print('done', file=sys.stderr)"
    )
    first = "".join(f"\r[rank 0] {n}/3 of 0" for n in range(4)) + "\n[rank 0] done\n"
    others = "".join(f"\r[rank {r}] 3/3 of {r}\n[rank {r}] done\n" for r in (1, 2))
    assert kept.run(f"%%ranks\n{bar}") == Shown(stderr=first + others)
    live = "".join(f"\r[rank 1] {n}/3 of 1" for n in range(4)) + "\n[rank 1] done\n"
    last = "\r[rank 2] 3/3 of 2\n[rank 2] done\n"
    assert kept.run(f"%%ranks --only 1,2\n{bar}") == Shown(stderr=live + last)


def test_what_only_a_notebook_understands_is_said_to_be_none(kept):
    for line in "%time x = 1", "!ls", "x = %pwd", "dist.barrier?":
        n = number(kept)
        assert kept.run(f"%%ranks\nx = 1\n{line}").error == (
            "SyntaxError: invalid syntax. A %%ranks cell is plain Python: what begins with % or !, "
            f"or asks by ?, belongs in a cell of its own (Cell In[{n}], line 3)"
        )


def test_a_name_that_only_the_notebook_has_is_said_to_be_so(kept):
    kept.run("only_here = 1")
    n = number(kept)
    assert kept.run("%%ranks\nonly_here").error == (
        "RankError: every rank raised NameError: name 'only_here' is not defined\n\n"
        f"  Cell In[{n}], line 2\n      only_here{LASTS}\n\n"
        "The notebook has 'only_here', and ranks do not see its names: define it in a %%ranks "
        "cell, or give it to a function, `r = %ranks; r(function, only_here)`."
    )
    assert kept.run("%%ranks\nnowhere").error.endswith(LASTS)


def test_ranks_that_ended_name_the_first_cell_to_run_again(kernel):
    assert again(number(kernel) - 2) in kernel.run("%%ranks\nos._exit(1)").error
    # Of new ranks it is another cell, and none while nothing was defined.
    assert kernel.run("%%ranks\n__import__('os')._exit(1)").error.endswith(ENDED)
    n = number(kernel)
    kernel.run("%%ranks\nimport os")
    kernel.run("%%ranks\nx = 1")
    assert kernel.run("%%ranks\nos._exit(1)").error.endswith(ENDED + again(n))


@pytest.mark.soak
def test_a_timeout_that_stays_is_said(kernel):
    late = "\nif dist.get_rank() == 1: time.sleep(100)\ndist.barrier()"
    kept = "--timeout 1 holds for later cells too: --timeout 30 takes it back."
    first = kernel.run(f"%%ranks --timeout 1\n{IMPORTS}{late}").error
    assert "within 1 s" in first and first.endswith(kept)
    assert kernel.run(f"%%ranks\n{IMPORTS}{late}").error.endswith(kept)
    assert kept not in kernel.run("%%ranks\n1 / 0").error  # which has to do with no timeout


# ---- what the ranks do now ----------------------------------------------------------------


def rows(shown):
    """The table of each pool, as {its first line: [(rank, pid, MB, now)]}."""
    found = {}
    for table in shown.stdout.strip().split("\n\n"):
        name, *lines = table.split("\n")
        assert not lines or lines.pop(0).split() == ["rank", "pid", "resident", "now"]
        found[name] = [
            re.fullmatch(r" *(\d+) +(\d+)(?: +(\d+) MB)? +(\S.*)", line).groups() for line in lines
        ]
    return found


def test_ranks_alone_shows_all_ranks(kernel):
    kernel.run("%%ranks\nx = torch.ones(10_000_000 * dist.get_rank())  # 40 MB on rank 1, 80 on 2")
    kernel.run("import os, minidist as md\nr = %ranks\nother = md.ranks(2)")
    found = rows(kernel.run("%ranks"))
    assert list(found) == ["%%ranks: 3 ranks", "Another pool: 2 ranks"]
    for name, pool in zip(found, ("r", "other"), strict=True):
        pids = kernel.run(f"{pool}(os.getpid)").results
        assert [f"[{', '.join(pid for _, pid, _, _ in found[name])}]"] == pids
        assert [(rank, now) for rank, _, _, now in found[name]] == [
            (str(rank), "idle") for rank in range(len(found[name]))
        ]
    memory = [int(mb) for _, _, mb, _ in found["%%ranks: 3 ranks"]]
    assert 30 < memory[1] - memory[0] < 50 and 30 < memory[2] - memory[1] < 50
    kernel.run("other.close(); del other")
    assert list(rows(kernel.run("%ranks\nr = %ranks"))) == ["%%ranks: 3 ranks"]


def test_ranks_alone_when_there_are_none(kernel):
    assert (
        kernel.run("r = %ranks\nimport os, signal; os.kill(r.pids[1], signal.SIGKILL)") == Shown()
    )
    assert eventually(
        lambda: (
            [now for *_, now in rows(kernel.run("%ranks"))["%%ranks: 3 ranks"]]
            == ["idle", "has ended", "idle"]
        ),
        SOON,
    )
    assert "killed by SIGKILL" in kernel.run("%%ranks\n1").error
    gone = "%%ranks: its 3 ranks have ended, and the next call starts new ones.\n"
    assert kernel.run("%ranks") == Shown(gone)
    assert kernel.run("%%ranks\n1").stdout == by_rank("1")
    kernel.run("r.close()")
    assert kernel.run("%ranks") == Shown("There are no ranks. A %%ranks cell starts them.\n")
    assert kernel.run("%%ranks\n1").stdout == by_rank("1")


# ---- a debugger ---------------------------------------------------------------------------


def test_a_rank_that_asks_names_the_way(kept):
    for line in "breakpoint()", "input('x? ')":
        n = number(kept)
        assert kept.run(f"%%ranks\n{line}\nx = 1").error == (
            "RankError: every rank raised RuntimeError: a rank cannot ask you anything, unless its "
            "cell begins with `%%ranks --debug 1`: then input() works, and rank 1 stops at "
            f"breakpoint() and at an error\n\n  Cell In[{n}], line 2\n      {line}{LASTS}"
        )


def debug(kernel, source, *lines):
    """Answer what a cell asks: its prompts, and all that it shows."""
    cell = kernel.begin(source)
    return kernel.answer(*lines), kernel.end_of(cell)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_rank_is_debugged_while_the_others_wait(kernel, backend):
    kernel.run(f"%%ranks --timeout 1 --backend {backend}\n{IMPORTS}")
    n = number(kernel)
    cell = kernel.begin(
        "%%ranks --debug 1\ndef double(x):\n    breakpoint()\n    return 2 * x\n"
        "x = double(torch.ones(1) + dist.get_rank())\ndist.all_reduce(x)\nx"
    )
    prompts = kernel.answer("p x", "x[:] = 10")
    time.sleep(2)  # longer than a rank waits for another
    prompts += kernel.answer("u", "l 6,7", "b 7", "c", "p x", "c")
    assert prompts == ["[rank 1] (Pdb) "] * 8
    shown = kernel.end_of(cell).stdout.splitlines(keepends=True)
    lines = "".join(line for line in shown if line.startswith("[rank 1] "))
    assert lines == (
        f"[rank 1] > Cell In[{n}](4)double()\n[rank 1] -> return 2 * x\n"
        "[rank 1] tensor([2.])\n"
        f"[rank 1] > Cell In[{n}](5)<module>()\n"
        "[rank 1] -> x = double(torch.ones(1) + dist.get_rank())\n"
        "[rank 1]   6  \tdist.all_reduce(x)\n[rank 1]   7  \tx\n"
        f"[rank 1] Breakpoint 1 at Cell In[{n}]:7\n"
        f"[rank 1] > Cell In[{n}](7)<module>()\n[rank 1] -> x\n"
        "[rank 1] tensor([28.])\n[rank 1] tensor([28.])\n"
    )
    assert [line for line in shown if line not in lines] == [
        f"[rank {r}] tensor([28.])\n" for r in (0, 2)
    ]
    # What waits no longer than usual, waits no longer again.
    late = "if dist.get_rank() == 1: time.sleep(100)\ndist.barrier()"
    assert "within 1 s" in kernel.run(f"%%ranks\n{late}").error
    kernel.run("%%ranks --backend auto\n1")


def test_a_rank_stops_at_its_error(kept):
    n = number(kept)
    cell = "%%ranks --debug 1\ndef share(x):\n    return 12 // x\nshare(0)"
    prompts, shown = debug(kept, cell, "w", "p x", "u", "c")
    assert prompts == ["[rank 1] (Pdb) "] * 4
    assert shown.stdout == (
        "[rank 1] ZeroDivisionError: integer division or modulo by zero\n"
        f"[rank 1] > Cell In[{n}](3)share()\n[rank 1] -> return 12 // x\n"
        f"[rank 1]   Cell In[{n}](4)<module>()\n[rank 1] -> share(0)\n"
        f"[rank 1] > Cell In[{n}](3)share()\n[rank 1] -> return 12 // x\n"
        f"[rank 1] 0\n[rank 1] > Cell In[{n}](4)<module>()\n[rank 1] -> share(0)\n"
    )
    assert shown.error.startswith("RankError: every rank raised ZeroDivisionError")
    assert shown.error.endswith(LASTS)


@pytest.mark.soak
def test_a_debugged_cell_may_be_left(kernel):
    n = number(kernel)
    assert kernel.run("%%ranks --debug 1\n2") == Shown(by_rank("2"))
    _, shown = debug(kernel, "%%ranks --debug 1\nbreakpoint()\nx = 1", "n", "n")
    assert shown.error == ""  # stepped out of the cell
    assert "cannot ask you" in kernel.run("r = %ranks\ndef ask(): input()\nr(ask)").error
    _, shown = debug(kernel, "%%ranks --debug 1\nbreakpoint()\nx = 2", "q")
    assert shown.error.startswith(
        f"RankError: rank 1 raised BdbQuit\n\n  Cell In[{n + 3}], line 3\n      x = 2\n"
    )
    cell = kernel.begin("%%ranks --debug 1\nbreakpoint()\ndist.barrier()")
    kernel.client.get_stdin_msg(timeout=30)
    kernel.manager.interrupt_kernel()
    assert f"ranks 0, 2: in barrier, Cell In[{n + 4}], line 3" in kernel.end_of(cell).error
    assert kernel.run("%%ranks\n1").stdout == by_rank("1")
    assert not [each for each in kernel.temporary() if each.startswith("tmp")]


def test_ranks_ask_for_input(kept):
    more = 40_000 * "é"  # more than a pipe holds
    cell = kept.begin("%%ranks --debug 1\nname = input('a name? ')\nname.strip('é'), len(name)")
    answers = []
    for _ in range(3):
        prompt = kept.client.get_stdin_msg(timeout=30)["content"]["prompt"]
        kept.client.input(f"{more}{prompt}")
        answers.append(prompt)
    assert sorted(answers) == [f"[rank {r}] a name? " for r in range(3)]
    assert kept.end_of(cell) == Shown(by_rank("('[rank {r}] a name? ', 40017)"))


# ---- interrupts ---------------------------------------------------------------------------


def test_an_interrupted_cell_is_free_soon_and_tells_each_ranks_line(kept):
    n = number(kept)
    cell = kept.begin(
        "%%ranks\ndist.barrier(); print('begun')\n"
        "if dist.get_rank() == 1:\n    time.sleep(100)\ndist.barrier()"
    )
    kept.wait_for("[rank 0] begun")
    time.sleep(0.3)
    start = time.monotonic()
    kept.manager.interrupt_kernel()
    shown = kept.end_of(cell, timeout=30)
    assert time.monotonic() - start < SOON
    assert (
        shown.traceback
        == shown.error
        == (  # with no line of ours before it
            "KeyboardInterrupt: The ranks were ended. Where they were:\n"
            f"  ranks 0, 2: in barrier, Cell In[{n}], line 5\n      dist.barrier()\n"
            f"  rank 1: at Cell In[{n}], line 4\n      time.sleep(100)"
        )
    )
    assert shown.stdout == by_rank("begun", (1, 2))  # rank 0's was seen above
    assert kept.run("%%ranks\n3 + 3").stdout == by_rank("6")
    assert eventually(lambda: len(kept.alive()) == 6, SOON)  # with forkserver, supervisor


# ---- kernels that end ---------------------------------------------------------------------

CELLS = {
    "%load_ext minidist": Shown(),
    f"%%ranks -n 3\n{IMPORTS}\nrank = dist.get_rank()": Shown(),
    "%%ranks\ntime.sleep(0.05 * (2 - rank))\nprint('one')\nos.system('echo two')\nrank": Shown(
        "".join(f"[rank {r}] one\n[rank {r}] two\n[rank {r}] {r}\n" for r in range(3))
    ),
    "%%ranks\nfor i in range(50): print(i); print(i, file=sys.stderr)": Shown(
        "".join(f"[rank {r}] {i}\n" for r in range(3) for i in range(50)),
        "".join(f"[rank {r}] {i}\n" for r in range(3) for i in range(50)),
    ),
    "r = %ranks\nr.get('rank')": Shown(results=["[0, 1, 2]"]),
    "%%ranks\nif rank == 2: os._exit(0)\ndist.barrier()": Shown(
        error="RankError: rank 2 exited early, with code 0\n\nWhere the other ranks were:\n"
        f"  ranks 0, 1: in barrier, Cell In[6], line 3\n      dist.barrier(){ENDED}{again(2)}"
    ),
    "%%ranks\n'alive'": Shown(by_rank("'alive'")),
}


def check_cells(kernel):
    for source, expected in CELLS.items():
        shown = kernel.run(source)
        shown.traceback = ""
        assert shown == expected


@pytest.fixture
def own_kernel(tmp_path):
    opened = []

    def start(**environ):
        opened.append(Kernel(tmp_path, **environ))
        return opened[-1]

    yield start
    for kernel in opened:
        kernel.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_restarts_show_the_same_each_time_and_leave_nothing(own_kernel):
    kernel = own_kernel()
    for turn in range(12):  # politely and at once, with ranks and without, in turn
        with_ranks = turn % 4 in (0, 3)
        if with_ranks:
            check_cells(kernel)
            # Kernel, forkserver, supervisor, three ranks.
            assert eventually(lambda: len(kernel.alive()) == 6, SOON)
        else:  # restarted while the forkserver still imports torch
            assert kernel.run("%load_ext minidist") == Shown()
        before = set(kernel.alive())
        kernel.restart(now=turn % 2 == 1)
        assert eventually(lambda before=before: not before & set(kernel.alive()), SOON)
        assert kernel.temporary() == []
