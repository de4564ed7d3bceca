"""`tensor_parallel.parallelize_module` makes DTensors, so that torch's own functions for norms,
averages, copies and checkpoints are right. Held against one process."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import LENGTH, MODELS, VOCABULARY, apart, llama, llama_plan, raised
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as torchs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist import tensor_parallel as tp


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))["tensor"]


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, 3, LENGTH), generator=draw)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wholes(state):
    return {name: whole(tensor) for name, tensor in state.items()}


def same(found, wanted):
    lost = [f"{name} is not there" for name in wanted.keys() - found.keys()]
    return lost + apart({name: (found[name], wanted[name]) for name in wanted})


# ---- torch's functions ------------------------------------------------------------------------


def train(make, plan, sequence_parallel, limit, kind):
    """Torch's clipping and averages at each step, beside one process."""
    dense = make().double()
    model, options = copy.deepcopy(dense), dict(sequence_parallel=sequence_parallel)
    assert tp.parallelize_module(model, mesh(), plan(model), **options) is model
    both = model, dense
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in both]
    emas = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in both]
    shapes = [[p.shape for p in each.parameters()] for each in both]
    found = ["shape"] * (shapes[0] != shapes[1])
    share = sum(p.to_local().numel() for p in model.parameters())
    share /= sum(p.numel() for p in dense.parameters())
    found += [f"a share of {share}"] * (share > 1.1 / dist.get_world_size())
    for step in range(2):
        inputs, targets = batch(step)
        losses = (
            md.vocab_parallel_cross_entropy(model(inputs), targets),
            md.parity.cross_entropy(dense(inputs), targets),
        )
        norms = []
        for loss, each, optimizer, ema in zip(losses, both, optimizers, emas, strict=True):
            optimizer.zero_grad()
            loss.backward()
            norms.append(whole(nn.utils.clip_grad_norm_(each.parameters(), limit, kind)))
            optimizer.step()
            ema.update_parameters(each)
        assert norms[1] > 1.1 * limit  # it does clip
        full = tp.full_state_dict(model)
        found += apart({"loss": losses, "norm": norms}) + same(full, dense.state_dict())
        found += same(wholes(model.state_dict()), dense.state_dict())
        found += same(wholes(emas[0].module.state_dict()), emas[1].module.state_dict())
        found += ["names"] * (full.keys() != dense.state_dict().keys())
        tp.check_replicas(model)
        if found:
            return [f"step {step}", *found]
    return found


CASES = [  # of one layer for queries, keys and values torch must know the shards
    ("zoo", 4, True),
    ("zoo", 2, False),
    ("llama", 2, True),
    ("llama", 4, False),
]


@pytest.mark.parametrize(("name", "ranks", "sequence_parallel"), CASES)
def test_torchs_clipping_and_averages_are_those_of_one_process(
    pools, name, ranks, sequence_parallel
):
    norm = (0.05, float("inf")) if sequence_parallel else (0.3, 2.0)
    assert pools(ranks)(train, *MODELS[name], sequence_parallel, *norm) == [[]] * ranks


def beside_torch():
    """Torch's function and ours, on the backend shm: loss and gradients."""
    results = []
    styles = dict(columns=torchs.ColwiseParallel(), rows=torchs.RowwiseParallel())
    for function in tp, torchs:
        model = llama().double()
        plan = {name: style for name, style in llama_plan(model).items() if style in (*styles,)}
        for layer in model.model.layers:  # as torch's tutorial has it
            layer.self_attn.num_heads //= dist.get_world_size()
            layer.self_attn.num_key_value_heads //= dist.get_world_size()
        if function is torchs:
            plan = {name: styles[style] for name, style in plan.items()}
        function.parallelize_module(model, mesh(), plan)
        inputs, targets = batch(0)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        results.append({name: whole(p.grad) for name, p in model.named_parameters()})
        results[-1]["loss"] = loss.detach()
    return same(*results)


def test_columns_and_rows_do_what_torchs_styles_do(pools):
    assert pools(2)(beside_torch) == [[]] * 2


# ---- checkpoints ------------------------------------------------------------------------------


def saved(folder, **options):
    dense = llama().double()
    plan = llama_plan(dense)
    model = tp.parallelize_module(copy.deepcopy(dense), mesh(), plan, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(2):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        md.vocab_parallel_cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    states = dcp_state.get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    return tp.full_state_dict(model), wholes(moments(model, optimizer))


def loaded(folder, **options):
    model = llama(seed=1).double()
    tp.parallelize_module(model, mesh(), llama_plan(model), **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    states = dict(
        zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True)
    )
    dcp.load(states, checkpoint_id=folder)
    dcp_state.set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    return tp.full_state_dict(model), wholes(moments(model, optimizer))


def moments(model, optimizer):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: state["exp_avg"] for p, state in optimizer.state.items()}


def test_torchs_checkpoint_is_loaded_by_another_number_of_ranks(pools, tmp_path):
    before = pools(2)(saved, tmp_path, sequence_parallel=True)[0]
    for ranks in 1, 4:
        for after in pools(ranks)(loaded, tmp_path, sequence_parallel=True):
            for kind, wanted in zip(after, before, strict=True):
                assert kind.keys() == wanted.keys()
                assert all(torch.equal(kind[name], wanted[name]) for name in wanted), ranks


# ---- what it costs ----------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts operations, of DTensors too."""

    def __init__(self):
        super().__init__()
        self.of_dtensors, self.names = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.of_dtensors.append(str(function))
            return NotImplemented
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def operations(name, sequence_parallel):
    make, plan = MODELS[name]
    models = make(), make()
    options = dict(sequence_parallel=sequence_parallel)
    tp.split(models[0], None, plan(models[0]), **options)
    tp.parallelize_module(models[1], mesh(), plan(models[1]), **options)
    (inputs, targets), found = batch(0), []
    for model in models:
        for _ in range(2):  # at first the backend makes what it needs
            model.zero_grad()
            with Ops() as ops, md.measure.TrafficCounter() as traffic:
                loss = md.vocab_parallel_cross_entropy(model(inputs), targets)
                loss.backward()
        # Not what the backend does: it adds up where a message arrives.
        words = "mm.", "attention", "norm", "embedding", "silu", "exp", "index"
        costly = [name for name in ops.names if any(word in name for word in words)]
        found.append((Counter(costly), traffic.calls))
    assert len(found[0][0]) > 5
    return found[0] == found[1], sorted(set(ops.of_dtensors))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_pass_computes_with_plain_tensors(pools, sequence_parallel):
    """The same operations and messages as without DTensors; and none is DTensor's, but that
    autograd detaches the gradients that it keeps."""
    for same_operations, of_dtensors in pools(2)(operations, "llama", sequence_parallel):
        assert same_operations and set(of_dtensors) <= {"aten.detach.default"}, of_dtensors


# ---- other modules, and mistakes --------------------------------------------------------------


class Sum(nn.Module):
    """Two parameters that autograd gives one gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in "ab")

    def forward(self, x):
        return x * (self.a + self.b)


def two_passes():
    model = tp.parallelize_module(Sum(), mesh(), {})
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    return [p.grad.to_local().tolist() for p in model.parameters()]


def test_gradients_add_up_each_for_itself(pools):
    assert pools(2)(two_passes) == [[[2.0] * 4] * 2] * 2


def rank_0():
    models = []
    for seed in dist.get_rank(), 0:
        torch.manual_seed(seed)
        layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        models.append(nn.Sequential(*layers))
        models[-1][1].running_mean.normal_()
    tp.parallelize_module(models[0], mesh(), {"0": "columns", "2": "rows"})
    return same(wholes(models[0].state_dict()), models[1].state_dict())


def test_all_ranks_take_the_parameters_and_buffers_of_rank_0(pools):
    assert pools(2)(rank_0) == [[]] * 2


def other_models():
    buffer = nn.Linear(4, 4)
    buffer.register_buffer("mask", torch.ones(4 + dist.get_rank()))
    models = nn.Linear(4, 4 + dist.get_rank()), buffer
    return [raised(tp.parallelize_module, model, mesh(), {}) for model in models]


def test_ranks_with_different_models_are_told(pools):
    for told in pools(2)(other_models):
        for words, line in zip(told, ("parameter weight", "buffer mask"), strict=True):
            assert words.startswith("ValueError: the ranks have different models"), told
            assert line in words
