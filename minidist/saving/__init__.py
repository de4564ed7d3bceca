"""Checkpoints that survive: a run goes on after any kill, at any world size, by any strategy.

    with md.saving.Checkpoints("runs/a") as checkpoints:
        step = checkpoints.load(model=model, optimizer=optimizer, data=batches) or 0
        for inputs, targets in batches:
            ...
            step += 1
            if step % 100 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, data=batches)

What is saved belongs to the bare module: its parameters and optimizer states by its names, in its
shapes. Each rank writes the parts of them that it has, and reads those that it needs, so the next
run may have other ranks and another strategy. Planning, files and the thread that writes are those
of `torch.distributed.checkpoint`. To read, in this order:

    naive           the idea: a new file, synced, renamed
    parts           which part of which whole tensor a rank has, by every strategy
    states          model and optimizer as one process has them, in parts
    rank_states     what each rank has for itself: random numbers, data, schedulers
    commit          hashes, the manifest, and the rename that makes a folder a checkpoint
    writing         who writes what, from which copies; torch's writer, which commits
    checkpoints     `save`, `load`, `wait`
    batches         data in an order that no world size changes

Lesson: surviving_failures.
"""

from minidist.saving.batches import Batches
from minidist.saving.checkpoints import Checkpoints

__all__ = ["Batches", "Checkpoints"]
