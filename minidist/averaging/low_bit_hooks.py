"""Gradients of 8 bits and of 1 bit, with error feedback (lesson: beyond_gradients).

    state = LowBitState()
    ddp.register_comm_hook(state, one_bit_hook)

Numbers of few bits cannot be added up on their way, as an all_reduce does. So the sum is taken
apart: an all_to_all brings each rank its block of everybody's gradients, in few bits; it decodes
them, takes the mean, and encodes that; an all_gather brings the blocks of the mean to all ranks.
These are the two halves of a ring's all_reduce, and as many numbers.

What the code cannot say is not lost: each rank adds its *error*, what it wanted to send less what
it sent, to its next gradient, and so does the rank that has encoded a block of the mean. Seide et
al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs" (Interspeech); Karimireddy et al. 2019, "Error Feedback Fixes SignSGD",
arXiv 1901.09847.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

SCALE = 4  # bytes of a row's scale, a float32


class LowBitState:
    """What `int8_hook` and `one_bit_hook` remember: the errors, (1 + 1/N) times the gradients'
    bytes.

    process_group: the ranks of the DistributedDataParallel; None is the default group.
    use_error_feedback: False forgets the errors. One bit then goes astray: where the ranks'
        gradients have opposite signs, nothing is left of how large each was.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, use_error_feedback: bool = True
    ) -> None:
        self.process_group, self.use_error_feedback = process_group, use_error_feedback
        self._errors: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}

    def errors(
        self, bucket: dist.GradBucket, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this bucket's blocks (N, S), and of the mean of one block (1, S). Buckets are made
        anew after the first backward pass: what was kept of another one is forgotten."""
        parameters = [id(parameter) for parameter in bucket.parameters()]
        known, *_ = self._errors.get(bucket.index(), ([],))
        if known != parameters or not self.use_error_feedback:
            zeros = torch.zeros_like(blocks), torch.zeros_like(blocks[:1])
            self._errors[bucket.index()] = parameters, *zeros
        _, of_blocks, of_mean = self._errors[bucket.index()]
        return of_blocks, of_mean


def int8_hook(state: LowBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as whole numbers from -127 to 127 times a scale for each block: a
    fourth of float32's bytes.

    The hook waits for its two collectives, so no bucket overlaps with backward: the second one
    depends on the first, and in between another bucket could leave, on some ranks before it and on
    others after it. Ranks must call collectives in one order.
    """
    return _averaged(state, bucket, INT8)


def one_bit_hook(state: LowBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as signs, times the mean magnitude of each block: a 32nd of float32's
    bytes. Waits, as `int8_hook` does."""
    return _averaged(state, bucket, SIGN)


class Code(NamedTuple):
    """Rows (R, S) of numbers to bytes (R, b) and scales (R, 1), and back. S is a multiple of 8. The
    mask `real` (R, S) says which numbers do not just fill a row: those that do are 0."""

    encode: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[[torch.Tensor], torch.Tensor]  # bytes to (R, S), to be scaled


def _averaged(
    state: LowBitState, bucket: dist.GradBucket, code: Code
) -> torch.futures.Future[torch.Tensor]:
    flat, group = bucket.buffer(), state.process_group  # (n,)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = 8 * -(-len(flat) // (8 * ranks))  # S: of a block, in whole bytes also with one bit
    blocks = F.pad(flat, (0, ranks * size - len(flat))).view(ranks, size)  # (N, S)
    real = (torch.arange(ranks * size, device=flat.device) < len(flat)).view(ranks, size)
    of_blocks, of_mean = state.errors(bucket, blocks)

    sent = _compress(blocks, of_blocks, real, code)  # (N, SCALE + b)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = _decompress(received, flat.dtype, code).mean(0, keepdim=True)  # (1, S), of our block
    own = _compress(mean, of_mean, real[rank : rank + 1], code)
    whole = torch.empty_like(sent)
    dist.all_gather_single(whole, own, group=group)
    flat.copy_(_decompress(whole, flat.dtype, code).flatten()[: len(flat)])

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else []
    )
    future.set_result(flat)
    return future


def _compress(
    rows: torch.Tensor, error: torch.Tensor, real: torch.Tensor, code: Code
) -> torch.Tensor:
    """The message for the rows and what was left of the last one, (R, S) to (R, SCALE + b). What
    is left of this one becomes the error."""
    wanted = (rows + error).masked_fill(~real, 0)
    data, scale = code.encode(wanted, real)
    message = torch.cat([scale.float().view(torch.uint8), data], dim=1)
    # A gradient that has overflowed is sent as such, and not again.
    error.copy_((wanted - _decompress(message, rows.dtype, code)).nan_to_num(0, 0, 0))
    return message


def _decompress(message: torch.Tensor, dtype: torch.dtype, code: Code) -> torch.Tensor:
    scale = message[:, :SCALE].flatten().view(torch.float32).unsqueeze(1)  # (R, 1)
    return code.decode(message[:, SCALE:]).to(dtype) * scale.to(dtype)


def _encode_int8(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / 127
    steps = (rows / scale.clamp_min(torch.finfo(rows.dtype).tiny)).round()
    steps = steps.clamp(-127, 127)  # a scale of 16 bits may be rounded down
    return steps.to(torch.int8).view(torch.uint8), scale


def _decode_int8(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int8)


def _encode_sign(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = (rows >= 0).unflatten(1, (-1, 8)).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    data = (bits << places).sum(-1, dtype=torch.uint8)
    wide = torch.promote_types(rows.dtype, torch.float32)  # a sum of 16 bits would overflow
    total = rows.abs().sum(1, keepdim=True, dtype=wide)
    return data, total / real.sum(1, keepdim=True).clamp_min(1)


def _decode_sign(data: torch.Tensor) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    bits = (data.unsqueeze(-1) >> places) & 1  # (R, b, 8)
    return bits.flatten(1).to(torch.int8) * 2 - 1


INT8 = Code(_encode_int8, _decode_int8)
SIGN = Code(_encode_sign, _decode_sign)
