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


def parameter(*seed):
    """Another gradient for each seed."""
    random = torch.Generator().manual_seed(sum(100**i * each for i, each in enumerate(seed)))
    made = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    made.grad = torch.randn(3, generator=random, dtype=torch.float64)
    return made


def clipped(kind, max_norm):
    """On a mesh of 2 x 2: a parameter of this rank alone, one that the ranks of a row share, one
    without gradient, and one on the first rank only. How far from one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank, (a, b) = dist.get_rank(), mesh.get_coordinate()
    own, shared = parameter(rank, 1), parameter(a, 2)
    every = [parameter(r, 1) for r in range(4)] + [parameter(r, 2) for r in range(2)]
    wanted = nn.utils.clip_grad_norm_([*every, parameter(7, 3)], max_norm, kind)
    norm = clip_grad_norm_(
        [own, shared, nn.Parameter(torch.zeros(2)), *([parameter(7, 3)] if rank == 0 else [])],
        max_norm,
        kind,
        groups=groups_of(None, mesh, "a test", 2),
        device=torch.device("cpu"),
        elsewhere={shared} if b else set(),
    )
    pairs = (norm, wanted), (own.grad, every[rank].grad), (shared.grad, every[4 + a].grad)
    return max(md.parity.relative_difference(*pair) for pair in pairs)


def test_gradients_are_clipped_by_the_norm_of_all_ranks(ranks):
    for kind in 1.0, 2.0, float("inf"):
        for max_norm in 0.5, 1000.0:
            assert max(ranks(clipped, kind, max_norm)) < 1e-12, (kind, max_norm)


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="a device_mesh or a process_group, not both"):
        groups_of(dist.group.WORLD, mesh["a"], "it")
    with pytest.raises(ValueError, match="it: device_mesh must have one axis, not 2"):
        groups_of(None, mesh, "it")
    return [dist.get_process_group_ranks(group) for group in groups_of(None, mesh, "it", 2)]


def test_a_group_or_a_mesh(ranks):
    last_first = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert ranks(meshes) == last_first


def zero(module):
    return md.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)


def mixed(module):
    return md.mixed.MixedParallel(module, md.mixed.mesh(data=4), 2)


@pytest.mark.parametrize(
    "strategy", [md.DistributedDataParallel, zero, md.FullyShardedDataParallel, mixed]
)
def test_dtensors_are_refused(ranks, strategy):
    """Torch's own strategies take them. Here one would be averaged or cut as if it were whole."""

    def wrap():
        module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        mesh = init_device_mesh("cpu", (4,))
        module[2].bias = nn.Parameter(distribute_tensor(module[2].bias, mesh, [Replicate()]))
        with pytest.raises(TypeError, match=r"(2\.bias|parameter 5).* is a DTensor"):
            strategy(module)

    ranks(wrap)
