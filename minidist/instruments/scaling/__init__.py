"""What a thousand ranks would do, found out on two cores.

    with scaling.one_rank_of(1024) as trace: ...        # your own code, as one rank of 1,024

    shape, layout = md.planner.MODELS["llama-3-8b"], md.planner.Layout(1024, stage=3)
    step = scaling.rehearse(shape, layout)              # our own strategies, of a real model
    step.memory, step.sent                              # the planner says the same
    scaling.play(step.trace, md.planner.GPUS["h100"])   # how long it would take

    md.scaling.Chain().predict(link, (2, 1, 2), 4)      # a toy, on any mesh

To read: `one_rank` (a rank without the others), `llama_shape` (a model without numbers),
`rehearsal` (a step of it), `play_step` (the time it would take), `chain` (a toy on any mesh, really
timed). Lessons: mixed_parallelism, scaling_out.
"""

from minidist.instruments.scaling.chain import Chain
from minidist.instruments.scaling.llama_shape import Llama
from minidist.instruments.scaling.one_rank import Message, Trace, Waited, one_rank_of
from minidist.instruments.scaling.play_step import Played, play
from minidist.instruments.scaling.rehearsal import Rehearsed, rehearse

__all__ = [
    "Chain",
    "Llama",
    "Message",
    "Played",
    "Rehearsed",
    "Trace",
    "Waited",
    "one_rank_of",
    "play",
    "rehearse",
]
