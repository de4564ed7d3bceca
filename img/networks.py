"""The picture of the lesson networks: hierarchical_all_reduce."""

from style import PALE, Axes, arrow, box, paper, save, stripes, words

NODES, LOCAL = 2, 2
STEPS = [  # the name of a step, what it does to who has which half, and the bytes on the cable
    ("start", "each rank has a vector of n bytes", ""),
    ("reduce_scatter", "within each node:\na rank has half of the node's sum", "nothing crosses"),
    ("all_reduce", "between equal local ranks:\nhalf of the whole sum", "n/2 by each rank"),
    ("all_gather", "within each node:\nboth halves are put together", "nothing crosses"),
]


def hierarchical_all_reduce() -> None:
    """Two nodes of two ranks: which values each half of each rank's vector is the sum of."""
    everybody = {0, 1, 2, 3}
    held = [[{rank}, {rank}] for rank in range(4)]
    snapshots = [[[set(half) for half in rank] for rank in held]]
    for rank in range(4):  # within the node
        first = rank // LOCAL * LOCAL
        held[rank] = [{first, first + 1} if half == rank % LOCAL else set() for half in range(2)]
    snapshots.append([[set(half) for half in rank] for rank in held])
    held = [[everybody if half else set() for half in rank] for rank in held]
    snapshots.append([[set(half) for half in rank] for rank in held])
    snapshots.append([[everybody, everybody] for _ in range(4)])

    figure, axes = paper(9.6, 4.1)
    for step, ((name, says, crosses), state) in enumerate(zip(STEPS, snapshots, strict=True)):
        x = 0.15 + 2.4 * step
        axes.text(x + 1.0, 3.85, name, fontsize=11, fontweight="bold", ha="center")
        words(axes, x + 1.0, 3.45, says, 8.5, color=PALE)
        for node in range(NODES):
            _node(axes, x, 1.95 - 1.5 * node, node, state)
        if step:
            words(axes, x + 1.0, 0.16, crosses, 9)
        if step == 2:
            for local in range(LOCAL):
                middle = x + 0.62 + 0.85 * local
                arrow(axes, (middle, 1.7), (middle, 1.94), linewidth=1.6)
                arrow(axes, (middle, 1.92), (middle, 1.68), linewidth=1.6)
    words(axes, 1.15, 0.16, "on the slow cable:", 9, color=PALE)
    save(figure, "hierarchical_all_reduce")


def _node(axes: Axes, x: float, y: float, node: int, state: list[list[set[int]]]) -> None:
    box(axes, x, y, 2.05, 1.22, linestyle="--")
    axes.text(x + 0.07, y + 1.05, f"node {node}", fontsize=8, color=PALE)
    for local in range(LOCAL):
        rank = node * LOCAL + local
        left = x + 0.42 + 0.85 * local
        for half in range(2):
            stripes(axes, left, y + 0.6 - 0.4 * half, 0.38, sorted(state[rank][half]), "")
        words(axes, left + 0.19, y + 0.1, f"rank {rank}", 8, color=PALE)


if __name__ == "__main__":
    hierarchical_all_reduce()
