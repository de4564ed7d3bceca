"""Lesson: mixed_precision. Ranks that each have other gradients agree on the scale and on the
step. Held against torch.amp.GradScaler in one process, and against training without a scale."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import minidist as md
from minidist.common.tensors_in import local_of

Adam = partial(torch.optim.Adam, lr=0.01)


def net(dtype=torch.float32):
    return md.zoo.mlp(6, 5, 4, 3, dtype=dtype)


def zero(module):
    return md.ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)


def ddp(module):
    return md.DistributedDataParallel(module), Adam(module.parameters())


def fused(module):
    return md.DistributedDataParallel(module), Adam(module.parameters(), fused=True)


def stage1(module):
    return md.DistributedDataParallel(module), zero(module)


def stage2(module):
    optimizer = zero(module)
    return md.ShardedDataParallel(module, optimizer), optimizer


def sharded(module):
    return fully_shard(module), Adam(module.parameters())


def stage3(module):
    model = md.FullyShardedDataParallel(
        module, auto_wrap_policy=md.fully_sharded.by_class(nn.Linear)
    )
    return model, Adam(model.parameters())


STRATEGIES = [ddp, fused, stage1, stage2, stage3, sharded]
EVERY = pytest.mark.parametrize("strategy", STRATEGIES)


def weights(model):
    found = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.state_dict().values()]
    return torch.cat([p.detach().clone().flatten() for p in found])


def loss_of(model, step, rank, large=1.0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 6, generator=generator) * large
    with torch.autocast("cpu", torch.float16):
        return model(x).float().pow(2).mean()


def train(strategy, overflow, scaler_of, steps=6, ranks=None):
    """Weights and scale after each step, with float16 in which one rank's activations overflow."""
    module = net()
    model, optimizer = strategy(module)
    scaler = scaler_of(init_scale=2.0**10, growth_interval=2)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        model.zero_grad()
        for rank in [dist.get_rank()] if ranks is None else range(ranks):
            large = 1e5 if (step, rank) == overflow else 1.0
            loss = loss_of(model, step, rank, large) / (ranks or 1)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), weights(model)))
    return history


def alone(module):
    return module, Adam(module.parameters())


@EVERY
def test_the_same_as_one_process_whose_batch_overflows(pools, strategy):
    overflow = (2, 1)
    wanted = train(alone, overflow, partial(torch.amp.GradScaler, "cpu"), ranks=2)
    assert [scale for scale, _ in wanted][1:3] == [2.0**11, 2.0**10]
    for found in pools(2)(train, strategy, overflow, md.ShardedGradScaler):
        before = None
        for step, ((scale, ours), (their_scale, theirs)) in enumerate(
            zip(found, wanted, strict=True)
        ):
            assert scale == their_scale
            # float16 sums in another order.
            assert md.parity.relative_difference(ours, theirs) <= 1e-2
            if step == overflow[0]:
                assert torch.equal(ours, before)  # the step was left out
            elif before is not None:
                assert not torch.equal(ours, before)
            before = ours


def test_one_rank_is_the_same_as_torchs_to_the_bit(pools):
    for overflow in None, (2, 0):
        wanted = train(alone, overflow, partial(torch.amp.GradScaler, "cpu"), ranks=1)
        (found,) = pools(1)(train, alone, overflow, md.ShardedGradScaler)
        assert all(a[0] == b[0] and a[1].equal(b[1]) for a, b in zip(found, wanted, strict=True))


def test_an_infinity_that_only_one_rank_can_see(pools):
    """Not in the data, which an all_reduce would spread: in one element of one rank's part."""

    def spoilt(strategy, bad):
        module = net()
        model, optimizer = strategy(module)
        scaler = md.ShardedGradScaler(init_scale=8.0)
        scales, before = [], weights(model)
        for step in range(2):
            optimizer.zero_grad()
            model.zero_grad()
            scaler.scale(loss_of(model, step, dist.get_rank())).backward()
            if step == 0 and dist.get_rank() == 1:
                held = [*getattr(optimizer, "shards", []), *module.parameters()]
                gradient = next(p.grad for p in held if p.grad is not None and p.grad.numel())
                getattr(gradient, "to_local", lambda own=gradient: own)().view(-1)[-1] = bad
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if step == 0:
                same = torch.equal(before, weights(model))
        return scales, same, torch.equal(before, weights(model))

    for strategy in STRATEGIES:
        for bad in (float("inf"), float("nan")):
            found = pools(2)(spoilt, strategy, bad)
            assert found == [([4.0, 4.0], True, False)] * 2, (strategy, bad)


@pytest.mark.parametrize(
    ("sizes", "shard"), [((1, 2, 2), None), ((2, 1, 2), md.FullyShardedDataParallel)]
)
def test_on_a_mesh_an_infinity_of_one_rank_leaves_out_the_step(pools, sizes, shard):
    """And the other steps, which are clipped, are those of one process that scales nothing."""

    def meshed():
        dense = md.zoo.Transformer(16, 6, width=8, heads=2, layers=1).double()
        dense.head.weight = nn.Parameter(dense.head.weight.detach().clone())
        mesh = md.mixed.mesh(*sizes)
        model = md.mixed.MixedParallel(copy.deepcopy(dense), mesh, 2, shard=shard)
        optimizer, alone = Adam(model.parameters()), Adam(dense.parameters())
        scaler = md.ShardedGradScaler("cpu", init_scale=2.0**10)
        replica, found = mesh.get_local_rank("data"), []
        tokens = torch.randint(16, (12, 7), generator=torch.Generator().manual_seed(0))
        for step, rows in enumerate(tokens.split(4)):
            inputs, targets = rows[:, :-1], rows[:, 1:]
            own = slice(replica, None, mesh["data"].size())
            optimizer.zero_grad()
            model.train_step(
                inputs[own], targets[own], lambda y, t: scaler.scale(model.cross_entropy(y, t))
            )
            if step == 1 and dist.get_rank() == 2:
                gradients = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
                next(g for g in gradients if g.numel()).view(-1)[-1] = float("inf")
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(0.05)
            scaler.step(optimizer)
            scaler.update()
            if step != 1:
                alone.zero_grad()
                md.parity.cross_entropy(dense(inputs), targets).backward()
                wanted = nn.utils.clip_grad_norm_(dense.parameters(), 0.05)
                alone.step()
                found.append(md.parity.relative_difference(norm, wanted))
            full, state = model.full_state_dict(), dense.state_dict()
            found += [md.parity.relative_difference(full[name], state[name]) for name in state]
        return max(found), scaler.get_scale()

    for apart, scale in pools(4)(meshed):
        assert apart <= 1e-11 and scale == 2.0**9


def test_unscaled_gradients_are_clipped(pools):
    def clipped(strategy):
        found = []
        for make, ranks in ((strategy, [dist.get_rank()]), (alone, [0, 1])):
            module = net(torch.float64)
            model, optimizer = make(module)
            scaler = md.ShardedGradScaler() if make is strategy else torch.amp.GradScaler("cpu")
            for rank in ranks:
                x = torch.arange(6.0, dtype=torch.float64) + rank
                scaler.scale(model(x).pow(2).sum() / len(ranks)).backward()
            scaler.unscale_(optimizer)
            of = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
            norm = getattr(model, "clip_grad_norm_", of)(0.01)
            scaler.step(optimizer)
            norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()
            found.append(torch.cat([weights(model), norm.view(1)]))
        return md.parity.relative_difference(*found)

    for strategy in STRATEGIES:
        assert max(pools(2)(clipped, strategy)) <= 1e-12, strategy


def test_a_rank_without_gradients_and_a_group_of_some(pools):
    def some():
        group = dist.new_group([0, 2])
        if dist.get_rank() % 2:
            return None
        p = nn.Parameter(torch.ones(3))
        q = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p, q], lr=1.0)
        scaler = md.ShardedGradScaler(process_group=group, init_scale=4.0)
        scales = []
        for bad in (1.0, float("inf")):
            optimizer.zero_grad()
            if dist.get_rank() == 2:
                scaler.scale((p * bad).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, p.tolist()

    found = pools(4)(some)
    assert found == [([4.0, 2.0], [1.0] * 3), None, ([4.0, 2.0], [0.0] * 3), None]


def test_traffic_and_a_scaler_that_is_off(pools):
    def counted():
        module = net()
        optimizer = Adam(module.parameters())
        calls = []
        for enabled in (True, False):
            scaler = md.ShardedGradScaler(enabled=enabled)
            scaler.scale(loss_of(module, 0, 0)).backward()
            with md.measure.TrafficCounter() as traffic:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            calls.append(traffic.calls)
        return calls, scaler.is_enabled(), scaler.get_scale()

    assert pools(2)(counted) == [([{"all_reduce": (1, 16)}, {}], False, 1.0)] * 2


# ---- mistakes ---------------------------------------------------------------------------------


def before_backward(rank, module, optimizer, scaler):
    scaler.scale(loss_of(module, 0, 0))
    scaler.step(optimizer)


def of_another(rank, module, optimizer, scaler):
    scaler.scale(loss_of(module, 0, 0)).backward()
    scaler.step(Adam(net().parameters()))


def unscaled_twice(rank, module, optimizer, scaler):
    scaler.scale(loss_of(module, 0, 0)).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def other_scales(rank, module, optimizer, scaler):
    if rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**7})
    scaler.scale(loss_of(module, 0, 0)).backward()
    before = weights(module)
    try:
        scaler.step(optimizer)
    finally:
        assert torch.equal(before, weights(module))


MISTAKES = {
    "step before backward": (before_backward, "no rank has a gradient to unscale"),
    "another optimizer": (of_another, "no rank has a gradient to unscale"),
    "unscale_ twice": (unscaled_twice, "already been called on this optimizer"),
    "scales": (other_scales, "the ranks' scales differ, from 128 to 65536"),
}


def test_mistakes_are_told_on_every_rank(pools):
    def told(fault):
        module = net()
        try:
            fault(dist.get_rank(), module, Adam(module.parameters()), md.ShardedGradScaler())
        except RuntimeError as error:
            return str(error)

    for name, (fault, words) in MISTAKES.items():
        for found in pools(2)(told, fault):
            assert found is not None and words in found, (name, found)


def test_no_process_group():
    with pytest.raises(RuntimeError, match="ShardedGradScaler works within a process group"):
        md.ShardedGradScaler()
