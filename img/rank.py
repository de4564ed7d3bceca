"""The pictures of the lesson rank: rank, send_recv, rendezvous."""

from math import cos, pi, sin

from style import FIELD, INK, PALE, RANKS, arrow, box, darker, ink, name, paper, save


def rank() -> None:
    """Two nodes of two processes, and what each process is told."""
    figure, axes = paper(8.4, 3.5)
    box(axes, 0.15, 0.15, 8.1, 3.0, facecolor=FIELD, edgecolor="none")
    axes.text(0.35, 2.87, "the world: 4 processes, world size 4", fontsize=11, fontweight="bold")
    for node in range(2):
        left = 0.35 + 3.95 * node
        box(axes, left, 0.35, 3.75, 2.3, linestyle="--")
        axes.text(left + 0.15, 2.35, f"node {node}", fontsize=10, color=PALE)
        for local in range(2):
            number = 2 * node + local
            x = left + 0.15 + 1.78 * local
            shade = RANKS[number]
            box(axes, x, 0.5, 1.66, 1.7, edgecolor=darker(shade), linewidth=2)
            box(axes, x, 1.72, 1.66, 0.48, facecolor=shade, edgecolor=darker(shade))
            name(axes, x + 0.83, 1.96, number, 12)
            told = f"RANK={number}\nWORLD_SIZE=4\nGROUP_RANK={node}\nLOCAL_RANK={local}"
            axes.text(
                x + 0.14, 1.1, told, family="monospace", fontsize=9, va="center", linespacing=1.5
            )
    axes.text(
        4.2,
        3.28,
        "one program, started four times; environment variables tell each copy which one it is",
        ha="center",
        fontsize=9.5,
        color=PALE,
    )
    save(figure, "rank")


def send_recv() -> None:
    """A token goes round a ring of four, and every rank adds its number."""
    figure, axes = paper(8.4, 2.35)
    xs = [1.3 + 1.93 * number for number in range(4)]
    sent = [0, 1, 3, 6]
    for number, x in enumerate(xs):
        shade = RANKS[number]
        box(axes, x - 0.62, 1.3, 1.24, 0.8, facecolor=shade, edgecolor=darker(shade))
        name(axes, x, 1.8, number, 12)
        adds = "starts with 0" if number == 0 else f"adds {number}"
        axes.text(x, 1.5, adds, color=ink(shade), fontsize=9, ha="center", va="center")
    for number in range(3):
        arrow(axes, (xs[number] + 0.64, 1.7), (xs[number + 1] - 0.64, 1.7), linewidth=1.8)
        middle = (xs[number] + xs[number + 1]) / 2
        axes.text(middle, 1.84, str(sent[number]), fontsize=13, fontweight="bold", ha="center")
    # the way back, under the others
    axes.plot([xs[3], xs[3], xs[0]], [1.28, 0.62, 0.62], color=INK, linewidth=1.8)
    arrow(axes, (xs[0], 0.62), (xs[0], 1.28), linewidth=1.8)
    axes.text(4.2, 0.76, "?", fontsize=14, fontweight="bold", ha="center")
    axes.text(
        4.2,
        0.3,
        "an arrow: the rank at its tail sends, the rank at its head receives",
        fontsize=9.5,
        color=PALE,
        ha="center",
    )
    save(figure, "send_recv")


def rendezvous() -> None:
    """Ranks write their addresses to a store, read the others', and talk directly."""
    figure, axes = paper(8.4, 3.1)
    titles = [
        "1  everybody writes\nits address",
        "2  and waits for\nthose of the others",
        "3  from then on they\ntalk directly",
    ]
    for panel, title in enumerate(titles):
        middle = 1.4 + 2.8 * panel
        axes.text(middle, 2.78, title, fontsize=10.5, fontweight="bold", ha="center", va="center")
        places = [
            (middle + 0.98 * cos(pi / 4 + pi / 2 * k), 1.3 + 0.85 * sin(pi / 4 + pi / 2 * k))
            for k in (1, 0, 3, 2)
        ]
        corners = [
            (x + (0.24 if x < middle else -0.24), y + (0.25 if y < 1.3 else -0.25))
            for x, y in places
        ]
        if panel < 2:
            box(axes, middle - 0.33, 1.06, 0.66, 0.48, facecolor=FIELD)
            axes.text(middle, 1.3, "store", ha="center", va="center", fontsize=10)
            doors = [
                (middle + (-0.24 if x < middle else 0.24), 1.3 + (0.25 if y > 1.3 else -0.25))
                for x, y in places
            ]
            for corner, door in zip(corners, doors, strict=True):
                arrow(axes, *((corner, door) if panel == 0 else (door, corner)))
        else:
            for a in range(4):
                for b in range(a):
                    arrow(axes, places[a], places[b], arrowstyle="-", color=PALE, zorder=0)
        for number, (x, y) in enumerate(places):
            shade = RANKS[number]
            box(axes, x - 0.3, y - 0.19, 0.6, 0.38, facecolor=shade)
            name(axes, x, y, number, 9.5)
    axes.text(
        4.2,
        0.14,
        "the store: a file that all can read, or a small server at MASTER_ADDR:MASTER_PORT",
        ha="center",
        fontsize=9.5,
        color=PALE,
    )
    save(figure, "rendezvous")


if __name__ == "__main__":
    rank()
    send_recv()
    rendezvous()
