"""The palette, the units and the paper of every chart and picture of the course.

A colour means the same thing in every lesson. Look it up by name: `color("ring")`,
`color("backward")`, `color("rank 2")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# After Okabe and Ito: any two stay apart for readers with any of the common colour blindnesses.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4B3F72")
ACTIVITIES = {  # what a rank does with its time
    "compute": "#C9DCE8",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "backward for inputs": "#003F66",
    "backward for weights": "#8F7CC4",
    "step": "#009E73",
    "communication": "#D55E00",
    "agreement": "#CC79A7",
    "waiting": "#C4C8CE",
    "idle": "#C4C8CE",
}
MEMORY = {  # what a rank's memory holds
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer states": "#009E73",
    "buffers": "#56B4E9",
    "activations": "#CC79A7",
    "communication buffers": "#D55E00",
    "other": "#999999",
    "on the host": "#E3D3A8",
}
ALGORITHMS = {  # how bytes travel, and what carries them
    "naive": "#D55E00",
    "ring": "#0072B2",
    "tree": "#009E73",
    "recursive_doubling": "#CC79A7",
    "halving_doubling": "#E69F00",
    "flat": "#56B4E9",
    "gloo": "#333333",
    "nccl": "#7A5195",
    "shm": "#8C6D31",
}
AXES = {  # of a mesh
    "data": "#882255",
    "pipeline": "#44AA99",
    "tensor": "#999933",
}
SCHEDULES = {  # of a pipeline; "naive" is above
    "gpipe": "#E69F00",
    "1f1b": "#0072B2",
    "interleaved": "#009E73",
    "zero_bubble": "#CC79A7",
}
COLORS = {
    **ACTIVITIES,
    **MEMORY,
    **ALGORITHMS,
    **SCHEDULES,
    **AXES,
    **{f"rank {rank}": shade for rank, shade in enumerate(RANKS)},
}
SPARE = ("#332288", "#AA4499", "#999933", "#44AA99", "#882255", "#999999")  # for other names
MARKERS = dict(zip(ALGORITHMS, "Xo^DsPv<>", strict=True))  # lines differ by more than colour

GROUND = "#E9ECF0"  # soft beside a white page, and no glare upon a dark one
INK = "#222222"  # writing, and what has to be seen
PALE = "#555B64"  # writing that may be overlooked
FAINT = "#D2D7DE"  # grid lines
STYLE: Any = {
    "figure.dpi": 110,
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.labelcolor": INK,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib: the same on every machine
    "font.size": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "text.color": INK,
}


def color(name: str) -> str:
    """The colour that `name` has everywhere in the course; for an unknown name a KeyError."""
    if name not in COLORS:
        raise KeyError(f"no colour for {name!r}; the palette has {', '.join(COLORS)}")
    return COLORS[name]


def colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the palette's own, or for other names the spare ones in order."""
    shades: dict[str, str] = {}
    others = 0
    for name in names:
        if name in COLORS:
            shades[name] = COLORS[name]
        elif name not in shades:
            shades[name] = SPARE[others % len(SPARE)]
            others += 1
    return shades


def contrast(one: str, other: str) -> float:
    """From 1, the same colour, to 21, black on white, as WCAG 2.2 defines it."""
    dark, bright = sorted(map(_luminance, (one, other)))
    return (bright + 0.05) / (dark + 0.05)


def _luminance(shade: str) -> float:
    parts = (int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink(background: str) -> str:
    """The writing, black or white, that is easier to read upon `background` ("#RRGGBB")."""
    return max("#000000", "#FFFFFF", key=lambda shade: contrast(shade, background))


def darker(shade: str, least: float = 3) -> str:
    """The colour for what is thin: darker, if need be, until its contrast with the ground is
    `least`: 3 for lines, 4.5 for writing."""
    while contrast(shade, GROUND) < least:
        shade = "#" + "".join(f"{int(0.97 * int(shade[i : i + 2], 16)):02X}" for i in (1, 3, 5))
    return shade


def edge(shade: str) -> str:
    """The edge of an area of this colour: the ground's, so that neighbours stand apart, or a darker
    line around an area that the ground would swallow."""
    return GROUND if contrast(shade, GROUND) >= 3 else darker(shade)


def area(shade: str) -> dict[str, Any]:
    """How an area of this colour looks: for bars and patches of matplotlib."""
    return {"facecolor": shade, "edgecolor": edge(shade), "linewidth": 0.6}


def paler(shade: str, times: int) -> str:
    """The colour "#RRGGBB", nearer to white by one step or several."""
    keep = 0.55**times
    parts = (255 - keep * (255 - int(shade[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02X}" for part in parts)


def _human(value: float, units: Sequence[tuple[float, str]]) -> str:
    rounded = float(f"{value:.3g}")  # first: 999.5 B round up to 1 kB
    for scale, unit in units:
        if abs(rounded) < 999.5 * scale:
            return f"{rounded / scale:.3g} {unit}"
    return f"{value / scale:.0f} {unit}"


def human_bytes(nbytes: float) -> str:
    """Three digits and a decimal unit (1 kB is 1000 B): `human_bytes(1536)` is "1.54 kB"."""
    return _human(nbytes, ((1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")))


def human_time(seconds: float) -> str:
    """Three digits and a unit: `human_time(0.00123)` is "1.23 ms"."""
    if seconds == 0:
        return "0 s"
    return _human(seconds, ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1, "s")))


@contextmanager
def style() -> Iterator[Any]:
    """Yields `matplotlib.pyplot`; what is drawn within the block looks as the course does."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        message = "minidist.plot draws with matplotlib: pip install 'minidist[course]'"
        raise ModuleNotFoundError(message, name="matplotlib") from error
    with plt.rc_context(STYLE):
        yield plt
