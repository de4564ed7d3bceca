"""A strategy's checkpoint is that of the bare module."""

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
    "one around another": (lambda: Plain(Plain(bare())), bare),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_has_the_names_of_the_bare_module(way: str) -> None:
    wrapped, plain = (make() for make in WAYS[way])
    theirs = plain.state_dict()
    assert list(wrapped.state_dict()) == list(theirs)
    assert list(wrapped.state_dict()._metadata) == list(theirs._metadata)
    for _ in range(2):  # loading leaves the checkpoint as it was
        before, metadata = list(theirs), copy.deepcopy(theirs._metadata)
        wrapped.load_state_dict(theirs)
        assert list(theirs) == before and theirs._metadata == metadata
    for name, ours in wrapped.state_dict().items():
        assert torch.equal(ours, theirs[name]), name
    plain.load_state_dict(wrapped.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict(dict(list(theirs.items())[1:]))


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_with_module_before_each_name_loads(way: str) -> None:
    """As torch's DistributedDataParallel saves it, in place of ours."""
    wrapped, plain = (make() for make in WAYS[way])
    at = "0." if way == "within a module" else ""
    theirs = {
        f"{at}module.{name.removeprefix(at)}" if name.startswith(at) else name: value
        for name, value in plain.state_dict().items()
    }
    before = list(theirs)
    assert not any(wrapped.load_state_dict(theirs))
    assert list(theirs) == before
    for name, value in plain.state_dict().items():
        assert torch.equal(wrapped.state_dict()[name], value)


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_has_the_names_of_the_bare_module(way: str) -> None:
    wrapped, plain = (make() for make in WAYS[way])
    wrong = plain.state_dict()
    names = list(wrong)
    del wrong[names[0]]
    wrong[names[1]] = torch.zeros(7)
    wrong[names[0].replace("weight", "other")] = torch.zeros(1)
    told = []
    for model in (wrapped, plain):
        with pytest.raises(RuntimeError) as raised:
            model.load_state_dict(wrong)
        told.append(str(raised.value).split(":", 1)[1])
    assert told[0] == told[1]
    wrong[names[1]] = plain.state_dict()[names[1]]
    ours, theirs = (model.load_state_dict(wrong, strict=False) for model in (wrapped, plain))
    assert ours == theirs and len(ours.missing_keys) == len(ours.unexpected_keys) == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.device = 1.0, "the module's"
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.shift


class Owner(Plain):
    device: str

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device = "the wrapper's"


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_read_and_written_through_wrappers_is_the_modules(copied: bool) -> None:
    wrapped = Owner(Owner(Scaled()))
    wrapped = copy.deepcopy(wrapped) if copied else wrapped
    inner = wrapped.module.module
    assert wrapped.scale == 1.0 and not hasattr(wrapped, "depth")
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'depth'"):
        _ = wrapped.depth
    wrapped.scale = 3.0
    wrapped.shift = torch.ones(2)
    assert wrapped(torch.ones(2)).tolist() == [4.0, 4.0]
    assert not {"scale", "shift"} & vars(wrapped).keys() and "shift" not in wrapped._buffers
    wrapped.layer, wrapped.weight = nn.Identity(), nn.Parameter(torch.ones(2))
    assert inner.layer is wrapped.layer and inner.weight is wrapped.weight
    assert not wrapped._parameters and list(wrapped._modules) == ["module"]
    wrapped.new = "new"  # what neither has is the wrapper's, as in torch
    assert wrapped.new == "new" and not hasattr(inner, "new")
    assert (wrapped.device, inner.device) == ("the wrapper's", "the module's")
    wrapped.device = "mine"  # its own
    assert (wrapped.device, inner.device) == ("mine", "the module's")
