"""What the planner says of a step, and what one rank did: `python -m minidist plan --rehearse`.
Lesson: scaling_out"""

from collections import Counter

from minidist.instruments.planner.device import Device
from minidist.instruments.planner.layout import Layout
from minidist.instruments.planner.model_states import Memory
from minidist.instruments.planner.page import table
from minidist.instruments.planner.peak import peaks
from minidist.instruments.planner.planned_messages import messages
from minidist.instruments.planner.step_time import step_time
from minidist.instruments.planner.transformer import Transformer
from minidist.instruments.scaling.play_step import play
from minidist.instruments.scaling.rehearsal import Rehearsed, rehearse


def beside(
    model: Transformer, layout: Layout, device: Device, *, optimizer: str, precision: str
) -> str:
    """A page of text. Raises ValueError as `rehearse` does, and for another optimizer than Adam."""
    if optimizer != "adam":
        raise ValueError("a rank is rehearsed with --optimizer adam")
    step = rehearse(model, layout, precision)
    planned = peaks(model, layout, optimizer=optimizer, precision=precision)[0]
    return f"""One of {layout.world_size:,} ranks, run here without the others: bytes it holds
{_held(planned, step)}
The planner counts under "logits" what the rank counts under "activations": the log softmax and the
head's inputs, which backward needs.

What it sends in a step: bytes of whole vectors
{_sent(model, layout, precision, step)}

{_time(model, layout, device, precision, step)}"""


def _held(planned: Memory, step: Rehearsed) -> str:
    kinds = dict.fromkeys([*step.memory, *planned.categories])
    rows = [
        [kind, f"{planned.categories.get(kind, 0):,.0f}", f"{step.memory.get(kind, 0):,}"]
        for kind in kinds
    ]
    rows.append(["all, at the peak", f"{planned.total:,.0f}", f"{step.peak:,}"])
    return table(["", "planner", "rank"], rows)


def _sent(model: Transformer, layout: Layout, precision: str, step: Rehearsed) -> str:
    counts: Counter[tuple[str, int]] = Counter()
    for operation, nbytes, ranks, times in messages(model, layout, precision):
        counts[operation, ranks] += nbytes * times
    rows = [
        [f"{name} of {ranks:,} ranks"] + [f"{each.get((name, ranks), 0):,}" for each in both]
        for both in [(counts, step.sent)]
        for name, ranks in dict.fromkeys([*counts, *step.sent])
    ]
    return table(["", "planner", "rank"], rows)


def _time(
    model: Transformer, layout: Layout, device: Device, precision: str, step: Rehearsed
) -> str:
    if layout.pipeline > 1:
        return "How long it takes depends on the other stages: see the planner's page."
    played, took = play(step.trace, device), step_time(model, layout, device, precision)
    return f"""Its step, played message by message, takes {played.total:.3g} s, of which it waits \
{played.waiting:.2g} s; the planner has {took.total:.3g} s
and {took.communication:.2g} s. Messages travel for {played.communication:.3g} s; the planner has \
{took.tensor + took.data:.3g} s. Operations: {step.trace.flops:.4g}, with
attention counted whole; the planner takes half of it, and adds the time of memory and optimizer."""
