"""Table 1 of the ZeRO paper (arXiv 1910.02054), beside the planner's numbers. Lesson: zero."""

from minidist.instruments.planner.model_states import memory

SIZES = {"7.5 billion": 7.5e9, "128 billion": 128e9, "1 trillion": 1e12}  # parameters
PRINTED = """
   1  120  120  120   2048 2048 2048  16000 16000 16000
   4 52.5 41.3   30    896  704  512   7000  5500  4000
  16 35.6 21.6  7.5    608  368  128   4750  2875  1000
  64 31.4 16.6 1.88    536  284   32   4187  2218   250
 256 30.4 15.4 0.47    518  263    8   4046  2054  62.5
1024 30.1 15.1 0.12    513  257    2   4011  2013  15.6
"""
"""Ranks, then GB a rank in stages 1, 2 and 3 for each size. The paper rounds 7.5 billion and cuts
the others off."""


def zero_cells() -> list[tuple[int, str, list[tuple[str, float]]]]:
    """Rows of (ranks, size, [(the printed GB, ours), for stages 1, 2 and 3])."""
    rows = []
    for line in PRINTED.strip().splitlines():
        ranks, *row = line.split()
        for i, (name, size) in enumerate(SIZES.items()):
            ours = [memory(size, int(ranks), stage).total / 1e9 for stage in (1, 2, 3)]
            rows.append((int(ranks), name, list(zip(row[3 * i : 3 * i + 3], ours, strict=True))))
    return rows


def zero_table() -> str:
    """The table in GB: each number as printed, ours, and how far ours is off. Lesson: zero."""
    lines = [f"{'':20}" + "".join(f"{f'ZeRO-{stage}':^26}" for stage in (1, 2, 3))]
    lines.append(f"{'ranks':>5}  {'parameters':13}" + "  printed     ours    off" * 3)
    for ranks, size, cells in zero_cells():
        cell = [f"{a:>9} {b:8.6g} {b / float(a) - 1:+6.1%}" for a, b in cells]
        lines.append(f"{ranks:5}  {size:13}" + " ".join(cell))
    return "\n".join(lines)
