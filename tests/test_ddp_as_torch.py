"""DistributedDataParallel takes the place of torch's: its arguments, and a loop of which one name
changes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel

import minidist as md

OURS = md.DistributedDataParallel


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


def smooth(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def share(rank, step=0):
    """Other examples on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator)


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def far_from_one_process(ddp, plain, step=0):
    """The largest difference between the gradients of a step and those of one process."""
    ddp.zero_grad()
    ddp(share(dist.get_rank(), step)).pow(2).sum().backward()
    plain.zero_grad()
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (plain(share(rank, step)).pow(2).sum() / ranks).backward()
    pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)


# ---- arguments --------------------------------------------------------------------------------


ACCEPTED = {
    "the device by its number": lambda module: OURS(module, [dist.get_rank()]),
    "the device by its name": lambda module: OURS(module, ["cpu"], "cpu"),
    "bucket_cap_mb": lambda module: OURS(module, bucket_cap_mb=None),
    "views": lambda module: OURS(module, gradient_as_bucket_view=True),
    "static_graph": lambda module: OURS(module, static_graph=True),
    "buffers": lambda module: OURS(module, broadcast_buffers=False),
}


def test_it_trains_with_torchs_arguments(pools):
    def train(make):
        ddp, plain = make(smooth()), smooth()
        return max(far_from_one_process(ddp, plain, step) for step in range(3))

    for what, make in ACCEPTED.items():
        assert max(pools(2)(train, make)) < 1e-12, what


@pytest.mark.gpu(1)
def test_inputs_are_moved_to_the_device_that_is_named():
    def train():
        ddp = OURS(smooth().cuda(), device_ids=[0])
        return ddp(share(0)).device.type, OURS(smooth().cuda())(share(0).cuda()).device.type

    assert md.launch(train, world_size=1) == [("cuda", "cuda")]


def test_a_rank_has_one_device(pools):
    for told in pools(2)(raised, OURS, smooth(), [0, 1]):
        assert told == (
            "ValueError",
            "device_ids=[0, 1]: a rank has one device. Start a rank for each",
        )


def test_what_travels_at_construction_and_before_the_first_pass(pools):
    def begin(options):
        module = net(seed=dist.get_rank())
        module[1].running_mean += dist.get_rank()
        ddp = OURS(module, **options)
        begun = module[0].weight.sum().item(), module[1].running_mean.sum().item()
        module[1].running_mean += 5 * (1 - dist.get_rank())  # rank 0 changes them once more
        module.eval()  # so that the pass itself changes none
        ddp(share(0))
        return *begun, module[1].running_mean.sum().item()

    for options, travel in (
        ({"broadcast_buffers": False}, (True, True, False)),
        ({}, (True, True, True)),
    ):
        first, second = pools(2)(begin, options)
        assert tuple(map(float.__eq__, first, second)) == travel, options


def test_torchs_names_of_what_is_left_out(pools):
    """Such as experts, of which each rank has others."""

    def train():
        rank, module = dist.get_rank(), net()
        module[3] = nn.Linear(5, 2 + rank).double()
        TorchDDP._set_params_and_buffers_to_ignore_for_model(
            module, ["3.weight", "3.bias", "1.running_mean"]
        )
        module[1].running_mean += rank
        ddp = OURS(module)
        ddp(share(rank)).sum().backward()
        shapes = [tuple(p.grad.shape) for p in module[3].parameters()]
        return module[0].weight.grad, shapes, module[1].running_mean.sum().item()

    (first, shapes, mean), (second, others, other_mean) = pools(2)(train)
    assert torch.equal(first, second) and mean != other_mean
    assert shapes == [(2, 5), (2,)] and others == [(3, 5), (3,)]


# ---- a loop -------------------------------------------------------------------------------------


def test_a_loop_with_the_name_of_the_class_changed(pools):
    """It takes a checkpoint of torch's class, accumulates by torch's attribute, clips, averages
    weights in a copy and by torch's AveragedModel, and evaluates."""
    start = {f"module.{name}": value for name, value in smooth(seed=7).state_dict().items()}

    def train(wrap):
        rank = dist.get_rank()
        model = wrap(smooth(seed=rank), device_ids=None)
        model.load_state_dict(start)
        average, ema = AveragedModel(model), copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(2):
                model.require_backward_grad_sync = micro == 1
                (model(share(rank, 2 * step + micro)).pow(2).mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            average.update_parameters(model)
            for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                old.lerp_(new.detach(), 0.2)
        with torch.no_grad():
            made = [each.eval()(share(9)) for each in (model, average, ema)]
        return made, model.module.state_dict()

    for (made, state), (wanted, theirs) in zip(
        pools(2)(train, OURS), pools(2)(train, TorchDDP), strict=True
    ):
        assert not torch.equal(wanted[0], wanted[1]) and list(state) == list(theirs)
        for found, right in zip([*made, *state.values()], [*wanted, *theirs.values()], strict=True):
            assert md.parity.relative_difference(found, right) < 1e-12
