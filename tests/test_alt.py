"""A plot says in words what it shows."""

import matplotlib
import pytest

from minidist.instruments import plot
from minidist.instruments.plot.alt import describe

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    plt.close("all")


def test_a_chart_tells_title_axes_names_and_values() -> None:
    series = {"measured": {"ring": 1.5, "two_level": 2.5}, "predicted": {"ring": 9, "two_level": 8}}
    assert describe(plot.bars(series, "A step", "ms").figure) == (
        "Bars: A step. Across: ring, two level. Up: ms 0 to 8. Shown: measured, predicted. "
        "Written in it: 1.5, 2.5, 9, 8."
    )


def test_an_axis_of_values_tells_its_ends_as_they_are_written() -> None:
    curve = {1: 0.002, 2: 0.003, 4: 0.001}
    labels = {"title": "T", "xlabel": "m", "ylabel": "time", "show": plot.human_time}
    said = describe(plot.sweep({"gpipe": curve}, {"gpipe": curve}, **labels).figure)
    assert (
        said == "Lines: T. Across: m 1 to 4. Up: time 0 s to 3 ms. Shown: gpipe, line: predicted."
    )


def test_a_scale_of_colours_is_told() -> None:
    said = describe(plot.load([[1, 3], [3, 5]]).figure)
    assert said == (
        "Heat map: Load. Across: steps 0.00 to 2.00. Up: expert 0. "
        "Colours: no title. Up: rows / even share 0 to 4."
    )


def test_every_chart_of_a_figure_is_told_and_plain_ones_too() -> None:
    figure, (left, right) = plt.subplots(1, 2)
    left.plot([0, 10], [0, 1])
    left.set(title="$2^{3}$ ranks", xlabel="steps", xticks=[0, 10])
    right.imshow([[1, 2], [3, 4]])
    for place in range(30):
        right.text(0, 0, str(place))
    said = describe(figure)
    assert said.startswith(
        "Lines: 2^3 ranks. Across: steps 0 to 10. Up: 0.0 to 1.0. Heat map: no title."
    )
    assert "Written" not in said  # a table that nobody listens to
    assert describe(plt.figure()) == "An empty figure."
