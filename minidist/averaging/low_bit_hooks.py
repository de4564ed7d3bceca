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

import torch
import torch.distributed as dist
import torch.nn.functional as F

SCALE = 4  # bytes of a row's scale, a float32

# Rows (R, S) of numbers to bytes (R, b) and scales (R, 1), and bytes to (R, S), to be scaled. The
# mask `real` (R, S) says which numbers do not just fill a row up to a multiple of 8, as zeros.
Encode = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Decode = Callable[[torch.Tensor], torch.Tensor]


class LowBitState:
    """What `int8_hook` and `one_bit_hook` remember: the errors, (1 + 1/N) times the gradients'
    bytes. process_group: the ranks of the DistributedDataParallel; None is the default group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._errors: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}

    def errors(self, bucket: dist.GradBucket, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of this bucket's blocks (N, S), and of the mean of one block (1, S). Buckets are made
        anew after the first backward pass: what was kept of another one is forgotten."""
        parameters = [id(parameter) for parameter in bucket.parameters()]
        known, *errors = self._errors.get(bucket.index(), ([],))
        if known == parameters:
            return tuple(errors)
        zeros = torch.zeros_like(rows), torch.zeros_like(rows[:1])
        self._errors[bucket.index()] = parameters, *zeros
        return zeros


def int8_hook(state: LowBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as whole numbers from -127 to 127 times a scale for each block: a
    fourth of float32's bytes.

    The hook waits for its two collectives, so no bucket overlaps with backward. The second depends
    on the first, and in between another bucket could leave, in another order on each rank.
    """
    return _averaged(state, bucket, _encode_int8, _decode_int8)


def one_bit_hook(state: LowBitState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients as signs, times the mean magnitude of each block: a 32nd of float32's
    bytes. Waits, as `int8_hook` does."""
    return _averaged(state, bucket, _encode_sign, _decode_sign)


def _averaged(
    state: LowBitState, bucket: dist.GradBucket, encode: Encode, decode: Decode
) -> torch.futures.Future[torch.Tensor]:
    flat, group = bucket.buffer(), state.process_group  # (n,)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = 8 * -(-len(flat) // (8 * ranks))  # S: of a block, in whole bytes also with one bit
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    blocks = F.pad(wide, (0, ranks * size - len(flat))).view(ranks, size)  # (N, S)
    real = (torch.arange(ranks * size, device=flat.device) < len(flat)).view(ranks, size)
    of_blocks, of_mean = state.errors(bucket, blocks)

    def compress(rows: torch.Tensor, error: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The message for the rows and what was left of the last one, (R, S) to (R, SCALE + b).
        What is left of this one becomes the error."""
        wanted = (rows + error).masked_fill(~real, 0)
        data, scale = encode(wanted, real)
        message = torch.cat([scale.float().view(torch.uint8), data], dim=1)
        # A gradient that has overflowed is sent as such, and not again.
        error.copy_((wanted - decompress(message)).nan_to_num(0, 0, 0))
        return message

    def decompress(message: torch.Tensor) -> torch.Tensor:
        scale = message[:, :SCALE].flatten().view(torch.float32).unsqueeze(1)  # (R, 1)
        return decode(message[:, SCALE:]).to(wide.dtype) * scale

    sent = compress(blocks, of_blocks, real)  # (N, SCALE + b)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = decompress(received).mean(0, keepdim=True)  # (1, S), of our block
    whole = torch.empty_like(sent)
    dist.all_gather_single(whole, compress(mean, of_mean, real[rank : rank + 1]), group=group)
    flat.copy_(decompress(whole).flatten()[: len(flat)])

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else []
    )
    future.set_result(flat)
    return future


def _encode_int8(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / 127
    steps = (rows / scale.clamp_min(torch.finfo(rows.dtype).tiny)).round()
    return steps.to(torch.int8).view(torch.uint8), scale


def _decode_int8(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int8)


def _encode_sign(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = (rows >= 0).unflatten(1, (-1, 8)).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    data = (bits << places).sum(-1, dtype=torch.uint8)
    return data, rows.abs().sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)


def _decode_sign(data: torch.Tensor) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    bits = (data.unsqueeze(-1) >> places) & 1  # (R, b, 8)
    return bits.flatten(1).to(torch.int8) * 2 - 1
