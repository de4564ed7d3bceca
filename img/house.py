"""The picture of CONTRIBUTING.md: the rooms of the library, and who takes from whom."""

from pathlib import Path

from start import SHADES
from style import INK, PALE, arrow, box, ink, paper, save, words

# The first floor by parts of the course, from left to right as the rooms import each other.
FIRST = {
    "Ranks": ["rank", "collectives"],
    "Data": ["data_parallel", "distributed_data_parallel"],
    "Model": ["pipeline", "tensor_parallel", "context_parallel", "experts", "mixed"],
    "Memory": ["zero", "fully_sharded", "checkpointing", "mixed_precision", "offload"],
    "At work": ["saving", "averaging", "parameter_server"],
}
# Below it: each folder, what its rooms are for, and what each one does.
BELOW = {
    "machine": (
        "runs the ranks",
        {
            "runtime": "processes, errors, output",
            "backend": "messages in shared memory",
            "notebook": "%%ranks in a cell",
        },
    ),
    "instruments": (
        "measures and predicts",
        {
            "measure": "bytes, seconds, memory",
            "link": "an emulated network",
            "parity": "equal to one process?",
            "watching": "the same, in your own loop",
            "doctor": "the same, for a script",
            "tracing": "where a step's time goes",
            "planner": "before a run: does it fit?",
            "scaling": "one rank of 1,024, alone",
            "compare": "beside other systems",
            "bench": "our figures beside torch's",
            "plot": "all charts",
        },
    ),
    "course": (
        "what the notebooks need",
        {
            "checks": "puzzles and exercises",
            "prediction": "guess, then measure",
            "language": "their sentences in Korean",
            "zoo": "small models and data",
            "trainer": "ten exercises as one program",
        },
    ),
}


def rooms(folder: Path) -> set[str]:
    """The modules in a folder, but for those that begin with an underscore."""
    there = [path for path in folder.iterdir() if path.suffix == ".py" or [*path.glob("*.py")]]
    found = {path.stem for path in there}
    return {name for name in found if not name.startswith("_")}


def house() -> None:
    """A column for each part; under them the common room, and the three folders below."""
    figure, axes = paper(12.4, 9.35)
    words(axes, 0.15, 9.15, "minidist/", 12, ha="left", fontweight="bold")
    words(axes, 1.25, 9.15, "what the lessons teach", 9.5, ha="left", color=PALE)
    for column, ((part, names), shade) in enumerate(zip(FIRST.items(), SHADES[:5], strict=True)):
        x = 0.15 + 2.45 * column
        words(axes, x, 8.8, part, 10, ha="left", color=PALE)
        for row, name in enumerate(names):
            box(axes, x, 8.2 - 0.5 * row, 2.25, 0.42, facecolor=shade)
            words(axes, x + 1.125, 8.41 - 0.5 * row, name, 9.5, color=ink(shade))
    box(axes, 0.15, 5.6, 12.05, 0.42)
    words(axes, 6.17, 5.81, "common: what several strategies need", 9.5)
    height, x = 4.75, 0.15
    for folder, (what, within) in BELOW.items():
        width = 3.9
        box(axes, x, 0.15, width, height, edgecolor=INK)
        words(axes, x + 0.15, height - 0.1, f"minidist/{folder}/", 12, ha="left", fontweight="bold")
        words(axes, x + 0.15, height - 0.38, what, 9.5, ha="left", color=PALE)
        for row, (name, does) in enumerate(within.items()):
            y = height - 0.75 - 0.335 * row
            words(axes, x + 0.15, y, name, 9.5, ha="left", fontweight="bold")
            words(axes, x + 1.25, y, does, 9.5, ha="left")
        x += 4.08
    arrow(axes, (2.1, 5.55), (2.1, 4.95))
    words(axes, 2.25, 5.25, "run on", 9, ha="left", color=PALE)
    arrow(axes, (5.0, 5.55), (5.0, 4.95))
    words(axes, 5.15, 5.25, "use measure, link", 9, ha="left", color=PALE)
    arrow(axes, (7.3, 4.95), (7.3, 5.55))
    words(axes, 7.45, 5.25, "measure them", 9, ha="left", color=PALE)
    arrow(axes, (10.3, 4.95), (10.3, 5.55))
    words(axes, 10.45, 5.25, "ask about them", 9, ha="left", color=PALE)
    save(figure, "house")


if __name__ == "__main__":
    house()
