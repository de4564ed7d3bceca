"""`python -m minidist compare`: one training by many systems, each held against one process.

Each system trains the same model from the same weights on the same batches, twice: a few steps in
float64, of which weights and losses are compared with those of one process; and in float32 with
Adam, where memory, bytes and time are measured.

A system is a name and a function `train(task, watch)`, which is called on every rank:

    def ddp(task: Task, watch: Watch) -> State:
        model = md.DistributedDataParallel(task.make())
        optimizer = task.optimizer(model.parameters())
        for batch in task.batches():                        # whole batches
            inputs, targets = task.share(batch)             # this rank's rows
            with watch.step(model, optimizer):              # all that a step does
                optimizer.zero_grad()
                loss = task.loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
            watch.loss(loss)                                # on ranks that know it
        return bare(model.state_dict())

    run(4, systems=[System("mine", ddp)])

Since most do just this, they `return replicas(task, watch, model, optimizer)`. It returns whole
parameters by the names of the bare model; a rank may have some of them only. What fails is a row
that says so.

To read: `task` (what is trained), `our_systems`, `torch_systems`, `watched_steps` (what is
measured), `comparison` (runs them all), `results` (rows, the table, the picture), `command` (the
options). `judge` is for strategies that somebody else wrote, `attention`
for context parallelism. Lesson: real_tools.
"""

from minidist.instruments.compare.attention import attention
from minidist.instruments.compare.comparison import SYSTEMS, run
from minidist.instruments.compare.judge import Found, Judge, found_by, kinds_of
from minidist.instruments.compare.results import Row, draw, table
from minidist.instruments.compare.task import System, Task, bare, replicas
from minidist.instruments.compare.watched_steps import Watch

__all__ = [
    "SYSTEMS",
    "Found",
    "Judge",
    "Row",
    "System",
    "Task",
    "Watch",
    "attention",
    "bare",
    "draw",
    "found_by",
    "kinds_of",
    "replicas",
    "run",
    "table",
]
