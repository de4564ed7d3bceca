"""DataParallel is the bare module on the full batch: its outputs, gradients and errors."""

import copy
import threading
import traceback
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.data_parallel import DataParallel, gather, replicate, scatter

Pair = namedtuple("Pair", "first second")
CPUS = ["cpu"] * 3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


# ---- as the bare module -------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix in two places, a frozen one, a module that is there twice, nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 6, bias=False)
        self.outward = nn.Linear(6, 6)
        self.outward.weight = self.inward.weight
        shared = nn.Linear(6, 6)
        self.inner = nn.ModuleDict({"a": nn.ModuleList([shared, nn.Tanh()]), "b": shared})
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])
        self.table = nn.ParameterDict({"scale": nn.Parameter(torch.randn(6))})
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(6))
        self.nothing = None
        self.register_parameter("absent", None)
        self.register_buffer("void", None)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.inward, *self.inner["a"], self.inner["b"], self.outward):
            x = part(x)
        for vector in self.vectors:
            x = x * vector
        return (x + self.shift) * self.frozen * self.table["scale"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unsqueeze(1))[0]


def normalized() -> nn.Module:
    weight_norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.ReLU(inplace=True), nn.Linear(6, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "lstm": Recurrent,
    "parametrized": normalized,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    "no parameters": nn.Tanh,
}


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_those_of_the_full_batch(name: str, batch: int) -> None:
    bare = MODULES[name]().double()
    module = copy.deepcopy(bare)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(batch, *([4] if name == "attention" else []), 6, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):  # the second pass adds to the gradients
        output, wanted = DataParallel(module, CPUS)(ours), bare(theirs)
        assert_close(output, wanted)
        F.mse_loss(output, torch.ones_like(output)).backward()
        F.mse_loss(wanted, torch.ones_like(output)).backward()
    assert_close(ours.grad, theirs.grad)
    assert gradients(module).keys() == gradients(bare).keys()
    for parameter, gradient in gradients(bare).items():
        found = gradients(module)[parameter]
        assert (found is None) == (gradient is None), parameter  # frozen or unused
        if gradient is not None:
            assert_close(found, gradient)
    assert [type(part) for part in module.modules()] == [type(part) for part in bare.modules()]
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_training_on_the_digits_gives_the_weights_of_one_process() -> None:
    images, labels = md.zoo.digits(torch.float64)
    trained = []
    for wrap in (lambda module: module, lambda module: DataParallel(module, CPUS)):
        model = md.zoo.mlp(64, 32, 10, dtype=torch.float64)
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
        for start in range(0, 1000, 100):
            loss = F.cross_entropy(wrapped(images[start:][:100]), labels[start:][:100])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained.append(model.state_dict())
    for name, theirs in trained[0].items():
        assert_close(trained[1][name], theirs)


def test_train_and_eval_reach_the_replicas() -> None:
    module = nn.Dropout(1.0)
    parallel, x = DataParallel(module, ["cpu", "cpu"]), torch.ones(4, 1)
    assert parallel(x).sum() == 0
    assert parallel.eval()(x).sum() == 4
    assert not module.training


def test_a_checkpoint_is_that_of_the_bare_module() -> None:
    module = Tied()
    parallel = DataParallel(module, ["cpu", "cpu"])
    assert list(parallel.state_dict()) == list(module.state_dict())
    parallel.load_state_dict(Tied().state_dict())


# ---- scatter and gather -------------------------------------------------------------------


def test_scatter_keeps_the_form_and_passes_the_rest_on() -> None:
    x, y, rest = torch.arange(10), torch.arange(20).view(10, 2), object()
    inputs = (x, {"y": [y, None, "text"]}, Pair(x, (rest,)), OrderedDict(b=3), ())
    shares = scatter(inputs, CPUS)
    assert [share[0].tolist() for share in shares] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for share, rows in zip(shares, y.split(4), strict=True):
        assert torch.equal(share[1]["y"][0], rows) and share[1]["y"][1:] == [None, "text"]
        assert type(share[2]) is Pair and torch.equal(share[2].first, share[0])
        assert share[2].second[0] is rest
        assert share[3] == OrderedDict(b=3) and share[4] == ()


def test_scatter_has_fewer_shares_for_a_small_batch() -> None:
    assert [len(share) for share in scatter(torch.ones(5), ["cpu"] * 4)] == [2, 2, 1]
    assert [len(share) for share in scatter(torch.ones(2), ["cpu"] * 4)] == [1, 1]
    assert [len(share) for share in scatter(torch.ones(0), ["cpu"] * 2)] == [0, 0]
    assert scatter(("no tensor", 1), ["cpu"] * 4) == [("no tensor", 1)]


def test_scatter_refuses_tensors_that_do_not_agree() -> None:
    with pytest.raises(ValueError, match="have different numbers of rows"):
        scatter({"x": torch.ones(8, 2), "y": torch.ones(7)}, ["cpu"] * 2)


def test_gather_joins_nested_outputs() -> None:
    def output(i: int) -> dict:
        x = torch.full((i + 1, 2), float(i), requires_grad=True)
        return {"logits": x, "more": [Pair(x + 1, None), (x.sum(),)]}

    joined = gather([output(0), output(1)], "cpu")
    assert joined["logits"].tolist() == [[0, 0], [1, 1], [1, 1]]
    pair, (losses,) = joined["more"]
    assert type(pair) is Pair and pair.second is None
    assert pair.first.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert losses.tolist() == [0, 4] and losses.requires_grad  # scalars become a vector


def test_positional_and_keyword_arguments_are_scattered_together() -> None:
    class Module(nn.Module):
        def forward(self, x, scale, *, pair, flag=False):
            seen.append((len(x), len(pair[0]), len(pair[1]["b"]), scale, flag))
            return {"sum": x * scale + pair[0] + pair[1]["b"]}

    seen: list[tuple] = []
    x, a, b = torch.randn(3, 5)
    output = DataParallel(Module(), CPUS)(x, 2.0, pair=[a, {"b": b}], flag=True)
    assert torch.equal(output["sum"], x * 2 + a + b)
    assert sorted(seen) == [(1, 1, 1, 2.0, True), (2, 2, 2, 2.0, True), (2, 2, 2, 2.0, True)]
    with pytest.raises(ValueError, match="different numbers of rows"):
        DataParallel(Module(), CPUS)(x, 2.0, pair=[a, {"b": b[:4]}])


def test_a_scalar_of_each_replica_becomes_a_vector_without_a_warning() -> None:
    class Loss(nn.Module):
        def forward(self, x):
            return x.sum()

    assert DataParallel(Loss(), CPUS)(torch.ones(7)).tolist() == [3, 3, 1]
    assert DataParallel(Loss(), ["cpu"])(torch.ones(7)).shape == ()  # the module itself


# ---- replicate ----------------------------------------------------------------------------


def test_a_replica_is_a_copy_whose_gradients_go_home() -> None:
    module = Tied()
    replicas = replicate(module, CPUS)
    for replica in replicas:
        assert type(replica) is Tied and replica is not module
        assert replica.inner["a"][0] is replica.inner["b"] is not module.inner["b"]
        assert replica.inward.weight is replica.outward.weight  # one copy
        names = [name for name, _ in module.named_parameters()]
        assert [name for name, _ in replica.named_parameters()] == names
        for name, parameter in replica.named_parameters():
            own = module.get_parameter(name)
            assert torch.equal(parameter, own), name
            assert parameter.is_leaf != own.requires_grad == parameter.requires_grad, name
    own = [tensor.data_ptr() for tensor in module.state_dict().values()]
    first, *others = [[t.data_ptr() for t in r.state_dict().values()] for r in replicas]
    assert first == own  # the module's memory
    assert all(set(own).isdisjoint(other) for other in others)
    weight = [replica.inward.weight for replica in replicas]
    (weight[0].sum() + 5 * weight[2].sum()).backward()
    assert module.inward.weight.grad.eq(6).all()
    assert all(p.grad is None for n, p in module.named_parameters() if n != "inward.weight")


def test_buffers_of_the_first_replica_stay_and_others_are_lost() -> None:
    bare = nn.BatchNorm1d(4, momentum=0.25).double()
    module, x = copy.deepcopy(bare), torch.randn(9, 4, dtype=torch.float64)
    parallel = DataParallel(module, CPUS)
    for _ in range(3):
        parallel(x)
        bare(x[:3])
    assert_close(module.state_dict(), bare.state_dict())
    assert module.num_batches_tracked == 3 and module.running_mean.abs().sum() > 0


# ---- parallel_apply -----------------------------------------------------------------------


class Calls(nn.Module):
    """Calls a function of its input's first value, in the thread of its replica."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, *rest, **options):
        result = self.function(int(x[0]), *rest, **options)
        return x if result is None else result


def test_replicas_run_at_the_same_time_each_in_its_thread() -> None:
    together = threading.Barrier(3, timeout=20)
    names = {}

    def meet(i: int) -> None:
        together.wait()
        names[i] = threading.current_thread().name

    DataParallel(Calls(meet), CPUS)(torch.arange(3))
    assert names == {i: f"replica {i}" for i in range(3)}
    assert not [t for t in threading.enumerate() if t.name.startswith("replica")]


def states() -> tuple:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), *autocast


@pytest.mark.parametrize(
    "mode",
    [
        torch.enable_grad,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.float16),
    ],
)
def test_threads_have_the_modes_of_the_caller(mode: Callable) -> None:
    seen, outside = [], states()
    linear = nn.Linear(1, 1)
    module = Calls(lambda i: seen.append(states()) or linear(torch.ones(1, 1)))
    with mode():
        output = DataParallel(module, CPUS)(torch.arange(3))
        assert seen == [states()] * 3
        wanted = linear(torch.ones(1, 1))
        assert (output.dtype, output.requires_grad) == (wanted.dtype, wanted.requires_grad)
    assert states() == outside


class OddError(Exception):
    """An exception that needs two arguments, and so cannot be made anew from a text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


def test_an_exception_is_raised_as_it_is_with_replica_and_traceback() -> None:
    def fail(i: int) -> None:
        if i > 0:
            the_line_that_failed(i)

    def the_line_that_failed(i: int) -> None:
        raise OddError(i, "no luck")

    with pytest.raises(OddError) as caught:
        DataParallel(Calls(fail), CPUS)(torch.arange(3))
    assert caught.value.code == 1  # the first in the replicas' order
    assert caught.value.__notes__ == ["This was replica 1, on device cpu."]
    told = "".join(traceback.format_exception(caught.value))
    assert "the_line_that_failed(i)" in told and "in parallel_apply" in told


# ---- devices ------------------------------------------------------------------------------


def test_devices_by_default_and_by_name() -> None:
    parallel = DataParallel(nn.Linear(2, 2))
    gpus = torch.cuda.device_count()
    assert parallel.devices == ([torch.device("cuda", i) for i in range(gpus)] or [CPU])
    assert parallel.output_device == parallel.devices[0]
    mixed = DataParallel(nn.Linear(2, 2), ["cpu", torch.device("cpu"), "cpu:0"], "cpu")
    assert mixed.devices == [CPU] * 3 and mixed.output_device == CPU
    assert mixed(torch.ones(3, 2)).shape == (3, 2)


CPU = torch.device("cpu")


def test_devices_that_are_not_there() -> None:
    module = nn.Linear(2, 2)
    for empty in (lambda: DataParallel(module, []), lambda: scatter(torch.ones(2), [])):
        with pytest.raises(ValueError, match="no devices: name one at least"):
            empty()
    for device in "nowhere", "cuda:99", 99:
        with pytest.raises(ValueError, match=f"there is no device {device!r} here: "):
            DataParallel(module, [device, "cpu"])
        with pytest.raises(ValueError, match=f"there is no device {device!r} here: "):
            DataParallel(module, ["cpu"], output_device=device)


def test_a_module_that_is_elsewhere_is_refused() -> None:
    message = r"must be on cpu, its first device, but its '0.weight' is on meta: call .*\('cpu'\)"
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Sequential(nn.Linear(2, 2, device="meta")), CPUS)(torch.ones(2, 2))
    normalization = nn.BatchNorm1d(2)
    normalization.running_mean = normalization.running_mean.to("meta")
    with pytest.raises(ValueError, match="'running_mean' is on meta"):
        DataParallel(normalization, ["cpu"])(torch.ones(2, 2))


# ---- torch's own, which needs GPUs --------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_torchs_data_parallel_gives_the_same(name: str) -> None:
    ours = nn.Sequential(MODULES[name](), nn.Flatten(), nn.LazyBatchNorm1d()).double().cuda()
    x = torch.randn(9, *([4] if name == "attention" else []), 6).double().cuda()
    with torch.no_grad():
        ours(x)  # the lazy module makes its parameters
    theirs = copy.deepcopy(ours)
    results = []
    for model in DataParallel(ours, [0, 1]), nn.DataParallel(theirs, [0, 1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own
            results.append(model(x))
        results[-1].square().sum().backward()
    assert_close(*results)
    assert_close(ours.state_dict(), theirs.state_dict())
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Torch copies all parameters as one: one that took no part then has a gradient of zeros.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (own, other)]
        assert_close(*grads)
