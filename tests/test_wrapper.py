"""A strategy's checkpoint is that of the bare module, and so are its attributes."""

import copy

import pytest
import torch
from torch import nn

from minidist.common.wrapper import Wrapper


class Plain(Wrapper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


WAYS = {
    "alone": (lambda: Plain(bare()), bare),
    "within a module": (
        lambda: nn.Sequential(Plain(bare()), nn.Linear(3, 1)),
        lambda: nn.Sequential(bare(), nn.Linear(3, 1)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_has_the_names_of_the_bare_module(way: str, prefix: str) -> None:
    """With "module." before each, as torch's DistributedDataParallel saves it, it loads too."""
    wrapped, plain = (make() for make in WAYS[way])
    theirs = plain.state_dict()
    assert list(wrapped.state_dict()) == list(theirs)
    assert list(wrapped.state_dict()._metadata) == list(theirs._metadata)
    at = "0." if way == "within a module" else ""
    given = theirs.copy()
    for name in [name for name in theirs if name.startswith(at)]:
        given[f"{at}{prefix}{name.removeprefix(at)}"] = given.pop(name)
    before = list(given)
    wrapped.load_state_dict(given)
    assert list(given) == before  # loading leaves the checkpoint as it was
    for name, ours in wrapped.state_dict().items():
        assert torch.equal(ours, theirs[name]), name
    plain.load_state_dict(wrapped.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_has_the_names_of_the_bare_module(way: str) -> None:
    wrapped, plain = (make() for make in WAYS[way])
    wrong = plain.state_dict()
    first, second, *_ = wrong
    del wrong[first]
    wrong[second] = torch.zeros(7)
    wrong[first.replace("weight", "other")] = torch.zeros(1)
    told = []
    for model in (wrapped, plain):
        with pytest.raises(RuntimeError) as raised:
            model.load_state_dict(wrong)
        told.append(str(raised.value).split(":", 1)[1])
    assert told[0] == told[1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.device = 1.0, "the module's"
        self.register_buffer("shift", torch.zeros(2))


class Owner(Plain):
    device: str

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device = "the wrapper's"


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_read_and_written_through_a_wrapper_is_the_modules(copied: bool) -> None:
    wrapped = copy.deepcopy(Owner(Scaled())) if copied else Owner(Scaled())
    inner = wrapped.module
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'depth'"):
        _ = wrapped.depth
    wrapped.scale, wrapped.shift = 3.0, torch.ones(2)
    assert (inner.scale, inner.shift.tolist()) == (3.0, [1.0, 1.0])
    wrapped.layer, wrapped.weight = nn.Identity(), nn.Parameter(torch.ones(2))
    assert inner.layer is wrapped.layer and inner.weight is wrapped.weight
    wrapped.new = "new"  # what neither has is the wrapper's, as in torch
    assert wrapped.new == "new" and not hasattr(inner, "new")
    assert (wrapped.device, inner.device) == ("the wrapper's", "the module's")
