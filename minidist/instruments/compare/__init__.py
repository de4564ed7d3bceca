"""`python -m minidist compare`: one training by many systems, each held against one process.

Each system trains the same model from the same weights on the same batches, twice: a few steps in
float64, of which weights and losses are compared with those of one process; and in float32 with
Adam, where memory, bytes and time are measured.

A system is a function `train(task, watch)` and a name: a `System`. A module of this room that
stands in `systems.MODULES` has a list `SYSTEMS` of them. The function is called on every rank:

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

or, since most do just this, `return replicas(task, watch, model, optimizer)`. It returns whole
parameters by the names of the bare model; a rank may have some of them only. A system whose own
loop calls back enters `watch.step` at the start of a step and leaves it at the end
(`contextlib.ExitStack`). It says `raise RefusedError("why")` if it cannot take the model. What it
imports, it imports in the function: `needs` names the packages, and a row says how to install
what is missing; a system that needs some gets ranks of its own. `float64=False`: it is compared in
float32. `stage`: of ZeRO, for the bytes that the planner has. What fails is a row that says so.

To read: `task` (what is trained), `systems` (the list), `our_systems`, `torch_systems`,
`tool_systems`, `watched_steps` (what is measured), `comparison` (runs them all), `results` (rows,
the table, the picture), `command` (the options). Lesson: real_tools.
"""

from minidist.instruments.compare.comparison import run
from minidist.instruments.compare.results import Row, draw, table
from minidist.instruments.compare.systems import RefusedError, System, systems
from minidist.instruments.compare.task import Task, bare, replicas
from minidist.instruments.compare.watched_steps import State, Watch

__all__ = [
    "RefusedError",
    "Row",
    "State",
    "System",
    "Task",
    "Watch",
    "bare",
    "draw",
    "replicas",
    "run",
    "systems",
    "table",
]
