"""The charts show the numbers they were given, and the pictures are what their scripts draw."""

import importlib
import itertools
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import changed
import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch import nn

from minidist.instruments import plot
from minidist.instruments.measure import MemoryTracker, Phase, Span, Timeline, TrafficCounter
from minidist.instruments.plot import color, human_bytes, human_time, palette
from minidist.instruments.plot.palette import GROUND, contrast, darker, paler
from minidist.pipeline import SCHEDULES, simulate
from minidist.pipeline import Span as Step
from minidist.pipeline.instructions import (
    Backward,
    BackwardInputs,
    BackwardWeights,
    Forward,
    SendActivation,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {"ring": [(8, 1e-5), (800, 2e-5)]}
HELD = SimpleNamespace(
    history={"parameters": [8, 8, 8], "other": [0, 4, 0]},
    phases=[SimpleNamespace(name="forward", start=0, end=2)],
)
NOTHING_HELD = SimpleNamespace(history={"parameters": [0], "other": [0]}, phases=[])
CHARTS = {  # name: what it draws, and inputs that have nothing to draw
    "traffic": ([SimpleNamespace(rank=0, world_size=1, sent_to=[5])], [[]]),
    "timeline": (
        [SimpleNamespace(rank=0, spans=[Span("forward", "compute", 1.0, 1.5)])],
        [[], [SimpleNamespace(rank=0, spans=[])]],
    ),
    "time_against_size": (PAIRS, [{}, {"ring": []}, PAIRS | {"tree": []}]),
    "bars": (
        {"measured": {"a": 1.0}, "predicted": {"a": 2.0}},
        [{}, {"measured": {}}, {"measured": {"a": 1.0}, "predicted": {"b": 1.0}}],
    ),
    "stacked": ({"here": {"data": 1.0}}, [{}, {"here": {}}, {"here": {"data": 0}}]),
    "loss": ({"ring": [2.0, 1.0]}, [{}, {"ring": []}, {"ring": [2.0], "tree": []}]),
    "memory": (HELD, [SimpleNamespace(history={}, phases=[]), NOTHING_HELD]),
    "memory_by_rank": ({"rank 0": {"other": 8}}, [{}, {"rank 0": {}}, {"rank 0": {"other": 0}}]),
    "schedule": (
        [[Step(Forward(0, 0), 1.0, 2.0)]],
        [[], [[]], [[Step(SendActivation(0, 0), 0, 1)]]],
    ),
    "sweep": ({"gpipe": {1: 2.0}}, [{}, {"gpipe": {}}]),
    "breakdown": ({"DDP": {"other": 8}}, [{}, {"DDP": {}}, {"DDP": {"other": 0}}]),
    "roofline": ([SimpleNamespace(name="add", intensity=0.1, speed=1e9)], [[]]),
    "pairs": ([[0, 3], [1, 2]], [[], [[], []]]),
    "routing": ([[[0, 3]], [[2, 5]]], [[], [[], []], [[[0]], [[1]], [[2]]]]),
    "load": ([[1, 3]], [[], [[]]]),
    "weights": ({"right": {"rank 0": (0.5, 0.5)}}, [{}]),
}
BESIDE = {"roofline": {"peak": 1e11, "bandwidth": {"memory": 4e10}}}


@pytest.fixture(autouse=True)
def no_figure_stays() -> Iterator[None]:
    yield
    plt.close("all")


def shown(artist) -> str:
    """The colour of a line or of a bar, as the palette writes it."""
    seen = artist.get_color() if hasattr(artist, "get_color") else artist.get_facecolor()
    return to_hex(seen).upper()


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def ticks(axis) -> list[str]:
    axis.figure.canvas.draw()
    return [label.get_text() for label in axis.get_ticklabels()]


def faint(figure: Figure) -> list[str]:
    """What is written with a contrast below 4.5 to what most of it stands upon."""
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    texts = [text for text in texts if not text.axes or text.axes.axison or text in text.axes.texts]
    for text in texts:
        text.set_alpha(0)
    figure.canvas.draw()
    seen, found = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3] / 255, []
    for text in texts:
        text.set_alpha(None)
        (left, low), (right, high) = text.get_window_extent().get_points().astype(int).clip(0)
        behind = seen[low : high + 1, left : right + 1].reshape(-1, 3)
        if len(behind):
            upon = to_hex(np.median(behind, axis=0))
            if contrast(to_hex(text.get_color()), upon) < 4.5:
                found.append(f"{text.get_text()!r}: {to_hex(text.get_color())} upon {upon}")
    return found


# ---- what holds for every chart -----------------------------------------------------------


def test_a_chart_draws_where_it_is_told_and_changes_no_setting() -> None:
    assert CHARTS.keys() == set(plot.__all__) - set(vars(palette))
    settings = dict(matplotlib.rcParams)
    for name, (given, nothings) in CHARTS.items():
        chart = partial(getattr(plot, name), **BESIDE.get(name, {}))
        for nothing in nothings:
            with pytest.raises(ValueError, match=rf"^{name}: (no|nothing) .*(draw|step)"):
                chart(nothing)
        assert plt.get_fignums() == [], name
        own = chart(given)
        assert len(plt.get_fignums()) == 1 and own.xaxis.label.get_color() == palette.INK, name
        left, right = plt.subplots(1, 2)[1]
        assert chart(given, ax=right) is right, name
        assert [to_hex(paper.get_facecolor()).upper() for paper in (right, right.figure)] == [
            GROUND
        ] * 2, name
        assert len(plt.get_fignums()) == 2 and right.has_data() and not left.has_data(), name
        own.figure.canvas.draw()
        right.figure.canvas.draw()
        assert [faint(ax.figure) for ax in (own, right)] == [[], []], name
        assert dict(matplotlib.rcParams) == settings, name
        plt.close("all")


WITHOUT_MATPLOTLIB = """
import sys
import minidist
from minidist.instruments import plot
print({"matplotlib", "sklearn", "IPython"} & sys.modules.keys())
sys.modules["matplotlib"] = None  # its import now fails
from types import SimpleNamespace as namespace
from minidist.instruments.measure import Span
from minidist.pipeline import Span as Step
from minidist.pipeline.instructions import Forward, SendActivation
for name, (given, _) in CHARTS.items():
    try:
        getattr(plot, name)(given, **BESIDE.get(name, {}))
    except ImportError as error:
        print(name, type(error).__name__, error.name, error)
"""


def test_only_a_chart_needs_matplotlib_and_says_how_to_get_it() -> None:
    charts = repr(CHARTS).replace("Span(instruction", "Step(instruction")
    code = WITHOUT_MATPLOTLIB.replace("CHARTS", charts).replace("BESIDE", repr(BESIDE))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    says = "minidist.plot draws with matplotlib: pip install 'minidist[course]'"
    told = [f"{name} ModuleNotFoundError matplotlib {says}" for name in CHARTS]
    assert ran.stdout.splitlines() == ["set()", *told], ran.stderr


# ---- each chart ---------------------------------------------------------------------------


def test_traffic_shows_what_was_counted() -> None:
    def counter(rank: int, *sent_to: int) -> TrafficCounter:
        made = TrafficCounter()
        assert {"rank", "world_size", "sent_to"} <= vars(made).keys()
        vars(made).update(rank=rank, world_size=3, sent_to=list(sent_to))
        return made

    sent = [(0, 8, 0), (0, 0, 808), (1608, 0, 0)]
    counters = [counter(rank, *row) for rank, row in enumerate(sent)]
    ax = plot.traffic(counters[::-1])  # in any order
    rows = [["–", "8 B", "0 B"], ["0 B", "–", "808 B"], ["1.61 kB", "0 B", "–"]]
    cells = {text.get_position(): text.get_text() for text in ax.texts if text.get_gid() == "cell"}
    assert cells == {(j, i): rows[i][j] for i in range(3) for j in range(3)}
    (image,) = ax.images
    assert image.get_array().tolist() == [list(row) for row in sent]
    seen = [to_hex(image.cmap(image.norm(n))).upper() for n in (0, 1608)]
    assert seen == [GROUND, color("communication")]
    totals = {text.get_position(): text.get_text() for text in ax.texts}
    assert [totals[2.65, i] for i in range(3)] == ["8 B", "808 B", "1.61 kB"]  # sent
    assert [totals[i, 2.65] for i in range(3)] == ["1.61 kB", "8 B", "808 B"]  # received
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("sender (rank)", "receiver (rank)")

    with pytest.raises(ValueError, match="rank 0, 2 is missing"):
        plot.traffic(counters[1:2])


def test_timeline_bars_are_the_spans() -> None:
    early, late = Timeline(), Timeline()
    early.rank, late.rank = 0, 3
    early.spans = [
        Span("forward", "compute", 5.001, 5.003),  # its own colour
        Span("all_reduce", "communication", 5.003, 5.010),
        Span("send", "agreement", 5.004, 5.005),  # within the one before
    ]
    late.spans = [Span("mine", "compute", 5.0, 5.5), Span("mine", "my kind", 5.5, 5.6)]
    ax = plot.timeline([late, early])
    assert [shown(bar) for bar in ax.patches] == [
        *map(color, ("forward", "communication", "agreement", "compute")),
        palette.SPARE[0],
    ]
    assert [bar.get_center()[1] for bar in ax.patches] == pytest.approx([0, 0, 0, 1, 1])
    assert [bar.get_x() for bar in ax.patches] == pytest.approx([1, 3, 4, 0, 500])  # ms
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([2, 7, 1, 500, 100])
    before, around, within, *_ = ax.patches
    assert within.get_height() < 0.7 * around.get_height() == 0.7 * before.get_height()
    assert within.get_zorder() > around.get_zorder()
    assert ticks(ax.yaxis) == ["rank 0", "rank 3"] and ax.yaxis_inverted()
    assert ax.get_xlim()[0] == 0 and ax.get_xlabel() == "time (ms)"
    assert legend(ax) == ["compute", "forward", "communication", "agreement", "my kind"]
    patches = ax.get_legend().get_patches()
    assert [shown(patch) for patch in patches[:2]] == [color("compute"), color("forward")]


def test_messages_of_a_timeline_may_have_a_lane_of_their_own() -> None:
    line = Timeline()
    line.spans = [
        Span("backward", "compute", 1.0, 2.0),
        Span("all_reduce", "communication", 1.2, 1.6),  # both within backward, and
        Span("all_reduce", "communication", 1.3, 1.9),  # the second waits for the first
        Span("all_reduce", "communication", 1.4, 1.5),  # done before those that left earlier
        Span("waiting", "waiting", 2.0, 2.5),
    ]
    backward, first, second, third, waiting = plot.timeline([line], lanes=True).patches
    assert [bar.get_x() for bar in (first, second, third)] == pytest.approx([200, 600, 900])
    assert [bar.get_width() for bar in (first, second, third)] == pytest.approx([400, 300, 0])
    assert first.get_height() == second.get_height()
    assert backward.get_height() == waiting.get_height() > first.get_height()
    assert backward.get_y() + backward.get_height() < first.get_y()  # the axis points down


def test_alike_spans_too_thin_for_an_outline_are_drawn_as_one() -> None:
    line = Timeline()
    line.spans = [Span("op", "compute", i / 1e3, i / 1e3 + 4e-4) for i in range(3)]
    line.spans += [Span("send", "communication", i / 10, i / 10) for i in (1, 1.02)]
    line.spans += [Span("op", "compute", 0.5, 0.5), Span("op", "compute", 0.6, 1.0)]
    bars = plot.timeline([line], lanes=True).patches
    ends = [edge for bar in bars for edge in (bar.get_x(), bar.get_x() + bar.get_width())]
    assert ends == pytest.approx([0, 2.4, 100, 100, 102, 102, 500, 500, 600, 1000])


def test_rows_of_a_timeline_may_begin_at_zero_and_be_grey_where_they_wait() -> None:
    early, late = Timeline(), Timeline()
    early.spans = [Span("forward", "compute", 1.0, 2.0), Span("forward", "compute", 3.0, 4.0)]
    late.spans = [Span("forward", "compute", 7.0, 8.0)]
    ax = plot.timeline({"a": early, "b": late}, waits=True, aligned=True)
    bars = [(shown(bar), bar.get_x(), bar.get_width()) for bar in ax.patches]
    grey, blue = color("waiting"), color("forward")
    assert bars == [
        (grey, 0, 3e3),
        (blue, 0, 1e3),
        (blue, 2e3, 1e3),
        (grey, 0, 1e3),
        (blue, 0, 1e3),
    ]
    assert early.spans[0].start == 1 and early.length == 3


def test_time_against_size_shows_median_range_and_prediction() -> None:
    times = [(10, 4e-3), (1000, 9e-3), (10, 1e-3), (10, 3e-3), (1000, 8e-3)]
    model = [(1000, 5e-3), (10, 2e-3)]
    lines = {"ring": times, "mine": times}, {"ring": model, "tree": model}
    ax = plot.time_against_size(*lines, marks={"half": 100})
    assert [text.get_text() for text in ax.texts] == ["half"]
    drawn = {line.get_label(): line for line in ax.lines}
    ring, predicted = drawn["ring"], drawn["ring, predicted"]
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert ring.get_xydata().tolist() == [[10, 3e-3], [1000, 8.5e-3]]
    assert predicted.get_xydata().tolist() == [[10, 2e-3], [1000, 5e-3]]
    assert shown(ring) == shown(predicted) == color("ring")
    assert predicted.is_dashed() and not ring.is_dashed()
    assert ring.get_marker() != drawn["mine"].get_marker()
    band, _ = ax.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(10, 1e-3), (10, 4e-3), (1000, 8e-3), (1000, 9e-3)}
    assert shown(band) == color("ring") and 0 < band.get_alpha() < 0.5
    assert legend(ax) == ["ring", "mine", "tree, predicted", "predicted"]  # every colour once
    assert "10 B" in ticks(ax.xaxis) and "1 ms" in ticks(ax.yaxis)


def test_bars_stand_side_by_side_with_their_values() -> None:
    series = {"measured": {"a_b": 12.4, "c": 0.123}, "predicted": {"a_b": 11.0, "c": 0.2}}
    ax = plot.bars(series, "How long", "ms")
    assert legend(ax) == ["measured", "predicted"] and ticks(ax.xaxis) == ["a\nb", "c"]
    assert (ax.get_title(loc="left"), ax.get_ylabel()) == ("How long", "ms")
    for bars in ax.containers:
        if bars.get_label() in series:
            assert [bar.get_height() for bar in bars] == list(series[bars.get_label()].values())
            assert [round(bar.get_center()[0]) for bar in bars] == [0, 1]
    assert {text.get_text() for text in ax.texts} == {"12", "0.12", "11", "0.2"}


def test_loss_shows_equal_curves_both() -> None:
    ax = plot.loss({"alone": [3, 2, 1.5], "ring": [3, 2, 1.5]})
    below, above = ax.lines
    assert below.get_xydata().tolist() == [[1, 3], [2, 2], [3, 1.5]] == above.get_xydata().tolist()
    assert below.get_linewidth() > 2 * above.get_linewidth()
    assert above.is_dashed() and not below.is_dashed()
    assert [shown(line) for line in ax.lines] == [darker(paler(palette.SPARE[0], 1)), color("ring")]
    assert legend(ax) == ["alone", "ring"]
    assert all(step.isdigit() for step in ticks(ax.xaxis))  # no half steps


def test_memory_stacks_what_lives_and_marks_the_peak() -> None:
    held = MemoryTracker(nn.Linear(1, 1))
    assert {"history", "phases"} <= vars(held).keys()
    held.history = {  # in another order than the palette's
        "activations": [0, 0, 600, 600, 200, 0],
        "parameters": [1000] * 6,
        "buffers": [0] * 6,
        "my kind": [0, 0, 0, 10, 0, 0],
        "gradients": [0, 0, 0, 0, 500, 500],
    }
    names = "too long a name", "forward", "backward", "step"
    held.phases = list(map(Phase, names, (0, 1, 3, 5), (1, 3, 5, 5)))
    ax = plot.memory(held)
    kinds, total = ["parameters", "gradients", "activations", "my kind"], [0] * 6
    assert legend(ax) == kinds[::-1]
    for name, area in zip(kinds, ax.collections, strict=True):
        assert to_hex(area.get_facecolor()[0]).upper() == palette.MEMORY.get(name, palette.SPARE[0])
        (path,) = area.get_paths()
        for change, nbytes in enumerate(held.history[name]):  # its floor and its top
            foot, total[change] = total[change], total[change] + nbytes
            for y, inside in (foot - 1, False), (total[change] + 1, False), (foot + 1, nbytes > 2):
                assert path.contains_point((change + 0.5, y)) == inside, (name, change, y)
    whole, reach, dot, *edges = ax.lines
    assert list(whole.get_ydata()) == [*total, total[-1]]
    assert dot.get_xydata().tolist() == [[4.5, 1700]] and max(total) == 1700
    assert reach.get_xydata().tolist() == [[0, 1700], [4.5, 1700]]
    said = {text.get_text(): text.get_position()[0] for text in ax.texts}
    assert said == {"peak 1.7 kB": 4.5, "forward": 3, "backward": 5}  # where there is room
    assert [shown(strip) for strip in ax.patches] == list(palette.colors(names).values())
    spans = [[1, 2], [2, 4], [4, 6], [6, 6]]  # what lives after a phase's first change, to its last
    assert [[s.get_x(), s.get_x() + s.get_width()] for s in ax.patches] == spans
    assert [edge.get_xdata()[0] for edge in edges] == sum(spans, [])
    assert ax.get_xlim() == (0, 6) and ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 1700
    assert "1 kB" in ticks(ax.yaxis) and all(n.isdigit() for n in ticks(ax.xaxis))


def test_memory_by_rank_shows_bytes_and_formula() -> None:
    held = {
        "rank 0": {"activations": 3000, "parameters": 1000, "buffers": 10, "other": 0},
        "rank 1": {"parameters": 2000, "my kind": 500},
    }
    ax = plot.memory_by_rank(held, {"rank 1": {"parameters": 1500, "gradients": 4500}})
    kinds = ["parameters", "gradients", "buffers", "activations", "my kind"]
    assert legend(ax) == [*kinds[::-1], "formula"]
    bars = {
        (bars.get_label(), round(bar.get_x() + 0.31)): bar for bars in ax.containers for bar in bars
    }
    for x, parts in enumerate(held.values()):
        foot = 0
        for kind in kinds:
            if nbytes := parts.get(kind, 0):
                bar = bars.pop((kind, x))
                assert (bar.get_y(), bar.get_height()) == (foot, nbytes)
                assert shown(bar) == palette.MEMORY.get(kind, palette.SPARE[0])
            foot += nbytes
    assert not bars  # what has no bytes has no bar
    (formula,) = ax.collections
    assert to_hex(formula.get_color()[0]) == "#000000"
    for segment, nbytes in zip(formula.get_segments(), [1500, 6000], strict=True):
        (left, low), (right, high) = segment
        assert low == high == nbytes and left < 1 - 0.31 and right > 1 + 0.31
    said = {text.get_text(): text.get_position() for text in ax.texts}
    assert said.pop("4.01 kB") > (0, 4010)  # its sum
    assert said.pop("2.5 kB\nformula: 6 kB") > (1, 6000)
    assert said == {"1 kB": (0, 500), "3 kB": (0, 2510), "2 kB": (1, 1000), "500 B": (1, 2250)}
    assert ticks(ax.xaxis) == ["rank 0", "rank 1"] and ax.get_ylim()[1] > 6000
    assert "2 kB" in ticks(ax.yaxis)
    assert "formula" not in legend(plot.memory_by_rank(held))
    with pytest.raises(ValueError, match="rank 2 is predicted and not measured"):
        plot.memory_by_rank(held, {"rank 2": {"parameters": 1}})


def bars(ax: Axes, row: int) -> list[tuple[float, float, str]]:
    """Where each begins and ends, and its colour."""
    there = [bar for bar in ax.patches if round(bar.get_center()[1]) == row]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width(), shown(bar)) for bar in there]
    return [(round(a, 6), round(b, 6), shade) for a, b, shade in ends]


def test_the_name_of_a_level_stands_where_no_curve_is() -> None:
    flat, crossing = {1: 9, 8: 9}, {1: 9, 5: 5, 6.5: 5, 8: 1}
    at = [plot.sweep({"a": c}, levels={"DDP": 5}, log="").texts[0].xy[0] for c in (flat, crossing)]
    assert at == [0.68, 0.84]


def test_sweep_shows_dots_where_measured_and_lines_where_predicted() -> None:
    measured = {"gpipe": {4: 0.5, 1: 0.75}, "1f1b": {4: 0.4}}
    ax = plot.sweep(measured, {"gpipe": {1: 0.7, 2: 0.6, 4: 0.5}}, xlabel="micro-batches")
    lines = [line for line in ax.lines if len(line.get_xdata())]
    drawn = {(line.get_marker(), shown(line)): line.get_xydata() for line in lines}
    gpipe = darker(color("gpipe"))
    assert drawn["None", gpipe].tolist() == [[1, 0.7], [2, 0.6], [4, 0.5]]
    assert drawn["o", gpipe].tolist() == [[1, 0.75], [4, 0.5]]
    assert drawn["D", color("1f1b")].tolist() == [[4, 0.4]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "4"]
    assert ax.get_xscale() == "log" and ax.get_ylim()[0] == 0
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == ["gpipe", "1f1b", "line: predicted"]


def test_breakdown_shows_parts_and_formula() -> None:
    held = {"DDP": {"parameters": 4000, "other": 500}, "DP": {}}
    held["offload"] = {"other": 1000, "parameters": 1000, "on the host": 3000}
    ax = plot.breakdown(held, "Held", {"DDP": 5000}, aside=["on the host"])
    bars = [(bar.get_x(), bar.get_width(), shown(bar)) for bar in ax.patches if bar.get_width()]
    blue, grey, host = (color(kind) for kind in ("parameters", "other", "on the host"))
    assert bars == [
        *[(0, 4000, blue), (4000, 500, grey)],
        *[(0, 1000, blue), (1000, 1000, grey), (2000, 3000, host)],
    ]
    assert [text.get_text() for text in ax.texts] == ["4.5 kB", "–", "2 kB"]
    assert [segment[0, 0] for segment in ax.collections[0].get_segments()] == [5000]
    assert ticks(ax.yaxis) == list(held) and ax.get_title(loc="left") == "Held"
    assert legend(ax) == ["parameters", "other", "on the host", "formula"]
    one = plot.breakdown({"a": {"compute": 0.5}}, "Time", show=human_time)
    assert one.get_legend() is None and [text.get_text() for text in one.texts] == ["500 ms"]


def test_roofline_is_the_lower_of_peak_and_bandwidth() -> None:
    points = [SimpleNamespace(name="linear", intensity=100, speed=8e10)]
    points += [SimpleNamespace(name=name, intensity=0.5, speed=2e9) for name in ("add", "norm")]
    ax = plot.roofline(points, 1e11, {"memory": 4e10, "cache": 1e11})
    roofs = {line.get_label(): line.get_xydata() for line in ax.lines if len(line.get_xdata()) == 3}
    assert {name: roof[1].tolist() for name, roof in roofs.items()} == {
        "memory, 40 GB/s": [2.5, 1e11],  # the ridge: bytes come as fast as they are used
        "cache, 100 GB/s": [1.0, 1e11],
    }
    (left, low), _, (_, high) = roofs["memory, 40 GB/s"]
    assert left < 0.5 and low == 4e10 * left and high == 1e11
    dots = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "o"]
    assert dots == [[[100, 8e10]], [[0.5, 2e9]], [[0.5, 2e9]]]
    linear, add, norm = ax.texts
    assert [text.get_text() for text in ax.texts] == ["linear", "add", "norm"]
    assert not add.get_window_extent().overlaps(norm.get_window_extent())
    assert {"1", "10", "100"} <= set(ticks(ax.xaxis)) and "100" in ticks(ax.yaxis)
    ax = plot.roofline([SimpleNamespace(name="at", intensity=9, speed=1e11)], 1e11, {"": 1e11})
    assert ax.texts[0].get_window_extent().y1 < ax.transData.transform((9, 1e11))[1]  # the roof


def test_weights_are_white_where_they_are_right() -> None:
    ax = plot.weights(
        {"a": {"0": (0.5, 0.5), "1": (1, 0.5)}, "b": {"0": (1e-17, 0.5), "1": (1, 1)}}
    )
    assert [text.get_text() for text in ax.texts] == ["0.5", "1", "0", "1"]
    assert ax.images[0].get_array().tolist() == [[1, 2], [2e-17, 1]]
    red, _, blue, _ = ax.images[0].to_rgba([[1, 2]])[0, 1]
    assert red > blue and min(ax.images[0].to_rgba([[1, 1]])[0, 0]) > 0.95
    assert [ticks(ax.xaxis), ticks(ax.yaxis)] == [["0", "1"], ["a", "b"]]


def test_pairs_have_the_colour_of_the_querys_rank_and_bars_count_them() -> None:
    ax = plot.pairs([[0, 3], [1, 2]])
    assert "".join(text.get_text() for text in ax.texts) == "0101000110"
    assert legend(ax) == ["rank 0", "rank 1"]
    assert shown(ax.patches[0]) == palette.RANKS[0] and shown(ax.patches[2]) == palette.RANKS[1]
    assert [bar.get_height() for bar in ax.child_axes[0].patches] == [3, 3, 2, 2]


def test_routing_has_the_colour_of_the_tokens_rank_and_counts_rows() -> None:
    ax = plot.routing([[[0, 3], [2, 3]], [[1, 2]]], experts=4)
    lines = [(shown(line), line.get_linestyle()) for line in ax.lines[:6]]
    first, second = map(darker, palette.RANKS[:2])
    assert lines[:4] == [(first, style) for style in (":", "-", "-", "-")]
    assert lines[4:] == [(second, "-"), (second, ":")]
    said = [text.get_text() for text in ax.texts]
    assert said[0] == "rank 0, tokens: 2"
    assert "rank 0, rows: 2" in said and "rank 1, rows: 4" in said


def test_load_is_white_where_it_is_even() -> None:
    ax = plot.load([[1, 3], [3, 5], [0, 4]], every=2)
    assert ax.images[0].get_array().tolist() == [[4 / 6, 0], [8 / 6, 2]]  # [expert][column]
    assert min(ax.images[0].to_rgba([[1.0]])[0, 0]) > 0.99
    blue, orange = (ax.images[0].to_rgba([[times]])[0, 0] for times in (0.0, 4.0))
    assert blue[2] > blue[0] and orange[0] > orange[2]


def test_schedule_shows_predicted_and_measured_spans() -> None:
    first = [Step(SendActivation(0, 0), 0, 9), Step(Forward(0, 3), 5.0, 5.1)]
    first += [Step(Backward(0, 3), 5.3, 5.5)]
    second = [Step(BackwardInputs(1, 0), 5.2, 5.3), Step(BackwardWeights(1, 10), 5.3, 5.31)]
    ax = plot.schedule([first, second], title="Measured")
    forward, backward, idle = map(color, ("forward", "backward", "idle"))
    assert bars(ax, 0) == [(0, 500, idle), (0, 100, forward), (300, 500, backward)]  # ms
    inputs, weights = color("backward for inputs"), color("backward for weights")
    assert bars(ax, 1) == [(0, 500, idle), (200, 300, inputs), (300, 310, weights)]
    said = [(text.get_text(), *map(round, text.get_position())) for text in ax.texts]
    assert said == [("3", 50, 0), ("3", 400, 0), ("0", 250, 1)]  # no room for the 10
    kinds = ["forward", "backward", "backward for inputs", "backward for weights", "idle"]
    assert legend(ax) == kinds
    assert ticks(ax.yaxis) == ["rank 0", "rank 1"] and ax.yaxis_inverted()
    assert ax.get_xlim() == (0, 500) and ax.get_xlabel() == "time (ms)"
    assert ax.get_title(loc="left") == "Measured"

    predicted = simulate(SCHEDULES["interleaved"](2, 2), 1, 1, 1)
    ax = plot.schedule(predicted.spans, unit="forward passes")
    assert ax.get_xlim() == (0, predicted.time) and ax.get_xlabel() == "time (forward passes)"
    assert legend(ax) == ["forward", "backward", "idle", "paler: later stages"]
    shades = {bar[2] for bar in bars(ax, 0)}
    assert shades == {idle, forward, backward, "#A2D6F3", "#73B1D5"}  # paler


# ---- palette and units --------------------------------------------------------------------


def test_a_name_has_one_colour_in_every_chart() -> None:
    groups = palette.ACTIVITIES, palette.MEMORY, palette.ALGORITHMS, palette.SCHEDULES
    groups += palette.AXES, palette.RANKS
    assert len(palette.COLORS) == sum(map(len, groups))  # no name stands in two groups
    for name in "ring", "tree", "gloo":
        line, pairs = SimpleNamespace(rank=0, spans=[Span("", name, 0, 1)]), PAIRS["ring"]
        assert color(name) == shown(plot.timeline([line]).patches[0])
        assert color(name) == shown(plot.bars({"flat": {"a": 1}, name: {"a": 1}}).patches[1])
        assert darker(color(name)) == shown(
            plot.time_against_size({"flat": pairs, name: pairs}).lines[1]
        )
        assert darker(color(name)) == shown(plot.loss({"flat": [1], name: [1]}).lines[1])
    with pytest.raises(KeyError, match="no colour for 'rings'; the palette has .*ring"):
        color("rings")


def test_colours_that_meet_in_one_picture_differ() -> None:
    named = palette.ALGORITHMS, palette.AXES, palette.MEMORY, palette.SCHEDULES
    for group in palette.RANKS, palette.SPARE, *(group.values() for group in named):
        for one, other in itertools.combinations(group, 2):
            apart = [int(one[i : i + 2], 16) - int(other[i : i + 2], 16) for i in (1, 3, 5)]
            assert np.linalg.norm(apart) > 50, (one, other)
    assert [color(f"rank {rank}") for rank in range(len(plot.RANKS))] == list(plot.RANKS)
    assert palette.colors("abcabd") == dict(zip("abcd", palette.SPARE, strict=False))


def test_what_has_to_be_seen_stands_out_from_the_ground() -> None:
    assert min(contrast(writing, GROUND) for writing in (palette.INK, palette.PALE)) >= 4.5
    assert contrast("#FFFFFF", "#000000") == 21 and round(contrast("#777777", "#FFFFFF"), 2) == 4.48
    full = {*palette.COLORS.values(), *palette.SPARE}
    for shade in full | {paler(shade, step) for shade in full for step in (1, 2)}:
        assert max(contrast(seen, GROUND) for seen in (shade, palette.edge(shade))) >= 3, shade
        assert contrast(palette.ink(shade), shade) >= 4.5, shade
        for least in 3, 4.5:
            assert contrast(darker(shade, least), GROUND) >= least, shade


# As a float, 999.5e-6 is a little less; to say 0.999 ms would be wrong.
BYTES = "0 B=0; 999 B=999.4; 1 kB=999.5; 1 kB=1000; 1.54 kB=1536; 999 kB=999499; 1 MB=999500; "
BYTES += "1 GB=999.5e6; 1 TB=999.5e9; 999 TB=999.4e12; 1234 TB=1234.1e12; -1 kB=-999.5"
TIMES = "0 s=0; 1 ns=1e-9; 0.5 ns=5e-10; 1 µs=999.6e-9; 1.23 ms=1.23e-3; 999 µs=999.5e-6; "
TIMES += "1 ms=999.6e-6; 999 ms=0.9994; 1 s=0.9995; 1000 s=999.5; 12345 s=12345"


def test_three_digits_and_a_unit() -> None:
    for line in f"{BYTES}; {TIMES}".split("; "):
        said, number = line.split("=")
        assert (human_time if said.endswith("s") else human_bytes)(float(number)) == said


# ---- the pictures -------------------------------------------------------------------------


WHERE_THEY_COME_FROM = ["img", "minidist/instruments/plot", "constraints.txt"]
CHANGED = changed.files()
if_changed = pytest.mark.soak
if CHANGED is None or changed.among(CHANGED, WHERE_THEY_COME_FROM):
    if_changed = lambda test: test  # noqa: E731


@if_changed
def test_the_pictures_are_what_their_scripts_draw(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "img")
    with matplotlib.rc_context():  # img/style.py changes the settings
        style, unread = importlib.import_module("style"), {}
        write = style.write
        monkeypatch.setattr(style, "HERE", tmp_path)

        def check(figure: Figure, name: str) -> None:
            write(figure, name)
            unread[name] = faint(figure)

        monkeypatch.setattr(style, "write", check)
        for script in sorted(set((ROOT / "img").glob("*.py")) - {ROOT / "img" / "style.py"}):
            runpy.run_path(str(script), run_name="__main__")
    assert not {name: found for name, found in unread.items() if found}
    korean = sys.modules.pop("style").KOREAN
    assert korean.keys() == {path.stem for path in (ROOT / "img/ko").iterdir()}
    pattern = "**/*.png" if (tmp_path / "ko").exists() else "*.png"  # else without the Korean font
    drawn, stored = (
        {path.relative_to(folder): pixels(path) for path in folder.glob(pattern)}
        for folder in (tmp_path, ROOT / "img")
    )
    assert stored and drawn.keys() == stored.keys()
    apart = {name: abs(image - stored[name]).max() for name, image in drawn.items()}
    assert max(apart.values()) <= 8, f"{apart}: `make img` draws them again"


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.int16)
