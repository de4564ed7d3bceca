"""Bytes of a training step that are the same at every run."""

from minidist.instruments.measure import MemoryTracker, TrafficCounter


def least_memory_of(step, model, optimizer, tries=5):
    """A `MemoryTracker` and a `TrafficCounter` of one step.

    Of several steps it is the one that held the fewest bytes after backward: gloo's thread gives
    back what it has sent a moment after `wait` has returned, and so never makes them fewer.
    """

    def measured():
        with TrafficCounter() as traffic, MemoryTracker(model, optimizer) as memory:
            step()
        return memory, traffic

    def bytes_held(pair):
        return sum(pair[0].after("backward").values()), pair[0].peak

    return min((measured() for _ in range(tries)), key=bytes_held)
