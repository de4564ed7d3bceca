"""`%ranks`, a line of its own: the ranks that there are, and which are in a call."""

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
    if not pool.pids:
        return f"{name}: its {pool.world_size} ranks have ended, and the next call starts new ones."
    lines = [f"{name}: {pool.world_size} ranks", "rank      pid  resident  now"]
    for rank, pid in enumerate(pool.pids):
        memory, now = "", "in a call" if pool.is_called else "idle"
        try:
            memory = f"{psutil.Process(pid).memory_info().rss / 1e6:,.0f} MB"
        except psutil.Error:
            now = "has ended"
        lines.append(f"{rank:4} {pid:8} {memory:>9}  {now}")
    return "\n".join(lines)
