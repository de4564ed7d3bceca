"""What every strategy takes from the common room, where no strategy's own tests look."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import minidist as md
from minidist.common.groups import groups_of
from minidist.common.norm import clip_grad_norm_


@pytest.fixture(scope="module")
def ranks():
    with md.ranks(4) as pool:
        yield pool


def numbers(*seed):
    """Another gradient for each seed."""
    random = torch.Generator().manual_seed(sum(100**i * each for i, each in enumerate(seed)))
    return torch.randn(3, generator=random, dtype=torch.float64)


def parameter(gradient):
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    return made


def clipped(kind, max_norm):
    """On a mesh of 2 x 2: a parameter of this rank alone, one that the ranks of a row share, one
    without gradient, and one on the first rank only. What differs from one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank, (a, b) = dist.get_rank(), mesh.get_coordinate()
    own, shared, alone = parameter(numbers(rank, 1)), parameter(numbers(a, 2)), []
    without = nn.Parameter(torch.zeros(2))
    if rank == 0:
        alone = [parameter(numbers(7, 3))]
    all_gradients = [numbers(r, 1) for r in range(4)] + [numbers(r, 2) for r in range(2)]
    wanted = nn.utils.get_total_norm([*all_gradients, numbers(7, 3)], kind)
    norm = clip_grad_norm_(
        [own, shared, without, *alone],
        max_norm,
        kind,
        groups=groups_of(None, mesh, "a test", 2),
        device=torch.device("cpu"),
        elsewhere={shared} if b else set(),
    )
    scale = min(1, max_norm / (wanted + 1e-6))
    pairs = [(norm, wanted), (own.grad, scale * numbers(rank, 1))]
    pairs.append((shared.grad, scale * numbers(a, 2)))
    return [i for i, pair in enumerate(pairs) if md.parity.relative_difference(*pair) > 1e-12]


def test_gradients_are_clipped_by_the_norm_of_all_ranks(ranks):
    for kind in 1.0, 2.0, float("inf"):
        for max_norm in 0.5, 1000.0:
            assert ranks(clipped, kind, max_norm) == [[]] * 4, (kind, max_norm)


def told(*arguments):
    try:
        groups_of(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing"


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    last_first = [dist.get_process_group_ranks(g) for g in groups_of(None, mesh, "it", 2)]
    (world,) = groups_of(None, None, "it")
    assert world is dist.group.WORLD
    return last_first, told(world, mesh["a"], "it"), told(None, mesh, "it")


def test_a_group_or_a_mesh(ranks):
    found = ranks(meshes)
    assert [groups for groups, _, _ in found] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert {both for _, both, _ in found} == {"give it a device_mesh or a process_group, not both"}
    words = "it: device_mesh must have one axis, not 2. mesh[name] has one"
    assert {axes for _, _, axes in found} == {words}


# ---- DTensors -----------------------------------------------------------------------------------


def zero(parameters):
    return md.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def averaging(module):
    md.averaging.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.1), 2)


STRATEGIES = {
    "DistributedDataParallel": md.DistributedDataParallel,
    "ZeroRedundancyOptimizer": lambda module: zero(module.parameters()),
    "ShardedDataParallel": lambda module: md.ShardedDataParallel(
        module, zero(p for p in module.parameters() if p.requires_grad)
    ),
    "FullyShardedDataParallel": md.FullyShardedDataParallel,
    "fully_shard": md.fully_shard,
    "Pipeline": lambda module: md.Pipeline(module, 2),
    "MixedParallel": lambda module: md.mixed.MixedParallel(module, md.mixed.mesh(data=4), 2),
    "LocalSGD": averaging,
}


def test_dtensors_are_refused_in_one_line(ranks):
    """Torch's own strategies take them. Here one would be averaged or cut as if it were whole. One
    is frozen, so that no optimizer of the others has it."""

    def wrap(name):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (4,))
        whole = distribute_tensor(module[2].bias.data, mesh, [Replicate()])
        module[2].bias = nn.Parameter(whole, requires_grad=name != "ShardedDataParallel")
        try:
            STRATEGIES[name](module)
        except TypeError as error:
            return str(error)

    for name in STRATEGIES:
        for told in ranks(wrap, name):
            assert told is not None and " is a DTensor" in told and "\n" not in told, name
            assert "2.bias" in told or "parameter 5 " in told, (name, told)
