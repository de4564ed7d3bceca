"""`tensor_parallel.parallelize_module`: torch's plans, and DTensors, so that torch's own functions
for norms, averages, copies, initial values and checkpoints are right. Held against one process, and
against torch's function of the same name.
"""

import copy
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan import (
    GPT2,
    LENGTH,
    MODELS,
    VOCABULARY,
    Llama,
    apart,
    of_torch,
    raised,
    replicated_between,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
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


def train(make, plan, sequence_parallel, limit, kind, loss_of=md.vocab_parallel_cross_entropy):
    """Torch's clipping and averages at each step, beside one process."""
    dense = make().double()
    model, options = copy.deepcopy(dense), dict(sequence_parallel=sequence_parallel)
    assert tp.parallelize_module(model, mesh(), plan(model), **options) is model
    both = model, dense
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in both]
    emas = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in both]
    found = ["shape"] * any(
        p.shape != q.shape for p, q in zip(model.parameters(), dense.parameters(), strict=True)
    )
    share = sum(p.to_local().numel() for p in model.parameters())
    share /= sum(p.numel() for p in dense.parameters())
    found += [f"a share of {share}"] * (share > 1.1 / dist.get_world_size())
    for step in range(3):
        inputs, targets = batch(step)
        losses = (
            loss_of(model(inputs), targets),
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
        found += apart({"loss": losses, "norm": norms})
        found += same(wholes(model.state_dict()), dense.state_dict())
        full = tp.full_state_dict(model)
        found += ["names"] * (full.keys() != dense.state_dict().keys())
        found += same(full, dense.state_dict())
        found += same(wholes(emas[0].module.state_dict()), emas[1].module.state_dict())
        tp.check_replicas(model)
        if found:
            return [f"step {step}", *found]
    copied, x = copy.deepcopy(model), batch(9)[0]
    found += ["the copy"] * (not torch.equal(copied(x), model(x)))
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    return found + same(wholes(model.state_dict()), dense.state_dict())


FUSED = pytest.mark.newer_torch("fused")  # one layer for queries, keys and values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FUSED if name in ("zoo", "gpt2") else ()) for name in MODELS],
)
def test_torchs_clipping_and_averages_are_those_of_one_process(
    pools, name, ranks, sequence_parallel
):
    norm = (0.05, float("inf")) if sequence_parallel else (0.3, 2.0)
    assert pools(ranks)(train, *MODELS[name], sequence_parallel, *norm) == [[]] * ranks


@pytest.mark.parametrize("plan", [of_torch, replicated_between])
def test_a_plan_of_torchs_styles_with_numbers_of_heads(pools, plan):
    def make():  # a head that is gathered must be of equal parts
        return Llama(vocabulary=252)

    told = pools(2)(train, make, plan, False, 0.3, 2.0, loss_of=md.parity.cross_entropy)
    assert told == [[]] * 2


def in_two_dimensions():
    """Torch's FSDP along `data`, of a model that is split along `tensor`."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dense, found = Llama().double(), []
    model = copy.deepcopy(dense)
    tp.parallelize_module(model, axes["tensor"], tp.llama_plan(model))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=axes["data"])
    both = model, dense
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in both]
    for step in range(3):
        inputs, targets = batch(step)[:, :2]
        own = slice(axes.get_local_rank("data"), None, 2)
        group = axes.get_group("tensor")
        losses = (
            md.vocab_parallel_cross_entropy(model(inputs[own]), targets[own], group),
            md.parity.cross_entropy(dense(inputs), targets),
        )
        norms = []
        for loss, each, optimizer in zip(losses, both, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            norms.append(whole(nn.utils.clip_grad_norm_(each.parameters(), 0.3)))
            optimizer.step()
        assert norms[1] > 0.4  # it does clip
        found += apart({f"norm {step}": norms})
    return found + same(wholes(model.state_dict()), dense.state_dict())


def test_torchs_fsdp_shards_it_along_another_axis(pools):
    assert pools(4)(in_two_dimensions) == [[]] * 4


def draw_anew():
    dense = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)).double()
    model = copy.deepcopy(dense)
    tp.parallelize_module(model, mesh(), {"0": "columns", "1": "copied", "2": "rows"})
    found = []
    for number, shape in ((0, (32, 64)), (2, (64, 32))):
        weight, right = model[number].weight, dense[number].weight
        found += ["shape"] * (weight.to_local().shape != shape or weight.shape != right.shape)
        found += apart({"norm": (whole(weight.norm()), right.norm())})
        nn.init.xavier_uniform_(weight)
        nn.init.xavier_uniform_(right)
        deviations = whole(weight).std(), right.std()
        found += ["scale"] * (abs(deviations[0] / deviations[1] - 1) > 0.05)
    return found


def test_norms_and_initial_values_are_those_of_the_whole(pools):
    assert pools(4)(draw_anew) == [[]] * 4


# ---- checkpoints ------------------------------------------------------------------------------


def saved(folder, **options):
    dense = Llama().double()
    plan = tp.llama_plan(dense)
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
    model = Llama(seed=1).double()
    tp.parallelize_module(model, mesh(), tp.llama_plan(model), **options)
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


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_torchs_checkpoint_is_loaded_by_another_number_of_ranks(
    pools, tmp_path, ranks, sequence_parallel
):
    before = pools(2)(saved, tmp_path, sequence_parallel=sequence_parallel)[0]
    for after in pools(ranks)(loaded, tmp_path, sequence_parallel=sequence_parallel):
        for kind, wanted in zip(after, before, strict=True):
            assert kind.keys() == wanted.keys()
            assert all(torch.equal(kind[name], wanted[name]) for name in wanted)


# ---- torch's plans ----------------------------------------------------------------------------


def even():
    model = Llama(vocabulary=252).double()
    for layer in model.model.layers:  # as torch's tutorial has it
        layer.self_attn.n_heads //= dist.get_world_size()
        layer.self_attn.n_kv_heads //= dist.get_world_size()
    return model


def tutorial(head):
    """Of torch's tutorial: activations are Shard(1) between the layers, and gathered where
    attention and feed-forward begin."""
    whole, sequence = Replicate(), Shard(1)
    gathered = torchs.PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole)
    block = {"self_attn": gathered, "mlp": gathered}
    block |= {f"self_attn.{n}_proj": torchs.ColwiseParallel() for n in "qkv"}
    block |= {f"mlp.{n}_proj": torchs.ColwiseParallel() for n in ("gate", "up")}
    for name in "self_attn.o_proj", "mlp.down_proj":
        block[name] = torchs.RowwiseParallel(output_layouts=sequence)
    for name in "input_layernorm", "post_attention_layernorm":
        block[name] = torchs.SequenceParallel()
    return {
        "model.embed_tokens": torchs.RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        **{f"model.layers.*.{name}": style for name, style in block.items()},
        "model.norm": torchs.SequenceParallel(),
        "lm_head": torchs.ColwiseParallel(input_layouts=sequence, **head),
    }


GATHERED = dict(output_layouts=Replicate())
LOGITS = dict(output_layouts=Shard(-1), use_local_output=False)


def plain_head():
    """The activations are whole, and what the plan does not name is replicated."""
    block = {f"self_attn.{n}_proj": torchs.ColwiseParallel() for n in "qkv"}
    block["self_attn.o_proj"] = torchs.RowwiseParallel()
    return {f"model.layers.*.{name}": style for name, style in block.items()}


PLANS = {
    "tutorial, head gathered": lambda: tutorial(GATHERED),
    "tutorial, loss_parallel": lambda: tutorial(LOGITS),
    "some of it": plain_head,
    "without heads": lambda: {k: v for k, v in of_torch(None).items() if k[-4:] != "attn"},
}


def beside_torch(name, parts):
    """Torch's function and ours, of the same plan: loss and gradients."""
    models, results = [even(), even()], []
    for model, function in zip(models, (tp, torchs), strict=True):
        plan, own = PLANS[name](), mesh()
        if not parts:
            function.parallelize_module(model, own, plan)
        else:
            block = "model.layers.*."
            rest = {key: style for key, style in plan.items() if not key.startswith(block)}
            function.parallelize_module(model, own, rest)
            for layer in model.model.layers:
                inner = {k.removeprefix(block): v for k, v in plan.items() if k not in rest}
                function.parallelize_module(layer, own, inner)
        inputs, targets = batch(0)
        with torchs.loss_parallel():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        results.append({"loss": whole(loss.detach())})
        results[-1] |= {k: whole(p.grad) for k, p in model.named_parameters()}
    ours, theirs = results
    with torch.no_grad():
        copied = whole(copy.deepcopy(models[0])(inputs))
        ours["copied"], theirs["copied"] = copied, whole(models[1](inputs))
    ours = {key.replace(".module.", "."): value for key, value in ours.items()}
    placed = {k.replace(".module.", "."): p for k, p in models[0].named_parameters()}
    found = (
        []
        if name == "some of it"
        else [
            f"{key}: {placed[key].placements} and {p.placements}"
            for key, p in models[1].named_parameters()
            if placed[key].placements != p.placements
        ]
    )
    return found + same(ours, theirs)


@pytest.mark.parametrize("parts", [False, True], ids=["at once", "by parts"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_torchs_does_what_torch_does(pools, name, parts):
    assert pools(2)(beside_torch, name, parts) == [[]] * 2


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, *, mask):
        return self.down(self.up(x).relu()) * mask


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.masked = Masked()

    def forward(self, x):
        return self.masked(x, mask=x.sigmoid())


def prepared(kind):
    """Its inputs are gathered along the sequence, and its output is cut."""
    sequence, whole_ = Shard(1), Replicate()
    into = dict(input_layouts=(sequence,), desired_input_layouts=(whole_,))
    into |= dict(
        input_kwarg_layouts={"mask": sequence}, desired_input_kwarg_layouts={"mask": whole_}
    )
    out = dict(output_layouts=(whole_,), desired_output_layouts=(sequence,))
    style = {
        "input": lambda: torchs.PrepareModuleInput(**into, use_local_output=True),
        "both": lambda: torchs.PrepareModuleInputOutput(**into, use_local_input=True, **out),
    }[kind]()
    plan = {"masked": style, "masked.up": torchs.ColwiseParallel()}
    plan["masked.down"] = torchs.RowwiseParallel()
    results = []
    for cut, own in (
        (tp.parallelize_module, mesh()),
        (torchs.parallelize_module, mesh()),
        (tp.split, None),
    ):
        torch.manual_seed(0)
        model = Around().double()
        cut(model, own, plan)
        x = torch.randn(3, 4, 6).double().chunk(2, 1)[dist.get_rank()].requires_grad_()
        y = whole(model(x))
        y.sin().sum().backward()
        results.append({"y": y, "x": x.grad})
        if own is not None:
            results[-1] |= {name: whole(p.grad) for name, p in model.named_parameters()}
    ours, theirs, split = results
    return same(ours, theirs) + apart({key: (split[key], theirs[key]) for key in split})


@pytest.mark.parametrize("kind", ["input", "both"])
def test_inputs_and_outputs_are_prepared_as_by_torch(pools, kind):
    assert pools(2)(prepared, kind) == [[]] * 2


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


class Mixed(nn.Module):
    """What torch computes by lists of parameters, or by those of parts that it does not call."""

    def __init__(self):
        super().__init__()
        self.lstm, self.attention = nn.LSTM(6, 6), nn.MultiheadAttention(6, 2)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.lstm(x)[0]
        x = self.attention(x, x, x)[0] * self.scale
        return self.down(self.up(x).relu())


class Sum(nn.Module):
    """Autograd gives both parameters, and the bias, one tensor as their gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(x[0, 0])) + self.first + self.second


def any_module(make):
    torch.manual_seed(0)
    dense = make().double()
    model = copy.deepcopy(dense)
    tp.parallelize_module(model, None, {"up": "columns", "down": "rows"})
    x = torch.randn(3, 2, 6).double()
    results = []
    for each in (model, dense):
        for _ in range(2):  # gradients add up
            each(x).sin().sum().backward()
        norm = whole(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
        grads = {name: whole(p.grad) for name, p in each.named_parameters()}
        results.append({"norm": norm, **grads})
    return same(*results)


@pytest.mark.parametrize("make", [Mixed, Sum])
def test_modules_that_no_plan_names_compute_as_they_are(pools, make):
    assert pools(2)(any_module, make) == [[]] * 2


def converted():
    """And recomputed in backward, and frozen in part."""
    dense = Llama().double()
    model = copy.deepcopy(dense)
    tp.parallelize_module(model, mesh(), tp.llama_plan(model))
    inputs, targets = batch(0)
    results = []
    for each, loss in ((model, md.vocab_parallel_cross_entropy), (dense, md.parity.cross_entropy)):
        each.float().double()
        each.model.norm.requires_grad_(False)
        each.model.embed_tokens.requires_grad_(False)
        for number, layer in enumerate(each.model.layers):
            each.model.layers[number] = md.checkpoint_wrapper(layer)
        loss(each(inputs), targets).backward()
        grads = {name: p.grad for name, p in each.named_parameters()}
        results.append({name: whole(g) for name, g in grads.items() if g is not None})
    return same(*results) + ["frozen"] * (results[0].keys() != results[1].keys())


def test_a_model_is_converted_frozen_and_recomputed(pools):
    assert pools(2)(converted) == [[]] * 2


def rank_0():
    models = []
    for seed in dist.get_rank(), 0:
        torch.manual_seed(seed)
        layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        models.append(nn.Sequential(*layers))
        models[-1][1].running_mean.normal_()
        models[-1].register_buffer("expanded", torch.rand(1, 3).expand(2, 3))
    tp.parallelize_module(models[0], mesh(), {"0": "columns", "2": "rows"})
    return same(wholes(models[0].state_dict()), models[1].state_dict())


@pytest.mark.parametrize("split", [tp.split, tp.parallelize_module])
def test_a_whole_state_is_kept_as_it_was(pools, split):
    def run():
        model = GPT2().bfloat16()
        mlp = model.transformer.h[0].mlp
        for layer in mlp.c_fc, mlp.c_proj:
            layer.bias = nn.Parameter(layer.bias.double() + 1 / 3)
        dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        split(model, None, tp.gpt2_plan(model))
        state = tp.full_state_dict(model)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(2)
        return [
            name
            for name, tensor in dense.items()
            if state[name].dtype != tensor.dtype or not torch.equal(state[name], tensor)
        ]

    assert pools(2)(run) == [[]] * 2


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


def uneven():
    """A vocabulary of 251 tokens is 63, 63, 63 and 62."""
    dense = Llama().double()
    model = tp.parallelize_module(copy.deepcopy(dense), mesh(), tp.llama_plan(dense))
    return len(model.lm_head.weight.to_local()), same(
        wholes(model.state_dict()), dense.state_dict()
    )


def test_a_vocabulary_is_split_as_dtensor_does(pools):
    assert pools(4)(uneven) == [(rows, []) for rows in (63, 63, 63, 62)]


def fully_sharded_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh())
    return raised(tp.parallelize_module, model, mesh(), {"0": "columns", "1": "rows"})


def test_what_is_sharded_already_is_not_split(pools):
    words = "TypeError: 0: its weight is sharded already. Split a model by features first"
    assert pools(2)(fully_sharded_before) == [words] * 2


def stale():
    model = md.zoo.mlp(4, 8, 4)
    made = [torch.optim.SGD(model[n].parameters(), 0.1) for n in (0, 2)]  # 2 is not named yet
    tp.parallelize_module(model, mesh(), {"0": "columns"})
    made.append(torch.optim.SGD(model.parameters(), 0.1))
    tp.parallelize_module(model, mesh(), {"2": "rows"})
    return [raised(optimizer.step) for optimizer in made]


def test_an_optimizer_that_was_made_before_is_told(pools):
    for told in pools(2)(stale):
        for words in told:
            assert words.startswith("RuntimeError: this parameter was replaced: the model has been")


def refused(plan, make):
    torch.manual_seed(0)
    model = make()
    before = str(model), {name: p.clone() for name, p in model.named_parameters()}
    told = raised(tp.parallelize_module, model, mesh(), plan)
    after = dict(model.named_parameters())
    stayed = all(torch.equal(after[name], p) for name, p in before[1].items())
    return told, str(model) == before[0] and stayed


REFUSED = {
    "one style": (torchs.ColwiseParallel(), "TypeError: a plan names modules, as {"),
    "the root": ({"": "columns"}, "TypeError: the plan's ''"),
    "grouped queries": ({"": tp.qkv(4, 2)}, "ValueError: : DTensor has no word for the shards"),
    "no such module": ({"2": "rows"}, "ValueError: the plan's '2' matches no module"),
    "columns of an embedding": (
        {"": torchs.RowwiseParallel(use_local_output=False)},
        "TypeError: the plan's '': minidist has nothing for",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(pools, what):
    plan, words = REFUSED[what]
    for told, stayed in pools(2)(refused, plan, lambda: nn.Linear(8, 16)):
        assert told is not None and told.startswith(words) and stayed, told


def test_without_dtensors_logits_are_plain(pools):
    def run():
        plan = {"0": torchs.ColwiseParallel(**LOGITS)}
        return raised(tp.split, md.zoo.mlp(4, 8, 4), None, plan)

    assert pools(2)(run) == ["TypeError: 0: use_local_output=False is for parallelize_module"] * 2


def weight_norm():
    """The old form: a hook before forward computes the weight of two parameters."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        first = nn.utils.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(first, nn.Linear(4, 6), nn.Linear(6, 2)).double()


def with_weight_norm():
    model, dense = weight_norm(), weight_norm()
    plan = {"1": torchs.ColwiseParallel(), "2": torchs.RowwiseParallel()}
    tp.parallelize_module(model, mesh(), plan)
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    for each in model, dense:
        each(x).pow(2).mean().backward()
    named = dense.named_parameters()
    return apart({name: (whole(model.get_parameter(name).grad), p.grad) for name, p in named})


def test_a_hook_before_forward_reads_plain_tensors(pools):
    assert pools(2)(with_weight_norm) == [[]] * 2


class Untaught(torch.autograd.Function):
    """It gives its weight no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Untaught.apply(x, self.weight)


def test_a_weight_that_gets_no_gradient_has_none(pools):
    def run():
        layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), Scale())
        model = tp.parallelize_module(layers, mesh(), {"0": "columns", "1": "rows"})
        model(torch.ones(2, 4)).sum().backward()
        return [parameter.grad is None for parameter in model.parameters()]

    assert pools(2)(run) == 2 * [[False] * 4 + [True]]


def test_gradients_of_gradients(pools):
    """Of what no layer that is split has computed."""

    def run():
        torch.manual_seed(0)
        dense = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)).double()
        model = copy.deepcopy(dense)
        model = tp.parallelize_module(model, mesh(), {"1": "columns", "2": "rows"})
        x = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
        found = []
        for norm in (model[0], dense[0]):
            y = norm(x).pow(3).sum()
            (grad,) = torch.autograd.grad(y, norm.weight, create_graph=True)
            (second,) = torch.autograd.grad(grad.pow(2).sum(), norm.weight)
            found.append(whole(second))
        return found

    for ours, theirs in pools(2)(run):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
