"""Before a collective, the ranks agree that they all mean the same call (lesson: collectives).

Without this, a rank that passes another shape, another dtype or another root than the others
makes them wait for ever, or gives wrong numbers silently. So each rank condenses its call into a
digest, and an all_reduce by a tree finds the largest and the smallest of all, byte by byte: if they
are one, all calls are. That takes 2(p-1) tiny messages, 2⌈lg p⌉ of them in sequence. Only when
something is wrong do the calls travel as text, and every rank raises the same ValueError, which
shows all of them.

Large systems leave this out for speed, and offer it as a debugging mode.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import all_reduce_tree, all_to_all_pairwise
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction
from minidist.measure import record

HEADER_BYTES = 16
LARGEST = Reduction("MAX", torch.uint8)


def agree(peers: Peers, shared: str, call: object, problem: str) -> None:
    """Raise ValueError on every rank, that shows each rank's `call` and the `problem` with it,
    unless `shared` is the same on all ranks and no rank has a problem."""
    ours = b"\xff" * HEADER_BYTES if problem else _header(shared)  # which is no header
    with record.scope("agreement", control=True):
        theirs = _message(peers, ours)
        all_reduce_tree(peers, theirs, LARGEST)
        # Ends that differ are no digest beside its own complement, so nobody's header.
        if not problem and bytes(theirs.tolist()) == ours:
            return
        text = f"{call}  <- {problem}" if problem else str(call)
        calls = [""] * peers.size
        dist.all_gather_object(calls, text, peers.group)
    head = "refused: every rank of the group must make the same, valid call"
    lines = [f"  rank {r}: {text}" for r, text in zip(peers.global_ranks, calls, strict=True)]
    raise ValueError("\n".join([head, *lines]))


def unlike(peers: Peers, ours: Sequence[str], theirs: Sequence[str]) -> list[int]:
    """Tell each rank i `ours[i]`, and return the ranks that do not tell us `theirs[i]`."""
    outgoing = [_message(peers, _header(words)) for words in ours]
    arrived = [torch.empty_like(message) for message in outgoing]
    with record.scope("agreement", control=True):
        all_to_all_pairwise(peers, arrived, outgoing)
    pairs = zip(arrived, theirs, strict=True)
    return [i for i, (found, words) in enumerate(pairs) if bytes(found.tolist()) != _header(words)]


def _header(words: str) -> bytes:
    """A digest, and its complement: the largest complement is that of the smallest byte, so one
    all_reduce finds both ends."""
    digest = hashlib.blake2b(words.encode(), digest_size=HEADER_BYTES // 2).digest()
    return digest + bytes(255 - byte for byte in digest)


def _message(peers: Peers, data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=peers.device)
