"""The pictures of the lesson mixed_precision: a number bit for bit, and a parameter in a step."""

from style import EMPTY, INK, PALE, Axes, arrow, bar, ink, paper, save, words

from minidist.instruments.plot import color

BYTE, HIGH = 0.42, 0.46  # inches: a byte's width, and the height of a number


def number(axes: Axes, x: float, y: float, nbytes: int, kind: str, text: str) -> None:
    """A number of so many bytes, from its lower left corner."""
    bar(axes, x, y, BYTE * nbytes, HIGH, color(kind))
    middle = x + BYTE * nbytes / 2
    words(axes, middle, y + HIGH / 2, text, 9, color=ink(color(kind)))
    words(axes, middle, y - 0.15, f"{nbytes} bytes", 8.5, color=PALE)


def mixed_precision() -> None:
    """A 16-bit weight and gradient for forward and backward; 32 bits for Adam."""
    figure, axes = paper(10.6, 3.5)
    words(axes, 2.3, 3.3, "16 bits: forward and backward", 11.5, fontweight="bold")
    words(axes, 7.9, 3.3, "32 bits: Adam's step", 11.5, fontweight="bold")
    axes.plot([5.1, 5.1], [0.38, 3.4], color=PALE, lw=1, ls=(0, (3, 3)))
    number(axes, 1.9, 2.3, 2, "parameters", "weight")
    number(axes, 1.9, 0.7, 2, "gradients", "gradient")
    travel = {"color": INK, "linewidth": 1.8}
    arrow(axes, (2.32, 2.02), (2.32, 1.22), **travel)
    words(axes, 1.2, 1.62, "products of matrices", 9.5)
    number(axes, 7.0, 2.3, 4, "optimizer states", "master weight")
    number(axes, 6.1, 0.7, 4, "optimizer states", "mean")
    number(axes, 8.0, 0.7, 4, "optimizer states", "mean square")
    arrow(axes, (2.85, 0.93), (5.98, 0.93), **travel)
    words(axes, 4.35, 1.1, "widened", 9.5)
    arrow(axes, (7.85, 1.25), (7.85, 2.0), **travel)
    words(axes, 8.9, 1.62, "adds a small update", 9.5)
    arrow(axes, (6.9, 2.53), (2.85, 2.53), **travel)
    words(axes, 4.35, 2.7, "rounded", 9.5)
    words(axes, 5.3, 0.12, "2 + 2 + (4 + 4 + 4) = 16 bytes a parameter", 9.5, color=PALE)
    save(figure, "mixed_precision")


FORMATS = {
    "float32": (8, 23),
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "E4M3": (4, 3),
    "E5M2": (5, 2),
}
BIT = 0.26  # inches


def number_formats() -> None:
    """Sign, exponent and digits, bit for bit."""
    figure, axes = paper(10.6, 3.6)
    shades = color("optimizer states"), color("parameters")
    for row, (name, parts) in enumerate(FORMATS.items()):
        x, y = 1.5, 2.75 - 0.6 * row
        words(axes, 0.2, y + 0.2, name, 11, ha="left", fontweight="bold")
        bar(axes, x, y, BIT, 0.4, EMPTY)
        words(axes, x + BIT / 2, y + 0.2, "±", 9.5)
        x += BIT
        for bits, shade, kind in zip(parts, shades, ("exponent", "digits"), strict=True):
            for place in range(bits):
                bar(axes, x + BIT * place, y, BIT, 0.4, shade)
            said = f"{bits} {kind}" if bits > 4 else str(bits)
            behind = {"fc": shade, "ec": "none", "pad": 1.5}
            words(axes, x + BIT * bits / 2, y + 0.2, said, 9.5, color=ink(shade), bbox=behind)
            x += BIT * bits
        words(axes, x + 0.12, y + 0.2, f"{1 + sum(parts)} bits", 9.5, color=PALE, ha="left")
    words(axes, 1.5, 0.12, "±: the sign", 9.5, color=PALE, ha="left")
    save(figure, "number_formats")


if __name__ == "__main__":
    number_formats()
    mixed_precision()
