"""Experts beside what else an ordinary training has: data parallelism of all kinds, accumulation,
checkpoints on disk and of activations, clipping, 16 bits, context parallelism, and `md.watch`."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcs
from test_plan import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.instruments.parity import cross_entropy, relative_difference, train_step

LENGTH, ROWS, EXPERTS, K = 8, 12, 12, 3
DATA = md.zoo.text(LENGTH)
adamw = partial(torch.optim.AdamW, lr=1e-2)


def transformer(aux=0.0, dtype=torch.float64):
    """Two layers with DeepSeek-V3's router."""
    model = md.zoo.Transformer(length=LENGTH, width=16, heads=2, layers=2)
    torch.manual_seed(0)
    for block in model.blocks:
        block.mlp = md.experts.MoE(16, 24, EXPERTS, K, sigmoid=True, aux=aux)
    return model.to(dtype)


def in_place(shard, model):
    shard(model, ignored_params=set(md.experts.parameters(model)))
    return model


WRAPPERS = {
    "ddp": md.DistributedDataParallel,
    "torch's ddp": TorchDDP,
    "fully_shard": partial(in_place, md.fully_shard),
    "torch's fully_shard": partial(in_place, torch_fully_shard),
}


def shared(wrap, replicas, model):
    """As a script does it: on a mesh of replicas, each of which has all experts."""
    sizes = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "experts"))
    return WRAPPERS[wrap](md.experts.parallelize(model, mesh))


def batch(step):
    """This rank's rows of a batch of twelve."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return tuple(each[step * ROWS :][:ROWS][rank::ranks] for each in DATA)


def whole(model):
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    return {name: value.detach().clone() for name, value in full.items()}


def apart(found, wanted):
    """The names of what differs."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not relative_difference(found[name], wanted[name]) <= 1e-12]


def parity(pools, strategy, **options):
    md.parity.check(strategy, data=DATA, batch_size=2 * ROWS, ranks=pools(4), **options)


# ---- steps ------------------------------------------------------------------------------------


def clipped(model, optimizer, inputs, targets, loss_fn):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    assert md.experts.clip_grad_norm_(model, 0.1) > 0.2
    optimizer.step()
    return loss


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_data_parallelism_trains_and_clips_as_one_process(pools, wrap, replicas):
    options = dict(model=partial(transformer, 0.01), optimizer=adamw, step=clipped, clip=0.1)
    parity(pools, partial(shared, wrap, replicas), **options)


def in_two_parts(every_time, model, optimizer, inputs, targets, loss_fn):
    """Two micro-batches. Unless `every_time`, what is shared is averaged after the last one."""
    optimizer.zero_grad()
    total = 0
    for part, (x, y) in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
        averages = every_time or part == 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(averages)
        with nullcontext() if averages or not hasattr(model, "no_sync") else model.no_sync():
            loss = loss_fn(model(x), y) / 2
            loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


@pytest.mark.parametrize("every_time", [True, False])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_accumulation(pools, wrap, every_time):
    step = partial(in_two_parts, every_time)
    parity(pools, partial(shared, wrap, 2), model=transformer, step=step)


def recomputed(kind, model):
    if kind == "ours":
        model.blocks = nn.Sequential(*map(md.checkpoint_wrapper, model.blocks))
    for block in model.blocks if kind == "torch's" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return shared("ddp", 2, model)


def counting(model, optimizer, inputs, targets, loss_fn):
    routers = [each for each in model.modules() if isinstance(each, md.experts.Router)]
    before = [int(router.seen.sum()) for router in routers]
    loss = train_step(model, optimizer, inputs, targets, loss_fn)
    added = [int(router.seen.sum()) - n for router, n in zip(routers, before, strict=True)]
    assert added == [inputs.numel() * K] * 2  # not twice as many
    return loss


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_blocks_that_are_computed_again_for_backward(pools, kind):
    model = partial(transformer, 0.01)
    parity(pools, partial(recomputed, kind), model=model, step=counting)


def test_a_copy_trains_by_itself(pools):
    def run():
        model = shared("ddp", 2, transformer())
        # A copy of a wrapper is that of the module alone.
        copied, before = md.DistributedDataParallel(copy.deepcopy(model)), whole(model)
        for each in model, copied:
            cross_entropy(each(batch(0)[0]), batch(0)[1]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found = apart(whole(copied), before)
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        return found + apart(whole(copied), whole(model)), len(apart(whole(model), before)) > 20

    assert pools(4)(run) == [([], True)] * 4


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_16_bits(pools, wrap):
    """The loss falls, and experts compute in bfloat16, of weights in float32."""

    def run():
        model = shared(wrap, 2, transformer(0.01, torch.float32))
        optimizer, losses = adamw(model.parameters()), []
        for _ in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(batch(0)[0]), batch(0)[1])
            optimizer.zero_grad()
            loss.backward()
            assert torch.isfinite(md.experts.clip_grad_norm_(model, 1.0))
            optimizer.step()
            losses.append(loss.item())
        kinds = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        return losses[-1] < losses[0] - 0.5, kinds == {torch.float32}

    assert pools(4)(run) == [(True, True)] * 4


# ---- checkpoints --------------------------------------------------------------------------------


def run(folder, until, replicas=1, wrap="ddp", save=True):
    """Train from the newest checkpoint until a step, and save there. Returns the whole model."""
    model = transformer(0.01)
    if wrap == "mixed":
        model = md.mixed.MixedParallel(model, md.mixed.mesh(pipeline=2, experts=2), 1)
    elif dist.is_initialized():
        model = shared(wrap, replicas, model)
    optimizer = adamw(model.parameters())
    with md.saving.Checkpoints(folder) as checkpoints:
        for step in range(checkpoints.load(model=model, optimizer=optimizer) or 0, until):
            optimizer.zero_grad()
            if wrap == "mixed":
                own = slice(
                    step * ROWS + model.mesh.get_local_rank("experts"), (step + 1) * ROWS, 2
                )
                model.train_step(*(each[own] for each in DATA), model.cross_entropy)
                model.clip_grad_norm_(0.5)
            else:
                cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
                md.experts.clip_grad_norm_(model, 0.5)
            optimizer.step()
            md.experts.update_bias(model, 0.01)
        if save:
            checkpoints.save(until, model=model, optimizer=optimizer)
    return model.full_state_dict() if wrap == "mixed" else whole(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as said of one process
def test_a_run_goes_on_with_other_numbers_of_ranks(pools, tmp_path):
    """The states of the optimizer, too. Twelve experts, by 6, 6, 12, 4, 3, 6 and 12 a rank."""
    wanted = run(tmp_path / "uninterrupted", 7, save=False)
    folder = tmp_path / "a"
    pools(4)(run, folder, 1, 2)
    pools(2)(run, folder, 2)
    run(folder, 3)
    pools(3)(run, folder, 4)
    pools(4)(run, folder, 5, 1, "fully_shard")
    pools(4)(run, folder, 6, 1, "mixed")
    assert apart(pools(2)(run, folder, 7, 2)[0], wanted) == []


def test_torchs_functions_give_and_take_the_whole(pools):
    """Model and optimizer of a 2 x 2 mesh, in one process, and back on four ranks."""
    whole_ones = dcs.StateDictOptions(full_state_dict=True)

    def run(states, replicas, steps):
        model = transformer()
        model = shared("torch's ddp", replicas, model) if dist.is_initialized() else model
        optimizer = adamw(model.parameters())
        if states:
            both = dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))
            dcs.set_state_dict(model, optimizer, **both, options=whole_ones)
        for step in steps:
            train_step(model, optimizer, *batch(step), cross_entropy)
        return copy.deepcopy(dcs.get_state_dict(model, optimizer, options=whole_ones))

    wanted = run(None, 1, range(3))
    states = pools(4)(run, None, 2, [0])[0]
    assert states[0]["blocks.0.mlp.experts.up"].shape == (EXPERTS, 16, 24)
    states = run(states, 1, [1])
    found = pools(4)(run, states, 1, [2])[0]
    assert apart(found[0], wanted[0]) == []
    moments = {n: s["exp_avg"] for n, s in found[1]["state"].items()}
    assert apart(moments, {n: s["exp_avg"] for n, s in wanted[1]["state"].items()}) == []


# ---- context, and what sees a fault -------------------------------------------------------------


def test_ranks_with_other_tokens_of_the_same_rows(pools):
    """Experts are shared by the ranks of context, or by those of data: both are ranks with other
    tokens, and the loss is the mean of all four."""

    def decoder():
        model = md.zoo.Decoder(width=16, layers=2).double()
        torch.manual_seed(0)
        for layer in model.layers:
            layer.mlp = md.experts.MoE(16, 24, EXPERTS, K).double()
        return model

    def run(names):
        inputs, targets = (each[:4] for each in DATA)
        alone, mesh = decoder(), None
        group, rows = None, slice(None)
        if names:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            group, rows = mesh.get_group(1), slice(mesh.get_local_rank(0), None, 2)
        model = md.experts.parallelize(decoder(), mesh)
        model = md.DistributedDataParallel(model) if names else model
        model = md.ContextParallel(model, process_group=group)
        for step in range(2):
            for each in model, alone:
                each.zero_grad()
            model(inputs[rows], targets[rows]).backward()
            cross_entropy(alone(inputs), targets).backward()
            norm = md.experts.clip_grad_norm_(model, 0.1)
            wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            assert relative_difference(norm, wanted) < 1e-12, step
            for each in model, alone:
                torch.optim.SGD(each.parameters(), lr=1.0).step()
        return apart(whole(model), whole(alone))

    assert pools(4)(run, ("data", "experts")) == [[]] * 4
    assert pools(4)(run, ("experts", "context")) == [[]] * 4
    assert pools(4)(run, None) == [[]] * 4  # all share rows and experts


def watched(divided_by):
    model = shared("ddp", 2, transformer())
    for layer in model.blocks:
        layer.mlp.experts.divisor = divided_by
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        count = batch[1].numel()
        return cross_entropy(model(batch[0]), batch[1]) * count, count

    watch = md.watch(model, optimizer, bare=transformer, loss=loss)
    for step in range(2):
        with watch([batch(step)]):
            train_step(model, optimizer, *batch(step), cross_entropy)


def test_watch_says_nothing_of_a_right_loop_and_finds_a_wrong_factor(pools):
    assert pools(4)(raised, watched, 4) == [None] * 4
    told = pools(4)(raised, watched, 2)  # by the replicas of an expert, and not by the ranks
    assert all("experts" in each for each in told), told
