"""Context parallelism: attention over a sequence that no rank holds whole.

    model = md.ContextParallel(md.zoo.Decoder())
    loss = model(tokens, targets)               # whole rows; each rank computes with its tokens

| attention | what travels | what it asks |
|---|---|---|
| ring | keys and values, N - 1 hops, beside computing | long enough blocks |
| gathered | keys and values, at once | room for all of them |
| ulysses | queries, keys, values, and outputs, by heads | heads that all ranks can share |

Lesson: long_sequences.

To read, in this order: `naive` is the idea, `cuts` says who has which tokens, `kernel` computes one
block, `ring` is fast; `gathered` and `ulysses` do the same in other ways; `context_parallel` is for
whole models, and `attention_cost` says what all this costs.
"""

from minidist.context_parallel import attention_cost as cost
from minidist.context_parallel.context_parallel import ATTENTION, ContextParallel, attention_by
from minidist.context_parallel.cuts import CUTS, Block, Cut
from minidist.context_parallel.gathered import gathered_attention
from minidist.context_parallel.naive import NaiveRing
from minidist.context_parallel.ring import ring_attention
from minidist.context_parallel.ulysses import ulysses_attention

__all__ = [
    "ATTENTION",
    "CUTS",
    "Block",
    "ContextParallel",
    "Cut",
    "NaiveRing",
    "attention_by",
    "cost",
    "gathered_attention",
    "ring_attention",
    "ulysses_attention",
]
