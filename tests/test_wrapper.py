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


def test_what_the_wrapper_has_not_is_read_from_the_module() -> None:
    model = Plain(nn.Linear(2, 3))
    assert model.in_features == 2 and model.weight is model.module.weight
    assert not hasattr(model, "depth") and not hasattr(copy.deepcopy(model), "depth")
