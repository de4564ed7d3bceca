"""Random trainings, each held against one process: in this folder's parent,
`python -m fuzz --minutes 10`.

A trial is drawn from its number alone: a model, a strategy and its options, optimizers, a loop, and
what a script does besides (`habits`).
Every rank trains by the strategy and, beside it, alone on the whole batch; after each step the
weights, the buffers and the losses must be equal. A number that failed fails again:
`--first 123 --trials 1`. `test_every_strategy` has trials that are not drawn.

To read: `trials` (what is drawn), `random_models`, `alone` (how one process trains), then
`strategies` (what each of them does otherwise), `habits` and `beside_one_process` (what is
compared).
"""

import contextlib
import itertools
import time

import minidist as md
from fuzz.beside_one_process import on_a_rank
from fuzz.trials import STRATEGIES, Trial, draw
from minidist.machine.runtime import Pool

__all__ = ["STRATEGIES", "Trial", "draw", "on_a_rank", "run"]


def run(minutes: float, first: int = 0, trials: int | None = None) -> list[Trial]:
    """Try numbers from `first` on, for so long or so many. Prints and returns what differs."""
    end, failed = time.monotonic() + 60 * minutes, []
    counts = dict.fromkeys(STRATEGIES, 0)
    with contextlib.ExitStack() as stack:
        pools: dict[tuple[int, str], Pool] = {}
        for number in itertools.count(first):
            if number - first == trials or time.monotonic() > end:
                break
            trial = draw(number)
            key = trial.world_size, trial.backend
            if key not in pools:
                pools[key] = stack.enter_context(md.ranks(*key))
            counts[trial.strategy] += 1
            try:
                problem = next(filter(None, pools[key](on_a_rank, trial)), "")
            except md.RankError as error:
                problem = str(error).partition("\n\n")[0]
            if problem:
                failed.append(trial)
                print(f"{trial}\n  {problem}", flush=True)
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{sum(counts.values())} trials ({words}): {len(failed)} differ from one process")
    return failed
