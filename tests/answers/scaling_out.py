"""Answers to the puzzles and the exercise of the lesson scaling_out."""

from minidist.course.checks import scaling_out as check


def two_clocks(events, *, alone=False, late=False, sure=True, last=True):
    """The right one; or with a mistake."""
    clock, line, arrived = 0, 0, []
    for event in events:
        if isinstance(event, int | float):
            clock += event
        elif event[0] == "begin":
            start = clock if alone else line if late else max(line, clock)
            line = start + event[1]
            arrived.append(line)
        else:
            clock = max(clock, arrived[event[1] if sure else -1])
    return max(clock, line) if last else clock


def by_waiting(events):
    """The time that is waited, upon the computing."""
    computed = waited = line = 0.0
    arrived = []
    for event in events:
        match event:
            case ("begin", seconds):
                line = max(line, computed + waited) + seconds
                arrived.append(line)
            case ("wait", number):
                waited += max(0.0, arrived[number] - computed - waited)
            case _:
                computed += event
    return computed + waited + max(0.0, line - computed - waited)


def lines_for_all(events):
    return two_clocks(events, alone=True)


def from_the_start(events):
    return two_clocks(events, late=True)


def waits_for_the_last(events):
    return two_clocks(events, sure=False)


def forgets_the_end(events):
    return two_clocks(events, last=False)


def nothing_hidden(events):
    return sum(
        each if isinstance(each, float) else each[1] * (each[0] == "begin") for each in events
    )


def all_hidden(events):
    computed = sum(each for each in events if isinstance(each, float))
    sent = sum(each[1] for each in events if isinstance(each, tuple) and each[0] == "begin")
    return max(computed, sent)


ANSWERS = {
    check.fastest_ranks: ([19, 19.0], [20, 22, 31, 480, 8, "19 ranks"]),
    check.what_helps: ([3], [1, 2, 4, "3"]),
    check.play: (
        [two_clocks, by_waiting],
        [
            lines_for_all,
            from_the_start,
            waits_for_the_last,
            forgets_the_end,
            nothing_hidden,
            all_hidden,
            lambda events: None,
        ],
    ),
}
