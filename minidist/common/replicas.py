"""Replicas begin equal: every rank has the same parameters, and rank 0's values.

Averaged gradients keep equal replicas equal. They cannot make them so.
Lesson: distributed_data_parallel.
"""

from collections.abc import Iterable, Iterator, Set
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.common.agree import gather
from minidist.common.tensors_in import local_of

_DTENSOR = ", a DTensor"
CHUNK = 25 * 2**20  # bytes of one message, as torch has it: large, and freed soon


def require_same_model(
    module: nn.Module, group: dist.ProcessGroup, left_out: Set[str] = frozenset()
) -> None:
    """Raises ValueError, on every rank of the group, that names the first parameter or buffer
    that is not the same as rank 0's: its name, shape, dtype, layout, kind of device, or whether it
    is trained. Raises TypeError, on every rank, for a DTensor. left_out: names not to compare."""
    lines = [words("parameter", n, p) for n, p in module.named_parameters() if n not in left_out]
    lines += [words("buffer", n, b) for n, b in module.named_buffers() if n not in left_out]
    require_same_lines(lines, group)


def require_same_lines(mine: list[str], group: dist.ProcessGroup) -> None:
    """The same for a description of a model, in `words`. Names the first line that differs."""
    models = gather(group, mine)
    for rank, model in enumerate(models):
        pairs = zip_longest(models[0], model, fillvalue="has no more parameters or buffers")
        for first, other in pairs:
            if first != other:
                raise ValueError(
                    "the ranks have different models. The first difference:\n"
                    f"  rank {dist.get_global_rank(group, 0)}: {first}\n"
                    f"  rank {dist.get_global_rank(group, rank)}: {other}"
                )
    refuse_dtensors(mine)  # only now, for one rank alone may have them


def refuse_dtensors(lines: Iterable[str]) -> None:
    """Raises TypeError for the first of them, in lines that begin with a name, as `words` do."""
    for line in lines:
        if _DTENSOR in line:
            raise TypeError(
                f"{line.partition(',')[0]} is a DTensor, which torch's own strategies take. The "
                "ones here take plain tensors, such as those of md.tensor_parallel's layers"
            )


def require_apart(parameters: Iterable[torch.Tensor], who: str) -> None:
    """Raises ValueError if two of them begin in the same memory, as after `a.data = b.data`: for
    `who`, which gives each memory of its own, they would be two."""
    begins: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        here = parameter.numel() and not parameter.is_meta
        place = local_of(parameter).data_ptr() if here else 0
        if place and begins.setdefault(place, parameter) is not parameter:
            raise ValueError(
                f"two parameters share memory, of shapes {tuple(begins[place].shape)} and "
                f"{tuple(parameter.shape)}, and {who} would train them apart. Make them one "
                "parameter, as by decoder.weight = encoder.weight"
            )


def words(kind: str, name: str, tensor: torch.Tensor) -> str:
    """A tensor of a model, as messages name it."""
    return f"{kind} {name}, {_tensor(tensor) if kind == 'buffer' else describe(tensor)}"


def describe(parameter: torch.Tensor) -> str:
    """A parameter, without its name."""
    text = _tensor(parameter)
    if not parameter.is_contiguous():  # its gradient lies in a bucket as it does itself
        text += f", strides {parameter.stride()}"
    return text + ("" if parameter.requires_grad else ", frozen")


def mark_as_part(parameters: Iterable[Any], of: str) -> None:
    """Say of parameters which part of a model they are. Another rank's, of another part, are no
    replicas of them, though they may look so to an optimizer, which knows no names."""
    for parameter in parameters:
        parameter._part = of


def copy_marks(parameters: Iterable[Any], to: Iterable[Any]) -> None:
    """A copy of a part of a model is one too."""
    for parameter, copied in zip(parameters, to, strict=True):
        if hasattr(parameter, "_part"):
            copied._part = parameter._part


def require_replicas(parameters: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Raises ValueError, on every rank, if `mark_as_part` has said of two ranks' parameters that
    they are of different parts."""
    by_rank = gather(group, [getattr(parameter, "_part", "") for parameter in parameters])
    for number, marks in enumerate(zip(*by_rank, strict=False)):
        # A rank without a mark has the whole model: it is trained otherwise now.
        if len(parts := sorted({*marks} - {""})) > 1:
            raise ValueError(
                f"parameter {number} is another one on each rank, {' and '.join(parts)}: the "
                "ranks of this group have parts of one model, and no replicas"
            )


def _tensor(tensor: torch.Tensor) -> str:
    text = f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
    text += _DTENSOR if hasattr(tensor, "placements") else ""
    return text if tensor.device.type == "cpu" else f"{text}, on {tensor.device.type}"


def broadcast_state(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0
) -> None:
    """Give every rank of the group the values that `source` (its rank in the group) has.

    Tensors of any dtypes travel together, as bytes: one message for each 25 MiB of a device. Small
    messages cost their latency, not their size. Lesson: collectives.
    """
    for chunk in _chunks(tensors):
        everything = [_as_bytes(tensor) for tensor in chunk]
        together = everything[0] if len(chunk) == 1 else torch.cat(everything)
        dist.broadcast(together, group=group, group_src=source)
        pieces = together.split([tensor.nbytes for tensor in chunk])
        for tensor, piece in zip(chunk, pieces, strict=True):
            if piece.data_ptr() != tensor.data_ptr():
                once = each_once(tensor)
                first = tuple(map(slice, once.shape))
                once.copy_(piece.view(tensor.dtype).view(tensor.shape)[first])


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is expanded each element of its memory once, for torch does not write to
    one; any other as it is."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device, of up to 25 MiB together. Wide elements come first: so that each
    tensor's bytes begin where its dtype may begin."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            # Not detach(): autograd would take it for an error of the user's that a forward pass
            # overwrites buffers which the one before it has saved for backward.
            by_device.setdefault(tensor.device, []).append(tensor.data)
    for together in by_device.values():
        chunk: list[torch.Tensor] = []
        for tensor in sorted(together, key=torch.Tensor.element_size, reverse=True):
            if chunk and sum(t.nbytes for t in chunk) + tensor.nbytes > CHUNK:
                yield chunk
                chunk = []
            chunk.append(tensor)
        yield chunk


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, or a copy."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # A tensor of one element may have any stride, and is contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
