"""A gradient is averaged once, as the user's hooks have left it, and only by a wrapper's own pass.

Held against one process, which computes all ranks' shares."""

import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md

DDP = md.DistributedDataParallel
SGD = partial(md.ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=1.0)


def share(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def mine(step=0):
    return share(dist.get_rank(), step)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def sharded(module):
    """Stage 2, with an optimizer whose step leaves each weight less by its gradient."""
    optimizer = SGD(module.parameters())
    return md.ShardedDataParallel(module, optimizer), optimizer


def alone(module, pass_of, ranks=2):
    """The gradients of one process, by the shares of all ranks."""
    for rank in range(ranks):
        (pass_of(module, rank) / ranks).backward()
    return [parameter.grad for parameter in module.parameters()]


def square(module, rank):
    return module(share(rank)).pow(2).mean()


def far(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# ---- hooks of users -----------------------------------------------------------------------------


def freeze(parameter):
    parameter.grad[:2] = 0


def double(gradient):
    return 2 * gradient


HOOKS = {
    "post accumulate": (nn.Parameter.register_post_accumulate_grad_hook, freeze),
    "gradient": (nn.Parameter.register_hook, double),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("wrap", ["torch", "ddp", "zero"])
def test_a_hook_after_wrapping_comes_before_the_bucket(pools, wrap, kind):
    register, hook = HOOKS[kind]

    def train():
        module, plain = net(), net()
        optimizer, model = None, module
        if wrap == "zero":
            model, optimizer = sharded(module)
        else:
            model = (TorchDDP if wrap == "torch" else DDP)(module)
        for each in (module, plain):
            register(each[0].weight, hook)
        theirs = alone(plain, square)
        for step in range(3):  # the buckets are made anew on the way
            model.zero_grad()
            before = [p.detach().clone() for p in module.parameters()]
            square(model, dist.get_rank()).backward()
            ours = [p.grad for p in module.parameters()]
            if optimizer is not None:
                optimizer.step()
                ours = [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]
                with torch.no_grad():
                    for b, p in zip(before, module.parameters(), strict=True):
                        p.copy_(b)
            if (apart := far(ours, theirs)) > 1e-12:
                return step, apart
        return None

    assert pools(2)(train) == [None, None]


def test_a_hook_after_the_forward_pass_is_refused(pools):
    """It would run after the gradient has gone into its bucket."""

    def train():
        model = DDP(net())
        loss = square(model, dist.get_rank())
        model.module[0].weight.register_post_accumulate_grad_hook(freeze)
        with pytest.raises(RuntimeError, match="a hook of 0.weight was registered after the forw"):
            loss.backward()
        model.zero_grad()
        square(model, dist.get_rank()).backward()
        return float(model.module[0].weight.grad[:2].abs().max())

    assert pools(2)(train) == [0.0, 0.0]


# ---- two wrappers -------------------------------------------------------------------------------


def twice():
    return DDP(DDP(net()))


def whole_and_part():
    first, _, last = net()
    return DDP(nn.Sequential(DDP(first), last))


def zero_twice():
    module = net()
    optimizer = SGD(module.parameters())
    return md.ShardedDataParallel(md.ShardedDataParallel(module, optimizer), optimizer)


def ddp_around_zero():
    return DDP(sharded(net())[0])


@pytest.mark.parametrize("make", [twice, whole_and_part, zero_twice, ddp_around_zero])
def test_a_parameter_in_two_wrappers_of_one_pass_is_refused(pools, make):
    def train():
        with pytest.raises(RuntimeError, match=r"parameter .* is in two wrappers, and this back"):
            square(make(), dist.get_rank()).backward()

    pools(2)(train)


def parts():
    torch.manual_seed(0)
    return [nn.Linear(4, n).double() for n in (4, 2, 3)]


def test_two_wrappers_that_share_a_part(pools):
    """Each in a backward pass of its own: the gradients add up. Both in one: refused."""

    def train():
        encoder, *heads = parts()
        models = [DDP(nn.Sequential(encoder, head)) for head in heads]
        for model in models:
            square(model, dist.get_rank()).backward()
        plain, *plain_heads = parts()
        for head in plain_heads:
            alone(nn.Sequential(plain, head), square)
        apart = far([encoder.weight.grad], [plain.weight.grad])
        with pytest.raises(RuntimeError, match=r"parameter 0\.\w+ is in two wrappers"):
            sum(square(model, dist.get_rank()) for model in models).backward()
        return apart

    assert max(pools(2)(train)) < 1e-12


def test_a_gradient_that_was_removed_is_not_clipped_with_the_others(pools):
    def train():
        module, plain = net(), net()
        model, _ = sharded(module)
        square(model, dist.get_rank()).backward()
        alone(plain, square)
        module[0].weight.grad = plain[0].weight.grad = None
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        return float((model.clip_grad_norm_(0.1) - wanted).abs())

    assert max(pools(2)(train)) < 1e-12


@pytest.mark.parametrize("keep", [True, False])
def test_shards_of_gradients_add_up_in_a_model_that_was_wrapped_before(pools, keep):
    """The wrapper that a notebook's cell made first may be there still, with its hooks."""

    def train():
        module = net()
        old, optimizer = sharded(module)
        square(old, dist.get_rank()).backward()
        shard = weakref.ref(optimizer.shards[0])
        model, optimizer = sharded(module)
        if not keep:
            del old
            gc.collect()
            assert shard() is None
        plain, before = net(), [p.detach().clone() for p in module.parameters()]
        for _ in range(2):
            square(model, dist.get_rank()).backward()
        optimizer.step()
        theirs = [2 * gradient for gradient in alone(plain, square)]
        ours = [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]
        return far(ours, theirs)

    assert max(pools(2)(train)) < 1e-12


def test_shards_of_gradients_add_up_in_the_second_wrapper_of_an_optimizer(pools):
    def train():
        module = net()
        old, optimizer = sharded(module)
        model = md.ShardedDataParallel(module, optimizer)
        before = [p.detach().clone() for p in module.parameters()]
        for _ in range(2):
            square(model, dist.get_rank()).backward()
        optimizer.step()
        theirs = [2 * gradient for gradient in alone(net(), square)]
        ours = [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]
        return far(ours, theirs), old.module is module

    for apart, kept in pools(2)(train):
        assert apart < 1e-12 and kept


def test_a_wrapper_whose_output_is_left_alone_does_not_average(pools):
    """A cell is run again: the wrapper of before is kept alive by what it gave."""

    def train():
        module = net()
        kept = [DDP(module)(mine())]
        model = DDP(module)
        square(model, dist.get_rank()).backward()
        apart = far([p.grad for p in module.parameters()], alone(net(), square))
        assert kept
        return apart

    assert max(pools(2)(train)) < 1e-12


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_model_that_was_converted_and_back_is_averaged(pools, with_gradients):
    """Autograd then has other nodes for its parameters, and hooks go with the old ones. Gradients
    that are there are views of the buckets, and get other memory."""

    def run():
        module = net()
        model = DDP(module)
        for _ in range(2):  # after the first the buckets are made anew
            model(mine()).sum().backward()
        if not with_gradients:
            module.zero_grad()
        model.float()
        model.double()
        module.zero_grad(set_to_none=not with_gradients)
        square(model, dist.get_rank()).backward()
        other = net()
        wanted = alone(other, square)
        return far([p.grad for p in module.parameters()], wanted)

    assert max(pools(2)(run)) < 1e-12


class Nothing(torch.autograd.Function):
    """A product whose weight gets a gradient on rank 0 alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad if dist.get_rank() == 0 else None


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
        self.last = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return self.last(Nothing.apply(x, self.weight))


@pytest.mark.parametrize("wrap", ["ddp", "ddp, watched", "zero"])
def test_a_gradient_that_a_function_leaves_out_counts_as_zero(pools, wrap):
    """On rank 1 autograd comes to the weight, and has no gradient for it."""

    def run():
        torch.manual_seed(0)
        module = Product()
        before = module.weight.detach().clone()
        plain = copy.deepcopy(module)
        if wrap == "zero":
            model, optimizer = sharded(module)
        else:
            model = DDP(module, find_unused_parameters=True)
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with md.measure.MemoryTracker(model) if "watched" in wrap else contextlib.nullcontext():
            square(model, dist.get_rank()).backward()
        optimizer.step()
        plain.last(share(0) @ plain.weight).pow(2).mean().backward()
        return far([before - module.weight], [plain.weight.grad / 2])

    assert max(pools(2)(run)) < 1e-12


@pytest.mark.parametrize("not_averaged", [(), (1,)])
def test_shards_stay_where_a_function_leaves_a_gradient_out(pools, not_averaged):
    """Gradients of several passes add up in shards. Rank 1 has none for the weight."""

    def run():
        torch.manual_seed(0)
        module = Product()
        before, plain = module.weight.detach().clone(), copy.deepcopy(module)
        model, optimizer = sharded(module)
        for step in range(2 + len(not_averaged)):
            with model.no_sync() if step in not_averaged else contextlib.nullcontext():
                square(model, dist.get_rank()).backward()
            plain.last(share(0) @ plain.weight).pow(2).mean().backward()
        optimizer.step()
        return far([before - module.weight], [plain.weight.grad / 2])

    assert max(pools(2)(run)) < 1e-12


def test_a_tracker_that_begins_after_the_forward_pass_only_reads(pools):
    def run():
        module = net()
        model = DDP(module)
        loss = square(model, dist.get_rank())
        with md.measure.MemoryTracker(model):
            loss.backward()
        return far([p.grad for p in module.parameters()], alone(net(), square))

    assert max(pools(2)(run)) < 1e-12


@pytest.mark.parametrize("unused", [False, True])
def test_a_part_that_was_converted_and_back_is_averaged(pools, unused):
    """Also the hooks of the user's come first there, though they came later."""

    def run():
        module = net()
        model = DDP(module, find_unused_parameters=unused)
        module[2].float().double()
        square(model, dist.get_rank()).backward()
        module.zero_grad()
        module[0].float().double()
        module[0].weight.register_post_accumulate_grad_hook(freeze)
        square(model, dist.get_rank()).backward()
        plain = net()
        plain[0].weight.register_post_accumulate_grad_hook(freeze)
        return far([p.grad for p in module.parameters()], alone(plain, square))

    assert max(pools(2)(run)) < 1e-12


def of_forces(module, rank):
    x = share(rank).requires_grad_()
    (force,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return force.pow(2).mean()


@pytest.mark.parametrize("unused", [False, True])
def test_a_loss_of_gradients_alone_is_averaged(pools, unused):
    """Its backward pass comes through no output of the wrapper."""

    def run():
        module = nn.Sequential(net()[0], nn.Tanh(), nn.Linear(3, 2, bias=False).double())
        plain = nn.Sequential(*module)
        wanted = [g.clone() for g in alone(plain, of_forces)]
        module.zero_grad()
        model = DDP(module, find_unused_parameters=unused)
        of_forces(model, dist.get_rank()).backward()
        return far([p.grad for p in module.parameters()], wanted)

    assert max(pools(2)(run)) < 1e-12


def test_inputs_gradients_by_autograd_grad_are_no_pass_to_average(pools):
    """Adversarial inputs, and then accumulation: this rank's own gradients."""

    def train():
        module, plain = net(), net()
        model, x = DDP(module), mine().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        with model.no_sync():
            square(model, dist.get_rank()).backward()
        square(plain, dist.get_rank()).backward()
        apart = far([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
        torch.autograd.grad(model(x).sum(), x)
        model.zero_grad()
        square(model, dist.get_rank()).backward()
        theirs = alone(net(), square)
        return max(apart, far([p.grad for p in module.parameters()], theirs))

    assert max(pools(2)(train)) < 1e-12


# ---- methods of the module ----------------------------------------------------------------------


class Model(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        self.hidden = self.net(x)
        return self.hidden

    def penalty(self, weight=1.0):
        return weight * sum(p.pow(2).sum() for p in self.parameters())

    def fit(self, x):
        self(x).pow(2).mean().backward()


def wrapped(wrap):
    return DDP(Model()) if wrap == "ddp" else sharded(Model())[0]


WRAPS = pytest.mark.parametrize("wrap", ["ddp", "zero"])


@WRAPS
@pytest.mark.parametrize("name", ["penalty", "fit"])
def test_methods_are_the_modules_alone(pools, wrap, name):
    """As in torch, whose class has none of the module's attributes."""

    def look():
        model = wrapped(wrap)
        for _ in range(2):  # before the first pass, and after one
            assert not hasattr(model, name) and hasattr(model.module, name)
            with pytest.raises(AttributeError, match=rf"^\w+DataParallel has no {name}\(\): "):
                getattr(model, name)
            square(model, dist.get_rank()).backward()
        assert model.width == 4 and model.hidden is model.module.hidden

    pools(2)(look)


@WRAPS
def test_the_bare_module_computes_beside_a_pass_and_trains_alone_without_one(pools, wrap):
    def train():
        model = wrapped(wrap)
        for _ in range(2):
            model.module.fit(mine())
            model.module.penalty().backward()
            model.zero_grad()
            loss, beside = square(model, dist.get_rank()), model.module.penalty(0.5)
            beside.backward()
            loss.backward()
            model.zero_grad()
        (square(model, dist.get_rank()) + model.module.penalty(0.5)).backward()
        theirs = alone(plain := Model(), lambda m, rank: square(m, rank) + m.penalty(0.5))
        if wrap == "ddp":
            return far([p.grad for p in model.parameters()], theirs)
        model._optimizers[0].step()  # each weight becomes less by its gradient
        wanted = [p - grad for p, grad in zip(plain.parameters(), theirs, strict=True)]
        return far(model.parameters(), wanted)

    assert max(pools(2)(train)) < 1e-12


@WRAPS
def test_a_gradient_may_be_detached_in_place(pools, wrap):
    """As old scripts do in zero_grad of their own."""

    def train():
        model = wrapped(wrap)
        of_zero = model._optimizers[0].shards if wrap == "zero" else []
        for _ in range(2):
            square(model, dist.get_rank()).backward()
            for held in of_zero or model.parameters():
                held.grad.detach_().zero_()
        square(model, dist.get_rank()).backward()
        plain = Model()
        theirs = alone(plain, square)
        if wrap == "ddp":
            return far([p.grad for p in model.parameters()], theirs)
        model._optimizers[0].step()
        wanted = [p - grad for p, grad in zip(plain.parameters(), theirs, strict=True)]
        return far(model.parameters(), wanted)

    assert max(pools(2)(train)) < 1e-12


# ---- parts of the module ------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.heads = nn.Linear(4, 3), nn.ModuleList([nn.Linear(3, 2), nn.Tanh()])
        self.double()

    def forward(self, x):
        for each in (self.encoder, *self.heads):
            x = each(x)
        return x


def by_a_layer(model):
    return model.encoder(mine())


def by_a_layer_in_a_list(model):
    return model.heads[0](torch.ones(1, 3).double())


def by_a_parameter(model):
    return model.encoder.weight.pow(2)


def wrapped_parts(wrap):
    return DDP(Parts()) if wrap == "ddp" else sharded(Parts())[0]


@WRAPS
@pytest.mark.parametrize("use", [by_a_layer, by_a_layer_in_a_list, by_a_parameter])
def test_a_part_that_trains_past_the_wrapper_is_refused(pools, wrap, use):
    """Torch's class has no such attribute. Here it may be looked at, and used in a pass."""

    def train():
        model = wrapped_parts(wrap)
        part = "heads" if use is by_a_layer_in_a_list else "encoder"
        words = rf"^{part} trains past the \w+DataParallel, which .* do so within no_sync\(\) to"
        for _ in range(2):  # before the first pass, and after one
            use(model)  # an evaluation that forgot no_grad
            with pytest.raises(RuntimeError, match=words):
                use(model).sum().backward()
            model.zero_grad()
            square(model, dist.get_rank()).backward()

    pools(2)(train)


@WRAPS
def test_parts_that_may_be_used(pools, wrap):
    def train():
        model = wrapped_parts(wrap)
        assert model.encoder is model.module.encoder and len(model.heads) == 2
        with model.no_sync():
            by_a_layer(model).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            by_a_layer(model)
        (square(model, dist.get_rank()) + model.encoder(mine()).pow(2).mean()).backward()
        if wrap == "zero":
            return 0.0
        theirs = alone(
            Parts(), lambda m, rank: square(m, rank) + m.encoder(share(rank)).pow(2).mean()
        )
        return far([p.grad for p in model.parameters()], theirs)

    assert max(pools(2)(train)) < 1e-12
