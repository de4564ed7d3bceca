"""Who sent how much to whom, to the byte (lesson: collectives)."""

from collections import defaultdict
from collections.abc import Sequence

from minidist.instruments.measure.meter import Meter
from minidist.instruments.measure.record import Event


class TrafficCounter(Meter):
    """Counts what one rank sends and receives within a `with` block. Lesson: collectives.

        with md.measure.TrafficCounter() as traffic:
            md.collectives.all_reduce(tensor)
        return traffic          # plain data: a rank can return it, pickled

    After the block (before that, all counts are 0):

    - `rank`, `world_size`;
    - `sent_bytes`, `received_bytes`, `sent_messages`, `received_messages`: the payload of
      point-to-point messages, from `dist.send`, `isend`, `recv`, `irecv` and `batch_isend_irecv`,
      and so of every collective of `md.collectives`, which consists of them. A message counts
      when it is posted. Bytes are those of the tensors, without headers of the network;
    - `sent_to`, `received_from`: the same bytes by the other rank, a list of `world_size`;
    - `control_bytes`, `control_messages`: what this rank *sent* for the agreement that precedes
      each collective of `md.collectives`. No other count includes it;
    - `calls`: collectives handed to torch's backend as a whole, whose messages cannot be seen:
      {operation: (calls, bytes)}. The bytes are those of the whole vector, n in
      `md.collectives.cost`; all_gather_into_tensor is an all_gather;
    - `by_group`: messages sent and collectives, by the ranks of the group that communicates:
      {ranks: {operation: (calls, bytes)}}.

    Not seen, unless the backend is "shm": calls that torch makes in C++ (its own
    DistributedDataParallel), and functions that were imported by name
    (`from torch.distributed import send`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._read([])

    def _read(self, events: list[Event]) -> None:
        data = [event for event in events if not event.control]
        sent = [event for event in data if event.kind == "sent"]
        received = [event for event in data if event.kind == "received"]
        control = [event for event in events if event.control and event.kind == "sent"]
        self.sent_bytes = sum(event.nbytes for event in sent)
        self.received_bytes = sum(event.nbytes for event in received)
        self.sent_messages = len(sent)
        self.received_messages = len(received)
        self.sent_to = self._by_peer(sent)
        self.received_from = self._by_peer(received)
        self.control_bytes = sum(event.nbytes for event in control)
        self.control_messages = len(control)
        calls = [event for event in events if event.kind == "collective"]
        self.calls = _by_operation(calls)
        together: dict[tuple[int, ...], list[Event]] = defaultdict(list)
        for event in sent + calls:
            together[event.group].append(event)
        self.by_group = {ranks: _by_operation(own) for ranks, own in together.items()}

    def _by_peer(self, messages: list[Event]) -> list[int]:
        nbytes = [0] * self.world_size
        for event in messages:
            if event.peer is not None:
                nbytes[event.peer] += event.nbytes
        return nbytes

    def __repr__(self) -> str:
        return (
            f"TrafficCounter(rank {self.rank} of {self.world_size}: "
            f"sent {self.sent_bytes} bytes in {self.sent_messages} messages, "
            f"received {self.received_bytes} in {self.received_messages})"
        )


def _by_operation(events: Sequence[Event]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for event in events:
        calls, nbytes = counts.get(event.operation, (0, 0))
        counts[event.operation] = (calls + 1, nbytes + event.nbytes)
    return counts
