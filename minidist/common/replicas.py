"""Replicas begin equal: every rank has the same parameters, and rank 0's values.

Averaged gradients keep equal replicas equal. They cannot make them so.
Lesson: distributed_data_parallel.
"""

from collections.abc import Iterable, Iterator, Set
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from minidist.common.agree import gather

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


def require_same_lines(mine: list[str], *groups: dist.ProcessGroup) -> None:
    """As `require_same_model`, for lines that `words` has made; on a mesh, with this rank's group
    along each axis."""
    everyone = [(dist.get_rank(), mine)]
    for group in groups:
        everyone = [each for part in gather(group, everyone) for each in part]
    first_rank, first_model = everyone[0]
    for rank, model in everyone:
        pairs = zip_longest(first_model, model, fillvalue="has no more parameters or buffers")
        for first, other in pairs:
            if first != other:
                raise ValueError(
                    "the ranks have different models. The first difference:\n"
                    f"  rank {first_rank}: {first}\n"
                    f"  rank {rank}: {other}"
                )
    refuse_dtensors(mine)  # only now, for one rank alone may have them


def refuse_dtensors(lines: Iterable[str]) -> None:
    """Raises TypeError if one of the lines, as `words` gives them, is of a DTensor."""
    for line in lines:
        if _DTENSOR in line:
            raise TypeError(
                f"{line.partition(',')[0]} is a DTensor, which torch's own strategies take. The "
                "ones here take plain tensors, such as those of md.tensor_parallel's layers. Leave "
                "out experts: fully_shard by ignored_params, DDP if it wraps what parallelize took"
            )


def words(kind: str, name: str, tensor: torch.Tensor) -> str:
    """A tensor of a model, as messages name it."""
    return f"{kind} {name}, {describe(tensor)}"


def describe(tensor: torch.Tensor) -> str:
    """A parameter or a buffer, without its name."""
    text = f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
    text += _DTENSOR if hasattr(tensor, "placements") else ""
    text += "" if tensor.device.type == "cpu" else f", on {tensor.device.type}"
    if isinstance(tensor, nn.Parameter):
        if not tensor.is_contiguous():  # its gradient lies in a bucket as it does itself
            text += f", strides {tensor.stride()}"
        text += "" if tensor.requires_grad else ", frozen"
    return text


def broadcast_state(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0
) -> None:
    """Give every rank of the group the values that `source` (its rank in the group) has.

    Tensors of any dtypes travel together, as bytes: one message for each 25 MiB of a device. Small
    messages cost their latency, not their size. Lesson: collectives.
    """
    for chunk in _chunks(tensors):
        together = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in chunk])
        dist.broadcast(together, group=group, group_src=source)
        pieces = together.split([tensor.nbytes for tensor in chunk])
        for tensor, piece in zip(chunk, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device, of up to 25 MiB together. Wide elements come first: so that each
    tensor's bytes begin where its dtype may begin."""
    # Not detach(): autograd would take it for an error of the user's that a forward pass overwrites
    # buffers which the one before it has saved for backward.
    filled = [tensor.data for tensor in tensors if tensor.numel()]
    chunk: list[torch.Tensor] = []
    for tensor in sorted(filled, key=lambda t: (str(t.device), -t.element_size())):
        full = sum(t.nbytes for t in chunk) + tensor.nbytes > CHUNK
        if chunk and (full or tensor.device != chunk[0].device):
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk
