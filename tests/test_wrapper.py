"""A strategy's checkpoint is that of the bare module."""

import copy

import pytest
import torch
from torch import nn

from minidist.wrapper import Wrapper


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
