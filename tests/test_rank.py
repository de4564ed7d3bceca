"""Lesson: rank. Who a rank is, where it stands, and how it gets there."""

import math
import os
import random
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import minidist as md
from minidist import Link
from minidist import rank as lesson
from minidist.rank import Place

TORCHRUNS_VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
]

# ---- a place in the world -------------------------------------------------------------------


def test_a_rank_is_its_node_times_the_nodes_size_plus_its_local_rank():
    for rank, world_size, nodes, node_rank, local_rank in [
        (0, 1, 1, 0, 0),
        (3, 4, 1, 0, 3),
        (2, 4, 2, 1, 0),
        (5, 6, 3, 2, 1),
    ]:
        place = Place.of(rank, world_size, nodes)
        assert place == Place(rank, world_size, local_rank, world_size // nodes, node_rank)
        assert place.rank == place.node_rank * place.local_world_size + place.local_rank


def test_a_process_that_is_no_rank_is_told_how_to_become_one():
    with pytest.raises(RuntimeError) as raised:
        Place.here({"RANK": "0"})
    assert str(raised.value) == (
        "this process is not a rank: 'WORLD_SIZE' is not in its environment. "
        "Start it by md.launch, md.ranks or torchrun."
    )


# ---- ranks ----------------------------------------------------------------------------------


def test_results_come_in_rank_order_from_a_process_each(pools):
    numbers = pools(4)(lambda: (dist.get_rank(), dist.get_world_size(), os.getpid()))
    assert [n[:2] for n in numbers] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({pid for _, _, pid in numbers} | {os.getpid()}) == 5


def test_arguments_by_position_and_by_name_reach_every_rank(pools):
    def power(base, *, exponent):
        return base ** (exponent + dist.get_rank())

    assert pools(4)(power, 3, exponent=1) == [3, 9, 27, 81]


def test_a_message_goes_round_the_ring(pools):
    def pass_on():
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, others = torch.full((3,), float(rank)), torch.empty(3)
        sending = dist.isend(mine, (rank + 1) % size)
        dist.recv(others, (rank - 1) % size)
        sending.wait()
        return others.tolist()

    assert pools(4)(pass_on) == [[3.0] * 3, [0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_nodes_give_node_rank_and_local_rank_in_torchruns_variables():
    def place():
        return Place.here(), [os.environ[name] for name in TORCHRUNS_VARIABLES]

    assert md.launch(place, world_size=4, nodes=2) == [
        (Place(0, 4, 0, 2, 0), ["0", "4", "0", "2", "0", "2"]),
        (Place(1, 4, 1, 2, 0), ["1", "4", "1", "2", "0", "2"]),
        (Place(2, 4, 0, 2, 1), ["2", "4", "0", "2", "1", "2"]),
        (Place(3, 4, 1, 2, 1), ["3", "4", "1", "2", "1", "2"]),
    ]


def test_a_mesh_has_a_group_for_each_row_and_each_column(pools):
    def sums():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        row, column = torch.tensor([10.0 ** dist.get_rank()]), torch.tensor([0.0])
        column.copy_(row)
        dist.all_reduce(row, group=mesh.get_group("tensor"))
        dist.all_reduce(column, group=mesh.get_group("data"))
        return row.item(), column.item()

    assert pools(4)(sums) == [(11.0, 101.0), (11.0, 1010.0), (1100.0, 101.0), (1100.0, 1010.0)]


def test_ranks_without_a_gpu_each_share_memory(pools):
    if torch.cuda.device_count() >= 4:
        pytest.skip("here four ranks have a GPU each")
    assert pools(4)(lambda: (dist.get_backend(), str(lesson.device()))) == [("shm", "cpu")] * 4


@pytest.mark.gpu
def test_a_rank_with_a_gpu_of_its_own_speaks_nccl_and_for_cpu_tensors_gloo():
    def sums():
        here, there = torch.ones(2), torch.ones(2, device=lesson.device())
        dist.all_reduce(here)
        dist.all_reduce(there)
        return str(there.device), here.tolist(), there.tolist()

    assert md.launch(sums, world_size=1) == [("cuda:0", [1.0, 1.0], [1.0, 1.0])]


def test_a_rank_computes_with_one_thread_unless_told_otherwise(pools):
    def threads():
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert pools(4)(threads) == [(1, "1")] * 4
    assert md.launch(threads, world_size=2, threads=3) == [(3, "3")] * 2


def test_launch_starts_four_ranks_passes_its_arguments_and_returns_every_result():
    def total(first, second):
        x = torch.tensor([float(first + second * dist.get_rank())])
        dist.all_reduce(x)
        return dist.get_rank(), x.item()

    assert md.launch(total, 5, 100) == [(rank, 620.0) for rank in range(4)]


def test_launches_do_not_see_each_other():
    def remember(value):
        import __main__

        before = getattr(__main__, "kept", None)
        __main__.kept = value
        return before

    assert md.launch(remember, 1, world_size=2) == [None, None]
    assert md.launch(remember, 2, world_size=2) == [None, None]


def draw():
    return float(torch.rand(())), np.random.rand(), random.random()


def test_each_rank_of_each_launch_draws_numbers_of_its_own():
    """As processes that are no forks do."""
    drawn = [own for _ in range(2) for own in md.launch(draw, world_size=2)]
    assert len({number for own in drawn for number in own}) == 12


# ---- the timeout ----------------------------------------------------------------------------


def absent(make_group):
    """Rank 1 does something else while rank 0 waits for it."""
    group = make_group()
    if dist.get_rank() == 0:
        dist.barrier(group)
    else:
        while True:
            pass


def default_group():
    return None


def new_group():
    return dist.new_group([0, 1])


def mesh_group():
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")).get_group("tensor")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make_group",
    [
        mesh_group,
        *(pytest.param(each, marks=pytest.mark.soak) for each in (default_group, new_group)),
    ],
)
def test_nobody_waits_longer_than_the_timeout(make_group):
    with pytest.raises(md.RankError) as raised:
        md.launch(absent, make_group, world_size=2, timeout=2)
    told = str(raised.value)
    assert told.startswith("rank 1 did not join barrier within 2 s. It was at ")
    assert "\n  rank 0: in barrier, " in told
    assert raised.value.rank == 1


# ---- numbers that make no sense -------------------------------------------------------------

BAD = [
    ({"world_size": 0}, "world_size must be 1 or more, not 0"),
    ({"world_size": 4, "nodes": 3}, "4 ranks cannot be spread evenly over 3 nodes"),
    ({"world_size": 4, "nodes": 0}, "4 ranks cannot be spread evenly over 0 nodes"),
    ({"world_size": 2, "nodes": 4}, "2 ranks cannot be spread evenly over 4 nodes"),
    *[
        (
            {"world_size": 2, "timeout": seconds},
            f"timeout must be a finite number of seconds above 0, not {seconds}",
        )
        for seconds in (0, math.inf, math.nan)
    ],
    ({"world_size": 2, "threads": 0}, "threads must be 1 or more, not 0"),
]


def test_numbers_that_make_no_sense_are_refused_at_once():
    for options, told in BAD:
        for start in (md.ranks, lambda **options: md.launch(print, **options)):
            with pytest.raises(ValueError) as raised:
                start(**options)
            assert str(raised.value) == told


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="there is no backend 'glue'; there are auto, .*gloo.*"):
        md.ranks(2, backend="glue")


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="colour"):
        md.launch(print, world_size=2, colour="red")


# ---- which backend, which GPUs: without a GPU -----------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Join with so many GPUs as a rank of two: what init_process_group and CUDA were told."""

    def join(gpus, backend="auto", nodes=1, link=None, timeout=7, **options):
        told = {}
        for name, value in (Place.of(1, 2, nodes).environ() | Link.environ(link)).items():
            monkeypatch.setenv(name, value)
        c10d = dist.distributed_c10d
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # join sets them
            monkeypatch.setattr(c10d, name, getattr(c10d, name))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: told.update(gpu=number))
        monkeypatch.setattr(
            dist, "init_process_group", lambda backend, **rest: told.update(rest, backend=backend)
        )
        monkeypatch.setattr(dist, "destroy_process_group", lambda: told.update(left=True))
        with lesson.join(backend, timeout, **options) as progress:
            assert progress() == 0
            assert "left" not in told
        return told

    return join


def test_auto_is_nccl_where_every_rank_has_a_gpu_of_its_own(joined):
    told = joined(gpus=2)
    assert (told["backend"], told["gpu"]) == ("cpu:gloo,cuda:nccl", 1)
    assert (told["rank"], told["world_size"], told["left"]) == (1, 2, True)
    assert told["timeout"] == timedelta(seconds=7)


def test_auto_without_gpus_is_shm_on_one_machine_and_gloo_between_several(joined, tmp_path):
    told = joined(gpus=1)
    assert told["backend"] == "shm" and "gpu" not in told
    assert joined(gpus=2, link=md.Link(1))["backend"] == "shm"  # which emulates it
    assert joined(gpus=0, nodes=2)["backend"] == "gloo"  # under torchrun, nodes are machines
    pool = dist.FileStore(str(tmp_path / "rendezvous"), 2)  # in a pool, they are so in name
    assert joined(gpus=0, nodes=2, store=pool)["backend"] == "shm"


def test_played_nodes_have_no_gpus():
    """Their local ranks would share one."""
    hidden = [lesson._environ(Place.of(3, 4, nodes), 1) for nodes in (1, 2)]
    assert [each.get("CUDA_VISIBLE_DEVICES", "all") == "" for each in hidden] == [False, True]


def test_a_group_that_failed_is_not_destroyed(joined, monkeypatch):
    joined(gpus=0)  # sets the scene
    left = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    with pytest.raises(KeyError), lesson.join():
        raise KeyError
    assert left == []


WRAPPED = """
import atexit
import os
import time
from pathlib import Path

def look():
    time.sleep(0.2)  # the system may not have buried a thread that has ended
    left = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    print(sum("gloo" in name for name in left), flush=True)
    os._exit(0)  # torch's class may hang after this

atexit.register(look)  # the first one registered is called last
import minidist as md
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = WRAP(torch.nn.Linear(2, 2))
    torch.optim.SGD(model.parameters(), lr=0.1)  # imports more of torch
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()

main()
"""
WRAPS = ["md.DistributedDataParallel", "md.FullyShardedDataParallel", "md.fully_shard", "TorchDDP"]


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
@pytest.mark.parametrize("wrap", WRAPS)
def test_gloos_threads_end_before_python(wrap):
    """One that outlives Python now and then aborts the process, after all its work."""
    script = [sys.executable, "-c", WRAPPED.replace("WRAP", wrap)]
    assert subprocess.check_output(script, text=True, timeout=60) == "0\n"
