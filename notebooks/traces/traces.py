"""What the page of ten traces calls: a trace's numbers and picture, and a verdict on its cause."""

from record import SCENES, path_of

import minidist as md
from minidist.course.checks.verdict import Verdict
from minidist.instruments.tracing import Trace

# What a trace of each cause shows.
SHOWS = {
    "healthy": "all ranks compute for most of the step, and most of the communication is hidden",
    "slow device": "one rank has as many operations as the others, each of them takes longer, and "
    "the others wait for it",
    "more rows": "all ranks do the same, but one has more operations than the others, none of them "
    "takes longer, and the others wait for it",
    "slow loader": "one rank computes as long as the others, but stands idle before it begins, in "
    "each step, and they wait for it",
    "pauses in turn": "in each step another rank stands idle, and the others wait for it",
    "slow link": "the time goes to transfer, though the messages are large and sent in backward: "
    "each takes far longer than a link of 1 Gbit/s would need",
    "no overlap": "the messages are large and fast enough, but all are sent after backward, and "
    "nothing hides them",
    "small messages": "the time goes to transfer, in many messages of few bytes, and each has the "
    "latency of a large one",
    "bound by Python": "all ranks stand idle between operations that are many and short, and none "
    "waits for another",
    "uneven stages": "ranks send to their neighbours, one of them computes most of the time, and "
    "the others wait for it",
}


def load(number: int) -> list[Trace]:
    """The traces of all ranks."""
    return md.tracing.load(path_of(number))


def numbers(traces: list[Trace]) -> list[dict[str, float]]:
    """Of each rank and step: ms, and how many operations and messages; of an operation and of a
    message: ms and kB. All on average."""
    steps, waits, found = len(traces[0].steps()), md.tracing.waits(traces), []
    windows = [trace.window() for trace in traces]
    start, end = min(first for first, _ in windows), max(last for _, last in windows)
    for trace in traces:
        parts, waited = md.tracing.breakdown(trace, start, end), waits[trace.rank]
        ran, sent = len(trace.of("compute")), trace.of("communication")
        times = parts.step, parts.computing, waited.others, waited.transfer, parts.idle
        names = "step", "computing", "others", "transfer", "idle"
        of = {name: 1e3 * each / steps for name, each in zip(names, times, strict=True)}
        of |= {"hidden %": 100 * parts.hidden}
        of |= {"operations": ran / steps, "ms each": 1e3 * parts.computing / ran}
        kilobytes = sum(e.detail["nbytes"] for e in sent) / len(sent) / 1e3
        found.append(of | {"messages": len(sent) / steps, "kB each": kilobytes})
    return found


def show(number: int) -> None:
    """Print the numbers of a trace and draw it."""
    import matplotlib.pyplot as plt

    traces = load(number)
    rows = numbers(traces)
    print("rank", *(f"{name:>6}" for name in rows[0]), " calls")
    for trace, row in zip(traces, rows, strict=True):
        calls = sorted({e.name for e in trace.of("communication")})
        cells = [f"{each:{max(6, len(name))}.1f}" for name, each in row.items()]
        print(f"{trace.rank:4}", *cells, "", *calls)
    strips = map(md.tracing.strips, traces)
    md.plot.timeline(strips, title=f"Trace {number}: four steps", lanes=True)
    plt.show()


def name(number: int, cause: str | None, rank: int | None = None) -> Verdict:
    """Whether this is the cause, and this the rank that others wait for; None: there is none."""
    right = SCENES[number]
    if cause is None:
        return Verdict(False, "Not yet: name a cause in place of None.")
    if cause not in SHOWS:
        raise ValueError(f"the causes are {', '.join(SHOWS)}, not {cause!r}")
    if cause != right.cause:
        return Verdict(False, f'Not yet: a trace of "{cause}" shows that {SHOWS[cause]}.')
    if rank != right.rank:
        which = "there is a rank to name" if rank is None else f"rank {rank} is not the one"
        which = "there is no rank to name" if right.rank is None else which
        return Verdict(False, f"Not yet: the cause is right, but {which}.")
    return Verdict(True, f"Right: {SHOWS[cause]}.")
