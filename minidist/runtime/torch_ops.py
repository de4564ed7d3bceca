"""torch's ops go to ranks by name: else a function that says `torch.ops` cannot be sent."""

import copyreg
import operator
from typing import Any

import torch
from torch import _ops


def _found(name: str) -> Any:
    """The op `aten.mm.default`, all of `aten.mm`, or `aten`."""
    return operator.attrgetter(name)(torch.ops)


def register() -> None:
    """Teach pickle about ops, for all of this process."""
    for kind in (_ops.OpOverload, _ops.OpOverloadPacket):
        copyreg.pickle(kind, lambda op: (_found, (str(op),)))
    copyreg.pickle(_ops._OpNamespace, lambda namespace: (_found, (namespace.name,)))
    copyreg.pickle(_ops._Ops, lambda ops: (getattr, (torch, "ops")))
