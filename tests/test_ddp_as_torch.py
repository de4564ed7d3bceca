"""DistributedDataParallel takes the place of torch's: its arguments, its copies, its checkpoints,
and a script of which one line changes."""

import copy
import inspect
import io
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from agents import FAR
from programs import Family
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

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


def test_the_arguments_are_torchs_in_torchs_order():
    ours, theirs = (list(inspect.signature(kind).parameters) for kind in (OURS, TorchDDP))
    assert ours[: len(theirs)] == theirs


ACCEPTED = {
    "the device by its number": lambda module: OURS(module, [dist.get_rank()]),
    "the device by its name": lambda module: OURS(module, ["cpu"], "cpu"),
    "a number for the output": lambda module: OURS(module, device_ids=(1,), output_device=1),
    "no device": lambda module: OURS(module, None, None, 0, True, True, None, 25, False, False),
    "no devices": lambda module: OURS(module, device_ids=[]),
    "bucket_cap_mb": lambda module: OURS(module, bucket_cap_mb=None),
    "views": lambda module: OURS(module, gradient_as_bucket_view=True, batched_grad_copy=True),
    "static_graph": lambda module: OURS(module, static_graph=True),
    "init_sync": lambda module: OURS(module, init_sync=False),
    "a mesh": lambda module: OURS(module, device_mesh=init_device_mesh("cpu", (2,))),
    "a mesh's axis": lambda module: OURS(
        module, device_mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"]
    ),
    "buffers": lambda module: OURS(module, forward_sync_buffers=False),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_it_trains_with_torchs_arguments(pools, what):
    def train():
        ddp, plain = ACCEPTED[what](smooth()), smooth()
        return max(far_from_one_process(ddp, plain, step) for step in range(3))

    assert max(pools(2)(train)) < 1e-12


@pytest.mark.gpu(1)
def test_inputs_are_moved_to_the_device_that_is_named():
    def train():
        ddp = OURS(smooth().cuda(), device_ids=[0])
        return ddp(share(0)).device.type, OURS(smooth().cuda())(share(0).cuda()).device.type

    assert md.launch(train, world_size=1) == [("cuda", "cuda")]


REFUSED = {
    "two devices": (
        lambda: OURS(smooth(), [0, 1]),
        "ValueError",
        "device_ids=[0, 1]: a rank has one device. Start a rank for each",
    ),
    "another device": (
        lambda: OURS(smooth(), ["cuda:1"]),
        "ValueError",
        "device 'cuda:1' was named, but the module is on cpu",
    ),
    "another output": (lambda: OURS(smooth(), None, "meta"), "ValueError", "device 'meta' was"),
    "a group for devices": (
        lambda: OURS(smooth(), dist.group.WORLD),
        "TypeError",
        "device_ids is None or a list of one device, not <",
    ),
    "dim": (lambda: OURS(smooth(), dim=1), "ValueError", "take dim=1: inputs are not cut"),
    "mixed_precision": (
        lambda: OURS(smooth(), mixed_precision="bf16"),
        "ValueError",
        "mixed_precision='bf16': use torch.autocast",
    ),
    "delayed": (
        lambda: OURS(smooth(), delay_all_reduce_named_params=[("a", None)]),
        "ValueError",
        "delay_all_reduce_named_params",
    ),
    "a list of caps": (
        lambda: OURS(smooth(), bucket_cap_mb_list=[1, 2]),
        "ValueError",
        "bucket_cap_mb_list=[1, 2]: all buckets are of bucket_cap_mb",
    ),
    "skipping": (
        lambda: OURS(smooth(), skip_all_reduce_unused_params=True),
        "ValueError",
        "skip_all_reduce_unused_params=True",
    ),
    "mesh and group": (
        lambda: OURS(
            smooth(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
        ),
        "ValueError",
        "a device_mesh or a process_group, not both",
    ),
    "two axes": (
        lambda: OURS(smooth(), device_mesh=init_device_mesh("cpu", (1, 2))),
        "ValueError",
        "device_mesh must have one axis, not 2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_here_is_refused_by_name(pools, what):
    call, kind, words = REFUSED[what]
    for told in pools(2)(raised, call):
        assert told is not None and told[0] == kind and words in told[1], told


def test_a_graph_that_is_static_may_leave_parameters_out(pools):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = smooth(), smooth()

        def forward(self, x):
            return self.used(x)

    def train():
        ddp, plain = OURS(Half(), static_graph=True), smooth()
        for step in range(3):
            ddp.zero_grad()
            ddp(share(dist.get_rank(), step)).pow(2).sum().backward()
            plain.zero_grad()
            for rank in range(2):
                (plain(share(rank, step)).pow(2).sum() / 2).backward()
        assert all(p.grad is None for p in ddp.module.unused.parameters())
        pairs = zip(ddp.module.used.parameters(), plain.parameters(), strict=True)
        return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)

    assert max(pools(2)(train)) < 1e-12


def test_a_static_graph_with_parts_that_are_computed_again(pools):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = smooth(), nn.Linear(2, 2).double()

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    def train():
        torch.manual_seed(0)
        plain = Again()
        ddp = OURS(copy.deepcopy(plain), static_graph=True)
        for step in range(3):
            for model, ranks in (ddp, [dist.get_rank()]), (plain, [0, 1]):
                model.zero_grad()
                for rank in ranks:
                    x = share(rank, step).requires_grad_()
                    (model(x).pow(2).sum() / len(ranks)).backward()
        pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
        return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)

    assert max(pools(2)(train)) < 1e-12


@pytest.mark.parametrize("options", [{"init_sync": False}, {"broadcast_buffers": False}, {}])
def test_what_travels_at_construction(pools, options):
    def begin():
        module = net(seed=dist.get_rank())
        module[1].running_mean += dist.get_rank()
        OURS(module, **options)
        return module[0].weight.sum().item(), module[1].running_mean.sum().item()

    first, second = pools(2)(begin)
    assert (first[0] == second[0]) == ("init_sync" not in options)
    assert (first[1] == second[1]) == (not options)


def test_a_buffer_that_rank_0_changed_before_the_first_pass_is_everywhere(pools):
    def train(wrap, options, with_grad):
        module = net()
        ddp = wrap(module, **options)
        module[1].running_mean += 5 * (1 - dist.get_rank())
        module.eval()  # so that the pass itself changes none
        with torch.set_grad_enabled(with_grad):
            ddp(share(0))
        return module[1].running_mean.sum().item()

    for options in ({}, {"broadcast_buffers": False}):
        for with_grad in (True, False):
            ours = pools(2)(train, OURS, options, with_grad)
            assert ours == [25, 0 if options else 25]
            if not options:
                assert ours == pools(2)(train, TorchDDP, options, with_grad)


def test_so_it_is_with_sharded_gradients(pools):
    def train():
        module = net()
        optimizer = md.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = md.ShardedDataParallel(module, optimizer)
        module[1].running_mean += 5 * (1 - dist.get_rank())
        module.eval()
        model(share(0))
        return module[1].running_mean.sum().item()

    assert pools(2)(train) == [25, 25]


# ---- what a wrapper has of its module ---------------------------------------------------------


class Model(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.inner = smooth()
        self.scale = 2.0

    def forward(self, x):
        return self.inner(x) * self.scale

    def describe(self):
        return f"{self.width} wide"


def test_the_modules_attributes_are_the_wrappers(pools):
    def look():
        ddp = OURS(Model())
        assert ddp.width == 4 and ddp.scale == 2.0
        assert not hasattr(ddp, "depth") and getattr(ddp, "depth", 7) == 7
        twice = md.checkpoint_wrapper(md.checkpoint_wrapper(Model()))
        assert twice.describe() == "4 wide"
        linear = md.FullyShardedDataParallel(nn.Linear(3, 5))
        assert linear.in_features == 3
        # What a wrapper has of its module is not taken for its own.
        md.FullyShardedDataParallel(nn.Sequential(md.checkpoint_wrapper(linear)))
        mixed = raised(md.mixed.MixedParallel, OURS(md.zoo.Transformer()), md.mixed.mesh(data=2), 1)
        assert mixed is not None and "not DistributedDataParallel" in mixed[1]
        return raised(lambda: ddp.depth)

    assert pools(2)(look) == [("AttributeError", "'Model' object has no attribute 'depth'")] * 2


def test_a_copy_trains_on_its_own_and_is_averaged(pools):
    def train():
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        worst = 0.0
        for options in ({}, {"process_group": group}):
            ddp = OURS(smooth(), **options)
            far_from_one_process(ddp, smooth())
            copied = copy.deepcopy(ddp)
            assert type(copied) is OURS and copied.process_group is ddp.process_group
            assert all(
                p is not q for p, q in zip(ddp.parameters(), copied.parameters(), strict=True)
            )
            with torch.no_grad():
                for p in copied.parameters():
                    p *= 0.5
            half = smooth()
            with torch.no_grad():
                for p in half.parameters():
                    p *= 0.5
            for step in range(3):
                worst = max(worst, far_from_one_process(copied, half, step))
                worst = max(worst, far_from_one_process(ddp, smooth(), step))
        ddp = OURS(Model(), process_group=group)
        told = raised(torch.save, ddp, io.BytesIO())
        assert told is not None and told[0] == "TypeError"
        assert told[1].startswith("a DistributedDataParallel can be saved if its group is the")
        return worst, rank

    assert max(worst for worst, _ in pools(2)(train)) < 1e-12


def test_a_wrapper_within_a_model_is_copied_with_it(pools):
    def train():
        whole = nn.Sequential(OURS(smooth()), nn.Tanh())
        copied = copy.deepcopy(whole)
        plain = nn.Sequential(smooth(), nn.Tanh())
        return max(far_from_one_process(copied, plain, step) for step in range(2))

    assert max(pools(2)(train)) < 1e-12


def test_saved_whole_and_loaded(pools):
    def train():
        ddp, file = OURS(smooth(), bucket_cap_mb=1), io.BytesIO()
        far_from_one_process(ddp, smooth())
        torch.save(ddp, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is OURS and loaded.bucket_cap_mb == 1
        return max(far_from_one_process(loaded, smooth(), step) for step in range(2))

    assert max(pools(2)(train)) < 1e-12


def test_torchs_averaged_models_take_it(pools):
    def train(wrap):
        ddp = wrap(smooth())
        average = AveragedModel(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(share(dist.get_rank(), step)).pow(2).sum().backward()
            optimizer.step()
            average.update_parameters(ddp)
        with torch.no_grad():
            y = average(share(0))
        return y

    for ours, theirs in zip(pools(2)(train, OURS), pools(2)(train, TorchDDP), strict=True):
        assert float((ours - theirs).abs().max()) < 1e-12


# ---- checkpoints ------------------------------------------------------------------------------


def test_checkpoints_of_torchs_class_load(pools):
    def load():
        theirs = TorchDDP(net(seed=1)).state_dict()
        ddp = OURS(net())
        before = list(theirs)
        assert before[0] == "module.0.weight"
        assert not any(ddp.load_state_dict(theirs))
        assert list(theirs) == before
        return all(
            torch.equal(value, theirs[f"module.{name}"]) for name, value in ddp.state_dict().items()
        )

    assert pools(2)(load) == [True, True]


# ---- a script ---------------------------------------------------------------------------------

SCRIPT = """
import copy
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = DDP(model, device_ids=DEVICE_IDS)
    model.load_state_dict(torch.load("start.pt"))  # as torch's class saves it: module.0.weight, ...
    ema = copy.deepcopy(model)
    for p in ema.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            torch.manual_seed(100 * step + 10 * micro + rank)
            x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters()):
                old.lerp_(new, 0.2)
    model.eval()
    ema.eval()
    torch.manual_seed(7)
    x = torch.randn(8, 4).double()
    with torch.no_grad():
        out = {"model": model.module(x), "ema": ema.module(x)}
    torch.save(out | model.module.state_dict(), f"{sys.argv[1]}.{rank}.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

# Two ways in which a script with torch's class ends badly now and then, after all its work. Whoever
# imports this module after the group was made keeps the group, and torch.optim does: gloo's threads
# then outlive Python, and it ends by SIGABRT. (`import minidist` imports it in time.) And a model
# that outlives the group waits for these threads with Python's lock in its hand: it never ends
# where one of them wants the lock.
FROM_TORCH = SCRIPT.replace("    dist.destroy", "    del model, ema\n    dist.destroy")
FROM_TORCH = "import torch.distributed.nn.functional\n" + FROM_TORCH
RUNS = {
    "torchs": (FROM_TORCH, "None"),
    "ours": (SCRIPT.replace("from torch.nn.parallel", "from minidist"), "None"),
    "ours, by rank": (SCRIPT.replace("from torch.nn.parallel", "from minidist"), "[rank]"),
}


@pytest.mark.timeout(360)
def test_a_script_with_its_import_line_changed(tmp_path):
    start = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    torch.save({f"module.{k}": v for k, v in start.state_dict().items()}, tmp_path / "start.pt")
    family = Family()
    environ = {**family.environ(), "OMP_NUM_THREADS": "1"}
    try:
        for name, (source, devices) in RUNS.items():
            (tmp_path / f"{name}.py").write_text(source.replace("DEVICE_IDS", devices))
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            run = subprocess.run(
                [sys.executable, *command, f"{name}.py", name],
                env=environ,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=FAR,
            )
            assert run.returncode == 0, run.stderr
        assert family.gone_within(20)
    finally:
        family.end()
    for rank in range(2):
        wanted = torch.load(tmp_path / f"torchs.{rank}.pt")
        assert not torch.equal(wanted["model"], wanted["ema"])
        for name in RUNS:
            found = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert list(found) == list(wanted)
            for key, value in wanted.items():
                assert md.parity.relative_difference(found[key], value) < 1e-12, (name, key)
