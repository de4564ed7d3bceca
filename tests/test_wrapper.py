"""A strategy's checkpoint is that of the bare module."""

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
def test_a_checkpoint_has_the_names_of_the_bare_module(way: str) -> None:
    wrapped, plain = (make() for make in WAYS[way])
    theirs = plain.state_dict()
    assert list(wrapped.state_dict()) == list(theirs)
    assert list(wrapped.state_dict()._metadata) == list(theirs._metadata)
    before = list(theirs)
    wrapped.load_state_dict(theirs)
    assert list(theirs) == before  # loading leaves the checkpoint as it was
    for name, ours in wrapped.state_dict().items():
        assert torch.equal(ours, theirs[name]), name
    plain.load_state_dict(wrapped.state_dict())


def test_what_a_wrapper_has_not_is_read_from_the_module() -> None:
    wrapped = Plain(nn.Linear(2, 3))
    wrapped.new = "new"  # as in torch
    assert wrapped.out_features == 3 and wrapped.new == "new" and not hasattr(wrapped.module, "new")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'depth'"):
        _ = wrapped.depth
