"""Before a collective, the ranks agree that they all mean the same call (lesson: collectives).

Without this, a rank that passes another shape, another dtype or another root than the others
makes them wait for ever, or gives wrong numbers silently. So each rank condenses its call into a
header of 16 bytes. The headers go up a binomial tree to the group's first rank, each rank
comparing those of its children with its own, and the verdict comes back down: 2(p-1) tiny
messages, 2⌈lg p⌉ of them in sequence. Only when something is wrong do the calls travel as text,
and every rank raises the same ValueError, which shows all of them.

Large systems leave this out for speed, and offer it as a debugging mode.
"""

import torch

from minidist.collectives.algorithms import all_to_all_pairwise
from minidist.collectives.peers import Peers
from minidist.measure import record

HEADER_BYTES = 16
REFUSED = bytes(HEADER_BYTES)


def agree(peers: Peers, header: bytes, call: str) -> None:
    """Raise ValueError on every rank, that shows all calls, unless all headers are the same and
    none is `REFUSED`."""
    with record.scope("agreement", control=True):
        calls = [] if _everyone_agrees(peers, header) else _exchange_texts(peers, call)
    if calls:
        head = "refused: every rank of the group must make the same, valid call"
        ranks = peers.global_ranks
        lines = [f"  rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True)]
        raise ValueError("\n".join([head, *lines]))


def exchange_headers(peers: Peers, mine: list[bytes]) -> list[bytes]:
    """Give each rank its header, and return what each has for us."""
    with record.scope("agreement", control=True):
        outgoing = [_message(peers, header) for header in mine]
        arrived = [torch.empty_like(header) for header in outgoing]
        all_to_all_pairwise(peers, arrived, outgoing)
    return [bytes(header.tolist()) for header in arrived]


def _everyone_agrees(peers: Peers, header: bytes) -> bool:
    incoming = _message(peers, REFUSED)
    for child in reversed(peers.children(0)):
        if bytes(peers.recv(incoming, child).tolist()) != header:
            header = REFUSED
    verdict = _message(peers, header)
    if peers.rank != 0:
        peers.send(verdict, peers.parent(0))
        peers.recv(verdict, peers.parent(0))
    for child in peers.children(0):
        peers.send(verdict, child)
    return bytes(verdict.tolist()) != REFUSED


def _exchange_texts(peers: Peers, mine: str) -> list[str]:
    if peers.rank != 0:
        _send_text(peers, mine, 0)
        return _recv_text(peers, 0).split("\n")
    calls = [mine] + [_recv_text(peers, other) for other in range(1, peers.size)]
    for other in range(1, peers.size):
        _send_text(peers, "\n".join(calls), other)
    return calls


def _send_text(peers: Peers, text: str, to: int) -> None:
    data = _message(peers, text.encode())
    peers.send(torch.tensor([len(data)], device=peers.device), to)
    peers.send(data, to)


def _recv_text(peers: Peers, source: int) -> str:
    length = peers.recv(torch.zeros(1, dtype=torch.int64, device=peers.device), source)
    data = torch.empty(int(length), dtype=torch.uint8, device=peers.device)
    return bytes(peers.recv(data, source).tolist()).decode()


def _message(peers: Peers, data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=peers.device)
