"""Who sent how much to whom, to the byte (lesson: collectives)."""

from collections import defaultdict
from collections.abc import Sequence

from minidist.instruments.measure.meter import Meter
from minidist.instruments.measure.record import Event


class TrafficCounter(Meter):
    """Counts what one rank sends within a `with` block. Lesson: collectives.

        with md.measure.TrafficCounter() as traffic:
            md.collectives.all_reduce(tensor)
        return traffic          # plain data: a rank can return it, pickled

    After the block (before that, all counts are 0):

    - `rank`, `world_size`;
    - `sent_bytes`, `sent_messages`: the payload of point-to-point messages, from `dist.send`,
      `isend` and `batch_isend_irecv`, and so of every collective of `md.collectives`, which
      consists of them. A message counts when it is posted. Bytes are those of the tensors, without
      headers of the network;
    - `sent_to`: the same bytes by the other rank, a list of `world_size`;
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
        messages = [event for event in events if event.kind == "sent"]
        sent = [event for event in messages if not event.control]
        control = [event for event in messages if event.control]
        self.sent_bytes = sum(event.nbytes for event in sent)
        self.sent_messages = len(sent)
        self.sent_to = [0] * self.world_size
        for event in sent:
            if event.peer is not None:
                self.sent_to[event.peer] += event.nbytes
        self.control_bytes = sum(event.nbytes for event in control)
        self.control_messages = len(control)
        calls = [event for event in events if event.kind == "collective"]
        self.calls = _by_operation(calls)
        together: dict[tuple[int, ...], list[Event]] = defaultdict(list)
        for event in sent + calls:
            together[event.group].append(event)
        self.by_group = {ranks: _by_operation(own) for ranks, own in together.items()}

    def __repr__(self) -> str:
        return (
            f"TrafficCounter(rank {self.rank} of {self.world_size}: "
            f"sent {self.sent_bytes} bytes in {self.sent_messages} messages)"
        )


def _by_operation(events: Sequence[Event]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for event in events:
        calls, nbytes = counts.get(event.operation, (0, 0))
        counts[event.operation] = (calls + 1, nbytes + event.nbytes)
    return counts
