"""The picture: the four operations of DataParallel, forward and backward."""

from style import INK, PALE, RANKS, Axes, arrow, box, darker, paper, save, stripes

N = 3
LEFT, DEVICES, RIGHT = 0.35, 2.75, 7.95  # where the columns begin
DEVICE_WIDTH, ROW = 3.75, 0.76
MONO = {"family": "monospace"}
LEGEND = "a row is a device · colour: the device of a share · stripes: a sum over the three"


def pile(axes: Axes, x: float, y: float, text: str) -> None:
    """The pieces of a tensor, one for each device, upon each other."""
    for device in range(N):
        box(axes, x, y + 0.26 * (N - 1 - device), 0.7, 0.26, facecolor=RANKS[device])
    axes.text(x + 0.35, y + 0.26 * N + 0.1, text, fontsize=10, fontweight="bold", ha="center")


def row(bottom: float, device: int) -> float:
    """The middle of a device's row."""
    return bottom + 0.42 + ROW * (N - 1 - device)


def devices(axes: Axes, bottom: float, backward: bool) -> None:
    """Each device with its share, its replica and its output, or with their gradients."""
    for device in range(N):
        y, shade = row(bottom, device), RANKS[device]
        box(axes, DEVICES, y - 0.31, DEVICE_WIDTH, 0.62, edgecolor=darker(shade), linewidth=1.6)
        for x in (DEVICES + 0.12, DEVICES + DEVICE_WIDTH - 0.62):
            box(axes, x, y - 0.17, 0.5, 0.34, facecolor=shade)
        box(axes, DEVICES + 1.1, y - 0.22, 1.55, 0.44, edgecolor=darker(shade))
        axes.text(DEVICES + 1.875, y, f"replica {device}", fontsize=10, ha="center", va="center")
        for x in (DEVICES + 0.68, DEVICES + 2.71):
            ends = [(x, y), (x + 0.36, y)]
            arrow(axes, *(reversed(ends) if backward else ends))


def fan(axes: Axes, one: tuple[float, float], many: float, bottom: float, **looks: object) -> None:
    """Arrows from one place to every device; with `back`, from every device to it."""
    back, shift = looks.pop("back", False), looks.pop("shift", 0.0)
    for device in range(N):
        ends = [one, (many, row(bottom, device) + shift)]
        arrow(axes, *(reversed(ends) if back else ends), color=RANKS[device], **looks)


def panel(axes: Axes, bottom: float, backward: bool, does: tuple[str, str, str, str]) -> None:
    """One way through the four operations, and what each of them does on it."""
    title = "backward" if backward else "forward"
    axes.text(LEFT - 0.1, bottom + 2.72, title, fontsize=12, fontweight="bold")
    places = [(1.95, 2.55), (1.95, -0.1), (DEVICES + DEVICE_WIDTH / 2, 2.55), (7.2, 2.55)]
    names = ["1 scatter", "2 replicate", "3 parallel_apply", "4 gather"]
    for (x, y), name, says in zip(places, names, does, strict=True):
        axes.text(x, bottom + y, name, fontsize=10.5, fontweight="bold", ha="center", **MONO)
        axes.text(x, bottom + y - 0.2, says, fontsize=9.5, color=PALE, ha="center")

    pile(axes, LEFT, bottom + 1.42, "gradient" if backward else "batch")
    pile(axes, RIGHT, bottom + 0.79, "gradient" if backward else "output")
    middle = {"fontsize": 10, "fontweight": "bold", "ha": "center"}
    if backward:
        stripes(axes, LEFT + 0.1, bottom + 0.16, 0.5, list(range(N)))
        axes.text(LEFT + 0.35, bottom - 0.1, "gradients", **middle)
    else:
        box(axes, LEFT - 0.1, bottom + 0.16, 0.9, 0.5, edgecolor=INK, linewidth=1.6)
        axes.text(LEFT + 0.35, bottom + 0.41, "model", va="center", **middle)
    devices(axes, bottom, backward)
    dashes = {"linestyle": (0, (3, 2))}
    fan(axes, (LEFT + 0.8, bottom + 1.81), DEVICES, bottom, back=backward, shift=0.12)
    fan(axes, (LEFT + 0.85, bottom + 0.41), DEVICES, bottom, back=backward, shift=-0.12, **dashes)
    fan(axes, (RIGHT - 0.08, bottom + 1.18), DEVICES + DEVICE_WIDTH, bottom, back=not backward)


def data_parallel() -> None:
    """The batch goes from left to right, its gradients go back."""
    figure, axes = paper(9.0, 7.2)
    forward = "cut the batch", "copy the model", "a thread for each device", "join the outputs"
    backward = "join", "sum the gradients", "on the CPU, one thread", "cut the gradient"
    panel(axes, 4.22, False, forward)
    panel(axes, 0.72, True, backward)
    axes.text(4.5, 0.14, LEGEND, ha="center", fontsize=9.5, color=PALE)
    save(figure, "data_parallel")


if __name__ == "__main__":
    data_parallel()
