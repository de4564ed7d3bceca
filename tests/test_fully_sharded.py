"""What FSDP holds and sends, in bytes, by the formulas and beside torch's; what is a unit; states
and checkpoints; scripts for torch's; what is refused. Lesson: fully_sharded"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_model import (
    WIDTH,
    Block,
    Net,
    apart,
    in_place,
    loss_of,
    pair,
    share,
    told,
    two_axes,
    units_of,
    weighed,
    whole,
    wrapped,
)
from least import least_memory_of
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import wrap

import minidist as md
from minidist.fully_sharded import FSDPModule, by_class, by_size

GATHERS = {"gloo": ("broadcast", "reduce"), "shm": ("all_gather", "reduce_scatter")}


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (WIDTH, 5, 4, 3)), dtype=dtype)


layers = partial(wrapped, kinds=(nn.Linear,))
layers_in_place = partial(in_place, kinds=nn.Linear)


# ---- bytes and traffic ------------------------------------------------------------------------


def measured(shard=layers, sizes=(64, 32, 12), steps=2, **options):
    """Of a step after these: the bytes of each kind at its end and at their peak, and traffic."""
    model = shard(net(*sizes, dtype=torch.float32), **options)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, sizes[0])

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    memory, traffic = least_memory_of(step, model, optimizer)
    return memory.after("backward"), memory.peak_of, traffic.calls, len(list(model.parameters()))


PSI = 64 * 32 + 32 + 32 * 12 + 12


def test_bytes_that_a_rank_holds(pools):
    """16Ψ/N: the rows of parameters, gradients and two states; and a count of steps for each."""
    for live, _, _, pieces in pools(4)(measured):
        assert live["parameters"] == live["gradients"] == 4 * PSI / 4
        assert live["optimizer states"] == 8 * PSI / 4 + 4 * pieces


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_whole_model_is_never_there(pools, prefetch):
    """At most the shards, the unit that computes and the one that comes next; of gradients, those
    of a unit that are made, and those of one that travel."""
    sizes = [(a, b) for a, b in zip((64, 80, 64, 96, 64), (80, 64, 96, 64, 32), strict=True)]
    units = [a * b + b for a, b in sizes]
    run = partial(measured, sizes=(64, 80, 64, 96, 64, 32), prefetch=prefetch)
    for _, peak, calls, _ in pools(2)(run):
        two = sum(sorted(units)[-2:])
        assert peak["parameters"] == 4 * (sum(units) // 2 + (two if prefetch else max(units)))
        # Gloo's thread may give back one message more late.
        most = sum(sorted(units)[-3:]) if "broadcast" in calls else two
        assert max(units) <= peak["communication buffers"] / 4 <= most


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shard", [layers, layers_in_place])
def test_traffic(pools, shard, reshard):
    """3Ψ(N-1)/N: two all_gathers and a reduce_scatter of Ψ; gloo's are calls for each shard."""

    def counted():
        return dist.get_backend(), *measured(shard, reshard_after_forward=reshard)

    nbytes, gathers, flags = 4 * PSI, 1 + reshard, 4
    for backend, _, _, calls, _ in pools(2)(counted):
        gather, reduce = GATHERS[backend]
        each = 2 if backend == "gloo" else 1
        assert calls == {
            gather: (2 * each * gathers, gathers * nbytes),
            reduce: (2 * each, nbytes),
            "all_reduce": (1, flags),  # which parameters have a gradient, a byte each
        }


# ---- what is a unit, and of which numbers -----------------------------------------------------


POLICIES = {
    "class": by_class(nn.Linear),
    "size": by_size(20),
}


def test_what_is_wrapped(pools):
    def units(policy):
        module = nn.Sequential(net(6, 5), nn.ModuleList([net(5, 4)]), net(4, 2))
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy)
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        return [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]

    for name, policy in POLICIES.items():
        wanted = ["module.0.0", "module.1.0.0"] + ["module.2.0"] * ("class" in name)
        assert pools(2)(units, policy) == [["module", *wanted]] * 2, name


def test_every_rank_begins_with_what_rank_0_has(pools):
    """And has its buffers again, when a pass that trains has left other ones."""

    def begun(shard):
        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        first = [copy.deepcopy(module.state_dict())]
        dist.broadcast_object_list(first, 0)
        model = shard(module)
        found, means = apart(model.state_dict(), first[0], 0), [None] * dist.get_world_size()
        model(torch.randn(4, 6)).sum().backward()
        model.eval()(torch.randn(4, 6))
        dist.all_gather_object(means, module[1].running_mean)
        return found, all(torch.equal(mean, means[0]) for mean in means)

    def hybrid(module):
        return layers(module, device_mesh=two_axes())

    for size, shard in (3, layers), (2, layers_in_place), (4, hybrid):
        assert pools(size)(begun, shard) == [({}, True)] * size


BF16, LOW = torch.bfloat16, (torch.bfloat16, torch.float32)
IN_PLACE = {"mp_policy": fsdp.MixedPrecisionPolicy(*LOW, output_dtype=torch.float64)}
FORMS = {
    "wrapped": (layers, {"mixed_precision": fsdp.MixedPrecision(*LOW, BF16)}, BF16),
    "in place": (layers_in_place, IN_PLACE, torch.float64),
}


@pytest.mark.parametrize("form", FORMS)
def test_mixed_precision(pools, form):
    """Compute and gathers in bfloat16, shards and sums in float32."""

    def mixed():
        shard, options, output_dtype = FORMS[form]
        model, plain = pair(lambda: net(WIDTH, 8, 3), partial(shard, **options), torch.float32)
        x, dtypes, ranks = share(dist.get_rank()).float(), set(), range(2)
        units_of(model)[-1].register_forward_pre_hook(lambda m, x: dtypes.add(x[0].dtype))
        with md.measure.TrafficCounter() as traffic:
            output = model(x)
            weighed(output.float()).backward()
        (sum(weighed(plain(share(rank).float())) for rank in ranks) / 2).backward()
        ours, wanted = ({n: p.grad for n, p in m.named_parameters()} for m in (model, plain))
        dtypes |= {p.dtype for p in [*model.parameters(), *ours.values()]}
        padded = sum(-(-len(p) // 2) * 2 * p[0].numel() for p in plain.parameters())
        sent = [traffic.calls[op][1] / padded for op in GATHERS[dist.get_backend()]]
        return apart(ours, wanted, 0.05), dtypes, output.dtype == output_dtype, sent

    assert pools(2)(mixed) == [({}, {BF16, torch.float32}, True, [2 + 2, 4])] * 2


def test_initial_values_for_what_is_on_meta(pools):
    """If one rank cannot make them, all hear of it; the others do not wait for that one."""

    def init(fails, module):
        if fails and dist.get_rank() == 1:
            raise OSError("no such file: values.pt")
        if hasattr(module, "weight"):
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 3)
            nn.init.constant_(module.bias, 4)

    def born(fails):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        state = layers(module, param_init_fn=partial(init, fails)).state_dict()
        return {name.split(".")[1]: set(value.flatten().tolist()) for name, value in state.items()}

    assert pools(2)(born, False) == [{"weight": {3}, "bias": {4}}] * 2
    for words in pools(2)(lambda: told(lambda: born(True))):
        assert "RuntimeError" in words and "rank 1" in words and "values.pt" in words, words


# ---- states -----------------------------------------------------------------------------------


FULL = states.StateDictOptions(full_state_dict=True)


def trained(shard, steps, given=None):
    """By AdamW, from whole states if they are given. Returns whole ones, of model and optimizer."""
    torch.manual_seed(0)
    model, ranks = Net().double(), range(2)
    if shard is not None:
        model, ranks = shard(model), [dist.get_rank() % 2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if given:
        model.load_state_dict(given[0])
        states.set_optimizer_state_dict(model, optimizer, copy.deepcopy(given[1]), options=FULL)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return copy.deepcopy((state, states.get_optimizer_state_dict(model, optimizer, options=FULL)))


def flat(states):
    """Of model and optimizer in one dictionary."""
    model, optimizer = states
    return model | {f"{n} {k}": v for n, s in optimizer["state"].items() for k, v in s.items()}


@pytest.mark.parametrize("shard", [in_place, wrapped])
def test_whole_states_load_anywhere(pools, shard):
    """From 2 ranks on 4, from there in one process, and from there on 2."""
    wanted, given = flat(trained(None, range(9))), None
    for begin, how in ((0, 2), (3, 4), (6, None)):
        run = partial(trained, shard if how else None, range(begin, begin + 3), given)
        given = pools(how)(run)[0] if how else run()
    assert apart(flat(given), wanted) == {}


def test_rows_are_torchs(pools):
    """Of both forms; whole tensors and DTensors load."""

    def run():
        model, plain = pair(Net, in_place)
        state = model.state_dict()
        theirs = in_place(copy.deepcopy(plain), fsdp.fully_shard).state_dict()
        assert isinstance(model, Net) and isinstance(model.blocks[0], Block)
        found = [n for n in theirs if not torch.equal(theirs[n].to_local(), state[n].to_local())]
        for given in plain.state_dict(), copy.deepcopy(state):
            for shard in in_place, lambda module: wrapped(module).module:
                other = shard(Net().double())
                other.load_state_dict(given)
                found += apart(other.state_dict(), plain.state_dict(), 0)
        return found

    assert pools(2)(run) == [[]] * 2


# ---- a script for torch's class, with its import changed --------------------------------------


def script(FSDP):
    torch.manual_seed(0)
    model = FSDP(
        Net(),
        cpu_offload=fsdp.CPUOffload(offload_params=False),
        auto_wrap_policy=partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=fsdp.MixedPrecision(torch.float32, torch.float32),
        device_id=torch.device("cpu"),
        sync_module_states=False,
        forward_prefetch=True,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    assert model.head.out_features == 4
    decay = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            for number in range(2):
                weighed(model(share(dist.get_rank(), 3 * step + number).float())).backward()
        weighed(model(share(dist.get_rank(), 3 * step + 2).float())).backward()
        norms.append(float(model.clip_grad_norm_(0.05)))
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        output = model(share(9).float())
    state = states.get_model_state_dict(model, options=FULL)
    return state | {"output": output, "norms": torch.tensor(norms)}


def test_a_script_for_torchs_class(pools):
    def run():
        return apart(
            *map(script, (md.FullyShardedDataParallel, fsdp.FullyShardedDataParallel)), 1e-5
        )

    assert pools(2)(run) == [{}] * 2


# ---- what is refused --------------------------------------------------------------------------


def by_rank():
    wrapped(net(), kinds=(nn.Linear,) if dist.get_rank() else ())


def outside():
    model = layers(net())
    model(share(0))
    model.module[0](share(0))


def tied_between_units():
    module = net(6, 6, 6)
    module[2].weight = module[0].weight
    layers(module)


def stepped_between():
    model = layers(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(share(dist.get_rank())).sum()
    model(share(dist.get_rank())).sum().backward()
    optimizer.step()
    loss.backward()


def changed(change):
    def train():
        model = layers(net())
        change(model.module)
        model(share(dist.get_rank()))

    return train


def replaced(module):
    module[0].bias = nn.Parameter(module[0].bias.detach().clone())


def moved_alone():
    model = in_place(Net())
    model.first.double()
    model(share(dist.get_rank()))


def double_backward():
    x = share(dist.get_rank()).requires_grad_()
    (g,) = torch.autograd.grad(layers(net())(x).pow(2).sum(), x, create_graph=True)
    g.sum().backward()


def hooked():
    for parameter in (model := layers(net())).parameters():
        parameter.register_hook(lambda g: g.clamp(-1, 1))
    model(share(dist.get_rank())).sum().backward()


REFUSED = [  # what is done, and the words that are told on every rank
    (lambda: layers(net(6, 5 + dist.get_rank(), 3)), "ValueError: the ranks have different models"),
    (by_rank, "ValueError: the ranks have different models"),
    (outside, "outside of the forward pass of its root"),
    (tied_between_units, "parameter weight is in another unit, too"),
    (stepped_between, "changed since the forward pass"),
    (changed(lambda module: module.append(net(3, 3))), "parameter 5.0.weight was added, replaced"),
    (changed(replaced), "parameter 0.bias was added, replaced"),
    (moved_alone, "parameter first.weight"),
    (double_backward, "create_graph=True"),
    (hooked, "calls no register_hook"),
    (lambda: layers(layers(net()).module), "is sharded already"),
    (lambda: md.fully_shard(nn.Sequential(net(2, 2), net(2, 2, dtype=BF16))), "1.0.weight"),
    (lambda: md.fully_shard(nn.ParameterList([torch.tensor(1.0)])), "0 has no rows"),
    (lambda: md.fully_shard([nn.Linear(2, 2)]), "one module, with a forward pass, not a list"),
    (lambda: md.fully_shard(nn.ModuleList()), "not a ModuleList"),
    (lambda: copy.deepcopy(layers_in_place(net())), "full_state_dict=True on every rank"),
    (lambda: layers(net(), sharding=1), "has no argument sharding"),
]


@pytest.mark.parametrize(("fault", "words"), REFUSED)
def test_what_is_refused(pools, fault, words):
    for found in pools(2)(told, fault):
        assert words in found, found


def test_experts_that_only_some_ranks_reach():
    """Of one size. With gloo nobody can tell."""

    def run():
        model = in_place(Net(forward=lambda m, x: m.blocks[dist.get_rank()](x)))
        return told(lambda: model(share(0).float()))

    for found in md.launch(run, world_size=2, backend="shm"):
        assert "every rank of a group must make the same call" in found
        assert "for unit blocks.0" in found and "for unit blocks.1" in found, found
