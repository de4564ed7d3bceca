"""Answers to the puzzles and the exercise of the lesson reading_a_step."""

import minidist as md
from minidist.course.checks import reading_a_step as check


def union(spans):
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def cut(trace, category, start, end):
    """What of this category lies between start and end."""
    spans = [(max(e.start, start), min(e.end, end)) for e in trace.of(category)]
    return [(a, b) for a, b in spans if a < b]


def length(spans):
    return sum(b - a for a, b in spans)


def both(first, second):
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]


def by_unions(join=union, cut=cut, both=both, end=lambda *four: four):
    def breakdown(trace, start, stop):
        computing, sent = (
            join(cut(trace, category, start, stop)) for category in ("compute", "communication")
        )
        busy, overlapped = length(computing), length(both(computing, sent))
        exposed = length(sent) - overlapped
        return end(busy, overlapped, exposed, stop - start - busy - exposed)

    return breakdown


right = by_unions()


def of_minidist(trace, start, end):
    found = md.tracing.breakdown(trace, start, end)
    return found.computing, found.overlapped, found.exposed, found.idle


def by_sweep(trace, start, end):
    """Along the starts and ends: how many of each category are open."""
    edges = []
    for place, category in enumerate(("compute", "communication")):
        for a, b in cut(trace, category, start, end):
            edges += [(a, place, 1), (b, place, -1)]
    spent, open_now, now = [[0.0, 0.0], [0.0, 0.0]], [0, 0], start
    for time, place, change in sorted(edges):
        spent[open_now[0] > 0][open_now[1] > 0] += time - now
        open_now[place] += change
        now = time
    spent[0][0] += end - now
    (idle, exposed), (alone, overlapped) = spent
    return alone + overlapped, overlapped, exposed, idle


# ---- wrong ones -------------------------------------------------------------------------------


def forgets_the_longer(spans):
    """An operation within another ends the union."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def whole_events(trace, category, start, end):
    """An event that sticks out counts whole."""
    return [(e.start, e.end) for e in trace.of(category) if e.end > start and e.start < end]


def only_within(trace, category, start, end):
    """An event that sticks out counts as nothing."""
    return [(e.start, e.end) for e in trace.of(category) if start <= e.start and e.end <= end]


def everything(trace, category, start, end):
    """Phases count as computing."""
    spans = cut(trace, category, start, end)
    return spans + cut(trace, "phase", start, end) if category == "compute" else spans


def no_cut(trace, category, start, end):
    return [(e.start, e.end) for e in trace.of(category)]


def all_is_exposed(busy, overlapped, exposed, idle):
    return busy, overlapped, exposed + overlapped, idle


def computing_alone(busy, overlapped, exposed, idle):
    return busy - overlapped, overlapped, exposed, idle


def in_the_order_of_the_sum(busy, overlapped, exposed, idle):
    return busy, exposed, overlapped, idle


def milliseconds(*four):
    return tuple(1000 * each for each in four)


def in_steps_of_a_second(trace, start, end):
    """Slices of one length: right where everything begins and ends at full seconds."""
    spent = [0, 0, 0, 0]
    for slot in range(round(end - start)):
        now = start + slot + 0.5
        busy, sent = (
            any(e.start <= now < e.end for e in trace.of(category))
            for category in ("compute", "communication")
        )
        spent[0] += busy
        spent[1] += busy and sent
        spent[2] += sent and not busy
        spent[3] += not (busy or sent)
    return spent


def three(*four):
    return four[:3]


sums = by_unions(join=list)
wrong_union = by_unions(join=forgets_the_longer)
counts_whole = by_unions(cut=whole_events)
counts_nothing = by_unions(cut=only_within)
without_a_window = by_unions(cut=no_cut)
with_phases = by_unions(cut=everything)
exposed_with_overlapped = by_unions(end=all_is_exposed)
alone = by_unions(end=computing_alone)
another_order = by_unions(end=in_the_order_of_the_sum)
in_milliseconds = by_unions(end=milliseconds)
too_few = by_unions(end=three)

NAMED = {  # what an answer is told
    check.breakdown: {
        sums: "where an operation holds another, computing comes to 10 s, and it is 8 s.",
        wrong_union: "where an operation holds another, computing comes to 3 s, and it is 8 s.",
        counts_whole: "stick out of the window, computing comes to 10 s, and it is 6 s.",
        counts_nothing: "stick out of the window, computing comes to 0 s, and it is 6 s.",
        with_phases: "at once, computing comes to 12 s, and it is 4 s.",
        exposed_with_overlapped: "at once, exposed comes to 5 s, and it is 3 s.",
        another_order: "right four, but not (computing, overlapped, exposed, idle).",
        in_steps_of_a_second: "at random, computing comes to 3 s, and it is 4.61053 s.",
        too_few: "give (computing, overlapped, exposed, idle) in seconds, not (4, 2, 3).",
    }
}
ANSWERS = {
    check.tokens_a_second: ([0.8, 40 / 50], [53 / 50, 40 / 53, 1.25, 0.75, 1, 0.2, "80 %"]),
    check.late: (
        [(5, 3.98), [5, 4.01 - 0.03], (5, 3.985)],
        [
            *((6, 6.51), (6, 3.98), (0, 4.03), (3, 3.98), (8, 3.98), (5, 4.01), (5, 3.95)),
            *((5, 4.0), (5, 4.03), (5, 0.02), (5, 0.00398), (5, "4 ms"), "rank 5"),
        ],
    ),
    check.breakdown: (
        [right, by_sweep, of_minidist],
        [*NAMED[check.breakdown], without_a_window, alone, in_milliseconds],
    ),
}
