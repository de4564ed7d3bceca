"""The pictures of the start page: lesson_map, three_ways."""

from pathlib import Path

from style import PALE, RANKS, bar, box, darker, ink, paper, save, words

from minidist.course.checks.solved import SHORT_WAY

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PARTS = [  # each lesson: its name, what it is about, and how many minutes it takes
    (
        "Ranks",
        [
            ("rank", "processes that\nsend tensors", 65),
            ("collectives", "nine operations\nof all ranks", 70),
            ("communication", "what messages\ncost", 60),
            ("networks", "nodes, and links\nthat differ", 60),
        ],
    ),
    (
        "Data",
        [
            ("data_parallel", "one process,\nmany devices", 50),
            ("distributed_data_parallel", "replicas that\nstay equal", 75),
            ("ddp_in_practice", "memory, buffers,\nuneven batches", 70),
        ],
    ),
    (
        "Model",
        [
            ("layer_splitting", "stages: a pipeline", 75),
            ("pipeline_schedules", "who does what when", 75),
            ("feature_splitting", "parts of every layer", 75),
            ("sequence_parallel", "parts of every\nactivation", 70),
            ("long_sequences", "a sequence that no\nrank holds whole", 75),
            ("experts", "many networks,\nfew of them a token", 75),
            ("mixed_parallelism", "a mesh of all three", 75),
        ],
    ),
    (
        "Memory",
        [
            ("zero", "optimizer states\nand gradients, shared", 70),
            ("fully_sharded", "no rank has\nthe whole model", 75),
            ("hiding_gathers", "a gather while\nothers compute", 70),
            ("fsdp_in_practice", "what to wrap,\nwhere, in which bits", 75),
            ("activation_checkpointing", "compute twice,\nkeep less", 75),
            ("mixed_precision", "16 bits a number", 70),
            ("offload", "what need not\nbe here", 75),
        ],
    ),
    (
        "At work",
        [
            ("real_tools", "torch, DeepSpeed,\nLightning, others", 70),
            ("reading_a_step", "where the time\nof a step goes", 70),
            ("wrong_in_silence", "faults that\nraise no error", 75),
            ("scaling_out", "a thousand ranks", 65),
            ("surviving_failures", "runs that go on", 70),
            ("beyond_gradients", "averages\nnow and then", 70),
            ("parameter_server", "a server and\ntrainers", 65),
        ],
    ),
    ("Yours", [("your_trainer", "ten exercises,\none program", 75)]),
]
SHADES = (RANKS[0], RANKS[2], RANKS[5], RANKS[3], RANKS[7], RANKS[1])


def lesson_map() -> None:
    """A column for each part, a box for each lesson, from top to bottom and left to right. Those
    of the short way have a star."""
    most = max(len(lessons) for _, lessons in PARTS)
    figure, axes = paper(2.45 * len(PARTS) + 0.1, 1.12 * most + 0.75)
    for column, ((part, lessons), shade) in enumerate(zip(PARTS, SHADES, strict=True)):
        x, top = 0.15 + 2.45 * column, 1.12 * most + 0.2
        hours = sum(minutes for *_, minutes in lessons) / 60
        title = f"{'I II III IV V VI'.split()[column]} · {part}"
        axes.text(x, top + 0.2, title, fontsize=12, fontweight="bold")
        axes.text(x + 2.25, top + 0.2, f"{hours:.1f} h", fontsize=9.5, color=PALE, ha="right")
        for row, (name, says, minutes) in enumerate(lessons):
            y = top - 1.12 * (row + 1)
            (notebook,) = NOTEBOOKS.glob(f"??_{name}.ipynb")
            box(axes, x, y, 2.25, 1.02, edgecolor=darker(shade), linewidth=1.5)
            box(axes, x, y + 0.68, 2.25, 0.34, facecolor=shade, edgecolor=darker(shade))
            head = f"{int(notebook.stem[:2])}  {name.replace('_', ' ')}"
            axes.text(x + 0.1, y + 0.78, head, fontsize=9, fontweight="bold", color=ink(shade))
            if name in SHORT_WAY:
                words(axes, x + 2.08, y + 0.53, "✦", 14, color=darker(shade, 4.5))
            axes.text(x + 0.1, y + 0.34, says, fontsize=9, va="center", linespacing=1.3)
            words(axes, x + 1.9, y + 0.14, f"{minutes} min", 8.5, color=PALE)
    lessons = [lesson for _, lessons in PARTS for lesson in lessons]
    short = sum(minutes for name, _, minutes in lessons if name in SHORT_WAY) / 60
    way = f"✦ the short way: ten lessons, {short:.1f} hours"
    axes.text(0.15, 0.12, way, fontsize=11, fontweight="bold")
    save(figure, "lesson_map")


def three_ways() -> None:
    """What four ranks divide, each in its colour: the batch, the model, or what training keeps."""
    figure, axes = paper(12.4, 4.1)
    titles = ("the data", 1.9), ("the model, by layers or by features", 6.2), ("the memory", 10.5)
    for title, x in titles:
        words(axes, x, 3.8, title, 12, fontweight="bold")
    for rank, shade in enumerate(RANKS[:4]):
        x = 0.3 + 0.85 * rank
        for sample in range(2):
            bar(axes, x + 0.33 * sample, 3.15, 0.3, 0.3, shade)
        grid(axes, x, 1.25, 0.63, [[shade] * 4] * 4)
        words(axes, 0.3 + 0.85 * rank + 0.32, 0.95, f"rank {rank}", 9, color=darker(shade, 4.5))
        for kept, y in enumerate((2.95, 2.2, 1.45)):
            bar(axes, 9.75 + 0.6 * rank, y, 0.58, 0.5, shade)
            if not rank:
                what = ("weights", "gradients", "optimizer states")[kept]
                axes.text(9.65, y + 0.25, what, fontsize=9, ha="right", va="center")
    grid(axes, 4.45, 1.25, 1.5, [[shade] * 4 for shade in RANKS[:4]])
    grid(axes, 6.6, 1.25, 1.5, [RANKS[:4]] * 4)
    words(axes, 5.2, 0.95, "pipeline", 9)
    words(axes, 7.35, 0.95, "tensor parallel", 9)
    words(axes, 1.9, 0.4, "each rank: a part of the batch, the whole model", 9.5)
    words(axes, 6.2, 0.4, "each rank: a part of the model, the whole batch", 9.5)
    words(axes, 10.5, 0.4, "each rank: a part of the batch, a part of what is kept", 9.5)
    save(figure, "three_ways")


def grid(axes, x: float, y: float, width: float, shades) -> None:
    """A model: a row for each layer, a column for each part of its features."""
    side, high = width / 4, 1.7 / 4
    for row, line in enumerate(shades):
        for column, shade in enumerate(line):
            place = x + side * column, y + 1.7 - high * (row + 1)
            bar(axes, *place, side, high, shade, edgecolor=darker(shade, 9))


if __name__ == "__main__":
    lesson_map()
    three_ways()
