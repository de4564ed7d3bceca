"""`%ranks`, a line of its own: the ranks that there are, and what each does now."""

import psutil

from minidist.machine.runtime import Pool


def table(own: Pool | None) -> str:
    """All ranks of this program; `own` are those of `%%ranks`."""
    pools = sorted(Pool.opened, key=lambda pool: (pool is not own, pool.pids))
    if not pools:
        return "There are no ranks. A %%ranks cell starts them."
    return "\n\n".join(_lines(pool, pool is own) for pool in pools)


def _lines(pool: Pool, own: bool) -> str:
    name = "%%ranks" if own else "Another pool"
    states = pool.now()
    if not states:
        return f"{name}: its {pool.world_size} ranks have ended, and the next call starts new ones."
    lines = [f"{name}: {pool.world_size} ranks", "rank      pid  resident  now"]
    for rank, (pid, now) in enumerate(zip(pool.pids, states, strict=True)):
        try:
            memory = f"{psutil.Process(pid).memory_info().rss / 1e6:,.0f} MB"
        except psutil.Error:
            memory, now = "", "has ended"
        lines.append(f"{rank:4} {pid:8} {memory:>9}  {': '.join(map(str.strip, now.splitlines()))}")
    return "\n".join(lines)
