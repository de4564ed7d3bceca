"""The benchmarks measure what they say. How fast anything is, is no test's business."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import minidist as md
from minidist import __main__, bench
from minidist.bench import (
    NAMES,
    Noise,
    Row,
    Target,
    Times,
    alone,
    averaging,
    bare,
    collectives,
    ddp,
    fsdp,
    in_turns,
    litmus,
    mpich,
    pipeline,
    quiet,
    saving,
    served,
    shared,
    show,
    tasks,
    tensor,
    training,
    turns,
    zero,
)
from minidist.bench.rows import noise


@pytest.fixture
def watched():
    """For a test in which moments are judged as they are."""


def look_nowhere():
    quiet.PROC = Path("nowhere")


@pytest.fixture(autouse=True)
def unwatched(request, monkeypatch):
    """In all other tests the machine does not say what other processes take, here and on ranks:
    to wait until they take less takes longest."""
    if not {"watched", "shares"} & set(request.fixturenames):
        start = md.ranks

        def ranks(*args, **options):
            pool = start(*args, **options)
            pool(look_nowhere)
            return pool

        monkeypatch.setattr(md, "ranks", ranks)
        monkeypatch.setattr(quiet, "PROC", Path("nowhere"))


# ---- moments in which others take the machine ---------------------------------------------


class Calls(list):
    """Subjects that write down their calls and return how many there were."""

    def __call__(self, name):
        self.append(name)
        return float(len(self))

    def subjects(self, names="ab"):
        return {name: functools.partial(self, name) for name in names}


@pytest.fixture
def shares(monkeypatch):
    """What others take in each moment, one after the other; then nothing."""
    left = []

    class Moment:
        def __init__(self, root):
            pass

        def share(self):
            return left.pop(0) if left else 0.0

    monkeypatch.setattr(turns, "Moment", Moment)
    return left


def burn(seconds):
    """Processor time, whatever the machine does beside."""
    start = time.process_time()
    while time.process_time() < start + seconds:
        pass


BURN = "import time\nwhile time.process_time() < {}: pass"


def test_subjects_are_timed_in_turns(shares):
    calls = Calls()
    assert in_turns(calls.subjects(), 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")


def test_the_first_rounds_do_not_count(shares):
    assert in_turns(Calls().subjects(), 2, warm=2) == {"a": [5, 7], "b": [6, 8]}


def test_rounds_in_which_others_compute_are_thrown_away_and_taken_again(shares):
    shares += [0.0, 0.2, turns.LIMIT]  # one round, then the two others together
    taken, calls = Calls(), Calls()
    times = in_turns(taken.subjects(), 3)
    assert times == {"a": [1, 7, 9], "b": [2, 8, 10]}
    assert (times.noise.thrown, times.noise.kept) == (2, 0)
    shares += [0.2] * 99
    times = in_turns(calls.subjects(), 1)
    assert times.noise.thrown == turns.PATIENCE // quiet.MOMENT
    assert times == {"a": [2 * times.noise.thrown + 1], "b": [len(calls)]}
    assert times.noise.kept == 1 and len(calls) == 2 * times.noise.thrown + 2


def test_a_busy_process_is_seen_and_its_rounds_are_counted(watched, capsys):
    hogs = []
    script = f"import os\nif pid := os.fork(): print(pid, flush=True); os._exit(0)\n{BURN}"
    try:
        for _ in range(os.cpu_count()):  # each is nobody's child, and would end by itself
            command = [sys.executable, "-c", script.format(60)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            hogs.append(int(process.stdout.readline()))
            process.stdout.close()
            assert process.wait() == 0
        times = in_turns({"a nap": lambda: time.sleep(0.05) or 0.05}, rounds=3)
    finally:
        for hog in hogs:
            os.kill(hog, signal.SIGKILL)
    assert times == {"a nap": [0.05] * 3}
    assert times.noise.thrown >= 1 and times.noise.kept >= 1
    show("naps", [times.row("a nap", "a nap", "a nap")])
    said = f"took part of the machine: {times.noise.thrown}; kept all the same: {times.noise.kept}"
    assert said in capsys.readouterr().out


@pytest.mark.alone(always_judged=True)  # by this it is known whether others were busy
def test_what_our_own_processes_take_is_not_others(watched):
    if not Path("/proc/stat").exists():
        pytest.skip("needs /proc")
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # In one moment: to us and our children it is ours; to a stranger it is others'.
        moments = quiet.Moment(os.getpid()), quiet.Moment(stranger.pid)
        ended = subprocess.Popen([sys.executable, "-c", BURN.format(0.3)])
        lives = subprocess.Popen(
            [sys.executable, "-c", BURN.format(0.3) + "\nprint(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        burn(0.2)
        assert ended.wait() == 0 and lives.stdout.readline()
        before = moments[0].lasted()
        ours, theirs = (moment.share() for moment in moments)
        after = moments[0].lasted()
        lives.communicate(b"\n")
    finally:
        stranger.communicate(b"\n")
    most, least = (0.8 / (max(each, quiet.MOMENT) * os.cpu_count()) for each in (before, after))
    assert 0 <= ours <= 1 and 0.8 * least < theirs - ours < 1.6 * most


def test_a_machine_that_does_not_say_throws_nothing_away(monkeypatch, tmp_path, capsys):
    for there in (tmp_path / "no such folder", tmp_path):  # macOS; a sandbox that shows zeros
        (tmp_path / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
        monkeypatch.setattr(quiet, "PROC", there)
        assert quiet.Moment(os.getpid()).share() == quiet.UNKNOWN
        times = in_turns(Calls().subjects(), 3)
        assert len(times["a"]) == 3 and not times.noise.watched and not times.noise.thrown
        row = times.row("a", "a", "b")
        show("a table", [row])
        assert "nothing was thrown away: this machine does not say" in capsys.readouterr().out
        assert row.record()["rounds thrown away"] is None


def test_ranks_agree_on_times_and_on_what_is_thrown_away(watched):
    def on_rank(root):
        import torch.distributed as dist

        def subject():
            burn(0.1)
            return float(dist.get_rank())

        return in_turns({"a": subject}, 3, root=root)

    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:  # to the stranger's family, the ranks themselves are the others
        found = md.launch(on_rank, stranger.pid, world_size=2)
    finally:
        stranger.communicate(b"\n")
    assert [dict(times) for times in found] == [{"a": [1.0] * 3}] * 2  # the slowest rank's
    assert found[0].noise.thrown == found[1].noise.thrown
    if Path("/proc/stat").exists():
        assert found[0].noise.thrown >= 1


def test_each_alone_is_timed_in_blocks(shares):
    asked = []

    def program(name):
        def run(rounds):
            asked.append((name, rounds))
            return Times({name: [1.0] * rounds}, Noise(thrown=1))

        return run

    times = alone({name: program(name) for name in "ab"}, 5)
    assert asked == [("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert times == {"a": [1.0] * 5, "b": [1.0] * 5} and times.noise.thrown == 4
    assert alone({"a": program("a")}, 1) == {"a": [1.0]}


def test_a_program_is_started_again_if_others_computed_meanwhile(shares):
    shares += [0.5]
    calls = Calls()
    times = turns.by_program(lambda: [calls("x")] * 4, "x")
    assert times == {"x": [2.0] * 4} and times.noise.thrown == 4 and not times.noise.kept
    shares += [0.5] * turns.TRIES
    times = turns.by_program(lambda: [calls("x")] * 4, "x")
    assert times.noise.thrown == 4 * (turns.TRIES - 1) and times.noise.kept == 4


# ---- rows, targets, and the file -----------------------------------------------------------


def test_the_noise_of_a_measurement_counts_once():
    times = Times({"a": [1.0], "b": [2.0]}, Noise(thrown=3, kept=1))
    total = noise([times.row("x", "a", "b"), times.row("y", "b", "a"), Row("z", [1.0])])
    assert (total.thrown, total.kept, total.watched) == (3, 1, True)


def test_how_a_target_stands():
    rows = [Row("a", [1.0, 1.0, 1.0], "gloo", (2.0, 3.0, 9.0)), Row("b", [1.0], "gloo", (1.0,))]
    reach = {("a", "gloo"): 3.0}
    assert Target("t", reach).line(rows) == "met          t: 3 × (reach 3 ×)"
    assert Target("t", reach | {("b", "gloo"): 1.5}).stands(rows) == "missed"
    assert Target("t", reach | {("a", "MPICH"): 1}).stands(rows) == "not measured"
    some = Target("t", {("a", "MPICH"): 1, ("b", "gloo"): 1.5})
    assert some.line(rows) == "missed       t: – / 1 × (reach 1 / 1.5 ×)"


def test_every_target_is_of_a_row_that_is_measured(monkeypatch, pools, tmp_path):
    def times(*names):
        return Times({name: [2.0] for name in names})

    monkeypatch.setattr(shared, "on", lambda pool, name, size, hows, rounds: times(*hows))
    monkeypatch.setattr(shared, "_bare", lambda size, rounds: times(shared.BARE))
    monkeypatch.setattr(shared, "_mpich", lambda *_: times(shared.MPICH))
    rows = shared.rows(2, 1, with_mpich=True)
    monkeypatch.setattr(training, "peaks", lambda pool, ways, _: {})
    for module in (ddp, pipeline, tensor, fsdp):
        monkeypatch.setattr(module, "measure", lambda pool, ways, *_: times(*ways))
        monkeypatch.setattr(module, "WORLD_SIZES", [2, 4] if module is fsdp else [2])
        rows += module.run(1, tmp_path / "picture.png")
    targets = [t for m in (collectives, ddp, pipeline, tensor, fsdp) for t in m.TARGETS]
    assert len(targets) == 12
    for target in targets:
        assert None not in target.measured(rows), target.name


def test_all_figures_go_into_a_file(monkeypatch, tmp_path, capsys):
    times = Times({"ours": [1.0, 3.0, 2.0], "theirs": [2.0, 3.0, 8.0]}, Noise(thrown=5))
    monkeypatch.setattr(ddp, "run", lambda rounds, picture: [times.row("x", "ours", "theirs")])
    monkeypatch.setattr(ddp, "TARGETS", [Target("fast", {("x", "theirs"): 2.5})])
    bench.run(["ddp"], 3, tmp_path, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    (row,) = found["benchmarks"]["ddp"]
    assert row["seconds"] == {"median": 2.0, "min": 1.0, "max": 3.0, "all": [1.0, 3.0, 2.0]}
    assert row["against"]["what"] == "theirs" and row["against"]["seconds"]["median"] == 3.0
    assert row["times faster"] == {"median": 2.0, "min": 1.0, "max": 4.0, "all": [2.0, 1.0, 4.0]}
    assert row["rounds thrown away"] == 5 and row["noisy rounds kept"] == 0
    (target,) = found["targets"]
    assert target["stands"] == "missed"
    case = {"what": "x", "against": "theirs", "reach": 2.5, "measured": 2.0}
    assert target["cases"] == [case]
    assert set(found["machine"]) == {"cores", "processor", "platform", "python", "torch"}
    assert "missed       fast: 2 × (reach 2.5 ×)" in capsys.readouterr().out


def test_every_way_of_averaging_is_timed_and_trains(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(averaging, "RANKS", 2)
    monkeypatch.setattr(averaging, "STEPS", 48)
    monkeypatch.setattr(averaging, "LINKS", {"fast": md.Link(gbps=100)})
    rows = averaging.run(1, tmp_path / "picture.png")
    ways = [*averaging.WAYS, *served.SERVERS]
    others = [f"{task}, fast link: {way}" for task in tasks.TASKS for way in ways if way != "DDP"]
    assert [row.what for row in rows] == others
    assert {row.against for row in rows} == {"DDP"} and (tmp_path / "picture.png").exists()
    tables = [each.splitlines()[1:] for each in capsys.readouterr().out.split("bytes a step")[1:]]
    for (task, lines), untrained in zip(
        zip(tasks.TASKS.values(), tables, strict=True), (2.4, 5.6), strict=True
    ):
        table = lines[: len(ways)]
        found = {line[:26].strip(): line[26:].replace(",", "").split() for line in table}
        assert list(found) == ways
        nbytes = {way: float(each[0]) for way, each in found.items()}
        assert nbytes["DDP"] == nbytes["gossip, every step"] == 4 * task.parameters()
        for period in 2, 4, 8, 16:
            rarely = nbytes[f"local SGD, every {period}"]
            assert rarely == pytest.approx(nbytes["DDP"] / period, abs=1)
        assert nbytes["DiLoCo, every 16"] == nbytes["streaming DiLoCo, every 16"]
        assert nbytes["1 bit"] < nbytes["PowerSGD, rank 2"] < nbytes["int8"] < nbytes["DDP"] / 3.9
        for way in served.SERVERS:  # the weights, for each of two trainers
            assert nbytes[way] == 2 * 4 * task.parameters()
        losses = {way: float(each[-1]) for way, each in found.items()}
        assert all(0 < loss < untrained for loss in losses.values())  # log 10, log 256
        assert losses["server, synchronous"] == pytest.approx(losses["DDP"], abs=0.002)


def test_a_server_that_steps_for_each_trainer_has_a_share_of_the_learning_rate(monkeypatch):
    def rate(model, optimizer, loop, **options):
        return optimizer([torch.ones(1, requires_grad=True)]).param_groups[0]["lr"]

    monkeypatch.setattr(md.parameter_server, "train", rate)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1 + 4)
    found = [served.train_here(tasks.TASKS["digits"], each, 1) for each in served.SERVERS.values()]
    assert found == [tasks.RATE, tasks.RATE / 4, tasks.RATE / 4]


def test_a_served_trainer_takes_the_time_of_its_messages():
    link, task = md.Link(gbps=100, latency_us=30_000), tasks.TASKS["digits"]
    with md.ranks(3, link=link) as ranks:
        seconds = served.measure(ranks, task, 1)
    assert all(min(each) > 2 * 0.03 for each in seconds.values())


def test_a_ratio_is_that_of_each_pair(capsys):
    row = Row("ours", [1.0, 2.0], "theirs", (2.0, 1.0))
    assert row.ratios == [2.0, 0.5] and Row("alone", [1.0]).ratios == []
    show("a table", [row])
    assert "1.25× (0.5–2)" in capsys.readouterr().out


def test_every_kind_of_ddp_is_timed(pools):
    taken = ddp.measure(pools(2), ddp.WRAPPERS, batch=2, rounds=3, sizes=(4, 3, 2))
    assert list(taken) == list(ddp.WRAPPERS)
    assert {ours for pair in ddp.PAIRS for ours in pair} == set(ddp.WRAPPERS)
    for seconds in taken.values():
        assert len(seconds) == 3 and min(seconds) > 0


def text(rows):
    return functools.partial(training.text, rows, pipeline.LENGTH)


@pytest.mark.parametrize("schedule", pipeline.PAIRS)
def test_every_pipeline_is_timed_and_trains_the_same_model(pools, schedule):
    ways = pipeline.ways(schedule, layers=2, width=8)
    taken = training.measure(pools(2), ways, rounds=2, batch=text(8))
    assert list(taken) == ["minidist, gloo", "torch, gloo", "minidist, shm", "torch, shm"]
    for seconds in taken.values():
        assert len(seconds) == 2 and min(seconds) > 0


def test_every_tensor_parallel_step_is_timed_and_trains_the_same_model(pools):
    ways = tensor.ways(layers=1, width=8)
    taken = training.measure(pools(2), ways, rounds=2, batch=text(2))
    assert len(taken) == 8 and {len(seconds) for seconds in taken.values()} == {2}
    for kind in tensor.KINDS:
        assert {
            f"{who}, {there}{kind}" for who in ("minidist", "torch") for there in tensor.BACKENDS
        } < set(taken)


@pytest.mark.parametrize("module", [zero, fsdp])
def test_every_sharded_step_is_timed_and_trains_the_same_model(pools, module):
    sizes = (6, 8, 8, 4)
    ways = training.on_each_backend(module.STRATEGIES, sizes)
    batch = functools.partial(training.vectors, 3, 6, 4)
    taken = training.measure(pools(2), ways, rounds=2, batch=batch)
    assert list(taken) == [f"{s}, {b}" for s in module.STRATEGIES for b in module.BACKENDS]
    assert {len(seconds) for seconds in taken.values()} == {2}
    # parameters, gradients and two states of float32: all of them, or half
    whole = 16 * sum((n + 1) * m for n, m in zip(sizes, sizes[1:], strict=False))
    for name, peak in training.peaks(pools(2), ways, batch).items():
        assert peak > (whole if "DDP" in name else whole / 2), name


def test_a_step_that_trains_another_model_is_told(pools):
    def trainer(loss):
        return training.Trainer([], lambda inputs, targets: loss)

    def ways(**losses):
        return {name: functools.partial(trainer, loss) for name, loss in losses.items()}

    measure = functools.partial(training.measure, pools(2), rounds=1, batch=text(1))
    assert list(measure(ways(a=2.0, b=2.00001))) == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"b comes to a loss of 2.001, and a to 2.0"):
        measure(ways(a=2.0, b=2.001))
    with pytest.raises(RuntimeError, match="b comes to a loss of nan, and a to 2.0"):
        measure(ways(a=2.0, b=float("nan")))
    with pytest.raises(RuntimeError, match="no rank knows the loss of b"):
        measure(ways(a=2.0, b=None))


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_a_table_and_a_picture_of_steps(monkeypatch, tmp_path, capsys, name):
    module = {"pipeline": pipeline, "tensor": tensor}[name]
    monkeypatch.setattr(module, "measure", lambda pool, ways, *_: Times(dict.fromkeys(ways, [2.0])))
    monkeypatch.setattr(module, "WORLD_SIZES", [1])
    bench.run([name], 1, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    cases = len(pipeline.PAIRS) if name == "pipeline" else len(tensor.KINDS)
    for there, count in {"torch, gloo": 2, "torch, shm": 1}.items():
        assert sum(there in line for line in lines) == count * cases
    assert (tmp_path / f"bench_{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("module", [zero, fsdp])
def test_a_table_and_a_picture_of_sharded_steps(monkeypatch, tmp_path, capsys, module):
    monkeypatch.setattr(module, "measure", lambda pool, ways, *_: Times(dict.fromkeys(ways, [2.0])))
    monkeypatch.setattr(training, "peaks", lambda pool, ways, _: dict.fromkeys(ways, 12345))
    monkeypatch.setattr(module, "WORLD_SIZES", [1])
    name = module.__name__.rpartition(".")[2]
    bench.run([name], 1, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert sum("12,345" in line for line in lines) == len(module.STRATEGIES)
    rows = {zero: 2 * 2 * 2 * 2, fsdp: 2 * (2 + 4)}[module]
    assert sum("1× (1–1)" in line for line in lines) == rows
    assert (tmp_path / f"bench_{name}.png").stat().st_size > 1000


def test_a_save_is_timed_until_training_goes_on_and_until_it_is_whole(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(saving, "BYTES", 4 * 10**6)
    monkeypatch.setattr(saving, "WORLD_SIZES", [2])
    bench.run(["saving"], 2, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert sum(saving.STALL in line and saving.WHOLE in line for line in lines) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["bench_saving.png"]
    assert (tmp_path / "bench_saving.png").stat().st_size > 1000


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_is_timed_beside_gloo_in_turns_and_alone(monkeypatch, world_size):
    cases = {name: [size and 12000 for size in sizes[:1]] for name, sizes in shared.CASES.items()}
    if world_size == 3:
        cases = {name: cases[name] for name in ("send/recv", "barrier", "reduce_scatter")}
    monkeypatch.setattr(shared, "CASES", cases)
    rows = shared.rows(world_size, rounds=1)
    for name, (size,) in cases.items():
        if name == "send/recv" and world_size == 3:
            continue  # it is between two
        what = shared.case(name, world_size, size)
        hows = ["shm"] if name in shared.SMALL else ["shm", "shm in its arena"]
        expected = [f"{what}: {how}, {mode}" for mode in ("in turns", "alone") for how in hows]
        assert [row.what for row in rows if row.what.startswith(f"{what}: ")] == expected
    for row in rows:
        assert row.against == "gloo"
        assert len(row.seconds) == len(row.theirs) == 1 and min(row.seconds) > 0
    assert "send/recv, 3 ranks" not in str(rows)


def test_bare_processes_are_timed_and_come_to_the_sum():
    taken = bare.seconds(9 * 10**6, rounds=3)  # two pieces and a bit
    assert len(taken) == 3 and min(taken) > 0
    with pytest.raises(RuntimeError, match="two bare processes: "):
        bare.seconds(-4, rounds=1)


def test_a_bare_process_whose_other_one_is_killed_ends():
    command = [sys.executable, bare.__file__, "100000000", "987654", "1", str(1 << 22)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(there := _group(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()  # the first; the second sees it
        process.wait()
    deadline = time.monotonic() + 30
    try:
        while there := _group(process.pid):
            assert time.monotonic() < deadline, there
            time.sleep(0.05)
    finally:
        for pid in there:
            os.kill(int(pid), signal.SIGKILL)


def _group(leader):
    """The processes of a group that are not dead."""
    said = subprocess.check_output(["ps", "-A", "-o", "pgid=,stat=,pid="], text=True)
    lines = [line.split() for line in said.splitlines()]
    return [pid for pgid, state, pid in lines if int(pgid) == leader and "Z" not in state]


def test_a_check_is_a_part_of_its_call():
    row = collectives.by_checking(2, rounds=2)
    assert len(row.seconds) == len(row.theirs) == 4
    assert 0 < min(row.seconds) < max(row.theirs)


# ---- MPICH, where it is installed ---------------------------------------------------------


def test_without_mpi4py_the_bench_says_so_and_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(collectives, "SIZES", [64, 128])
    monkeypatch.setattr(shared, "CASES", {"all_reduce": [16000]})
    collectives.run(1, tmp_path / "picture.png")
    said = [line for line in capsys.readouterr().out.splitlines() if "MPICH" in line]
    (line,) = said
    assert line.startswith("MPICH is left out: mpi4py is not installed") and ".[mpi]" in line


@pytest.mark.parametrize("name", [name for name in shared.CASES if name not in shared.SMALL])
@pytest.mark.parametrize("world_size", [2, 4])
def test_mpich_is_timed(name, world_size):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    taken = mpich.seconds(name, world_size, 16000, rounds=3)
    assert len(taken) == 3 and min(taken) > 0


def test_a_rank_of_mpich_that_raises_is_quoted(monkeypatch):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    with pytest.raises(RuntimeError, match="mpiexec ended with 1: KeyError: 'no_such'"):
        mpich.seconds("no_such", 2, 16000, rounds=1)


def test_mpich_ends_at_the_limit_and_leaves_nothing(monkeypatch):
    if lacking := mpich.missing():
        pytest.skip(lacking)
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    monkeypatch.setattr(mpich, "LIMIT", 2)
    with pytest.raises(RuntimeError, match="mpiexec took longer than 2 s"):
        mpich.seconds("all_reduce", 2, 10**6, rounds=987654321)  # a number to know it by
    deadline = time.monotonic() + 4  # before mpiexec's own limit
    while "987654321" in (there := subprocess.check_output(["ps", "-A", "-o", "args"], text=True)):
        assert time.monotonic() < deadline, there
        time.sleep(0.1)
    assert set(Path("/dev/shm").glob("mpich_shm_*")) <= before


def times(**changed):
    return json.dumps({"library": "MPICH", "ranks": 2, "seconds": [0.5, 2]} | changed)


def test_times_of_mpich_are_read_from_among_other_lines():
    assert mpich.parse(f"a warning\n{times()}\n", 2, 2) == [0.5, 2.0]


@pytest.mark.parametrize(
    ("printed", "complaint"),
    [
        ("a warning", "no times came back"),
        (times(library="Open MPI"), "mpi4py runs on Open MPI here, not on MPICH"),
        (f"{times(ranks=1)}\n{times(ranks=1)}", "2 ranks were started, and 1 met"),
    ],
)
def test_what_is_not_a_time_of_mpich_is_refused(printed, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        mpich.parse(printed, 2, 2)


def test_a_failure_of_mpich_leaves_the_rest_of_the_table(monkeypatch, tmp_path, capsys):
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 3\n")
    mpiexec.chmod(0o755)
    monkeypatch.setattr(mpich, "_mpiexec", lambda: str(mpiexec))
    monkeypatch.setattr(shared, "CASES", {"all_gather": [12000, 24000]})
    rows = shared.rows(2, rounds=1, with_mpich=True)
    assert [row.against for row in rows] == ["gloo"] * 8
    said = (
        "MPICH is left out from all_gather, 2 ranks, 12 kB on: mpiexec ended with 3: no such host\n"
    )
    assert capsys.readouterr().out == said


def test_mpich_stands_beside_gloo(monkeypatch):
    monkeypatch.setattr(mpich, "seconds", lambda name, world_size, size, rounds: [1.0] * rounds)
    monkeypatch.setattr(shared, "CASES", {"all_gather": [12000]})
    rows = shared.rows(2, rounds=1, with_mpich=True)
    what = "all_gather, 2 ranks, 12 kB: shm"
    assert [(row.against, row.what) for row in rows] == [
        ("gloo", f"{what}, in turns"),
        ("gloo", f"{what} in its arena, in turns"),
        ("gloo", f"{what}, alone"),
        ("MPICH", f"{what}, alone"),
        ("gloo", f"{what} in its arena, alone"),
        ("MPICH", f"{what} in its arena, alone"),
    ]
    assert rows[3].theirs == (1.0,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["speed"], f"there is no benchmark speed; there are {', '.join(NAMES)}"),
        (["ddp", "--rounds", "0"], "--rounds must be 1 or more"),
        (["ddp", "--out", "no/such/folder"], "no such folder"),
        (["ddp", "--json", "no/such/file"], "--json no/such/file: no file can be written there"),
        (["ddp", "--json", "."], "--json .: no file can be written there"),
    ],
)
def test_the_command_says_what_it_cannot_do(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minidist", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_the_help_says_what_each_benchmark_is():
    command = [sys.executable, "-m", "minidist", "bench", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
    for name in NAMES:
        (line,) = [line for line in said.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.split()) > 5


# ---- the litmus test ------------------------------------------------------------------------


def test_no_message_is_torn_or_early(pools):
    seconds, torn, early = litmus.measure(pools(2), 5_000, rounds=2)
    assert (torn, early) == (0, 0) and len(seconds) == 2 and min(seconds) > 0


@pytest.mark.parametrize("before", [0, 512])
def test_the_litmus_test_sees_a_flag_that_is_published_too_early(pools, before):
    def flag_first(words, room, number):
        text = litmus.message(number)
        room[:before] = text[:before]
        words[litmus.POSTED] = number
        time.sleep(0)  # the other rank may come first
        room[before:] = text[before:]

    _, torn, early = litmus.measure(pools(2), 5_000, 2, flag_first)
    assert torn + early > 0
    if before:
        assert torn > 0 and early == 0


def test_algorithms_are_timed_by_size(pools):
    samples = collectives.measure(pools(2), [16, 64], ["shm", "ring"], 3)
    for name in "shm", "ring":
        assert [size for size, _ in samples[name]] == [16] * 3 + [64] * 3
        assert all(seconds > 0 for _, seconds in samples[name])
