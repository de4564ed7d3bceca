"""How calls and results become bytes: cloudpickle, and what it leaves out.

Of functions, the file that they stand in; torch's ops, for a function may say `torch.ops`; the
memory of tensors of newer dtypes, such as float8 and uint16.
"""

import io
import operator
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from types import CodeType
from typing import Any

import cloudpickle
import torch
from torch import _ops


def _code(code: CodeType) -> Any:
    """By its file's name errors find a line. cloudpickle 3.1.3 puts another in its place."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _of_file, (make, parts, code.co_filename)


def _of_file(make: Any, parts: tuple[Any, ...], filename: str) -> Any:
    return make(*parts).replace(co_filename=filename)


def _found(name: str) -> Any:
    """The op `aten.mm.default`, all of `aten.mm`, or `aten`."""
    return operator.attrgetter(name)(torch.ops)


def _storage(storage: torch.UntypedStorage) -> tuple[Any, tuple[bytes]]:
    """Its bytes, in torch's newer format: torch pickles a storage in the older one, and cannot read
    that for a dtype that is newer."""
    file = io.BytesIO()
    torch.save(storage, file)
    return torch.storage._load_from_bytes, (file.getvalue(),)


class Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap(
        {CodeType: _code, torch.UntypedStorage: _storage},
        dict.fromkeys((_ops.OpOverload, _ops.OpOverloadPacket), lambda op: (_found, (str(op),))),
        {_ops._OpNamespace: lambda namespace: (_found, (namespace.name,))},
        {_ops._Ops: lambda _: (getattr, (torch, "ops"))},
        cloudpickle.Pickler.dispatch_table,
    )


class _ForChildren(Pickler):
    """For processes that this one starts: they share its tensors and pipes."""

    dispatch_table = ChainMap(vars(ForkingPickler)["_extra_reducers"], Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def dump_to_child(obj: Any, file: Any, protocol: int | None = None) -> None:
    """In a rank, in place of multiprocessing's `dump`: that sends a class of a cell, or of the
    script, by its name in `__main__`, and no rank, nor its child, has run that."""
    _ForChildren(file, protocol).dump(obj)
