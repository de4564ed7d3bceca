"""What torch cannot pickle goes to ranks and back all the same: its ops, by name, for a function
may say `torch.ops`; and the memory of tensors of newer dtypes, such as float8 and uint16."""

import copyreg
import io
import operator
from typing import Any

import torch
from torch import _ops


def _found(name: str) -> Any:
    """The op `aten.mm.default`, all of `aten.mm`, or `aten`."""
    return operator.attrgetter(name)(torch.ops)


def _packed(storage: torch.UntypedStorage) -> tuple[Any, tuple[bytes]]:
    """Its bytes, in torch's newer format: torch pickles a storage in the older one, and cannot read
    that for a dtype that is newer. What reads it is torch's: a pickle needs no minidist."""
    file = io.BytesIO()
    torch.save(storage, file)
    return torch.storage._load_from_bytes, (file.getvalue(),)


def register() -> None:
    """Teach pickle about both, for all of this process."""
    copyreg.pickle(torch.UntypedStorage, _packed)
    for kind in (_ops.OpOverload, _ops.OpOverloadPacket):
        copyreg.pickle(kind, lambda op: (_found, (str(op),)))
    copyreg.pickle(_ops._OpNamespace, lambda namespace: (_found, (namespace.name,)))
    copyreg.pickle(_ops._Ops, lambda ops: (getattr, (torch, "ops")))
