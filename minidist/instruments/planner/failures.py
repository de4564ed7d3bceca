"""How often to save, when machines fail: Young's interval, and a run that fails at random.
Lesson: surviving_failures

With an interval τ of training between saves that take δ, and a mean time M between failures, a
fraction δ/τ of the time goes to saving, and after each failure τ/2 of training is lost on average:
δ/τ + τ/2M is least at τ = √(2δM).
"""

import math
from random import Random

LONGEST = 12  # mean times between failures: of intervals that long, 1 in 163,000 (e^12) survives


def young(save: float, between_failures: float) -> float:
    """Seconds of training between two saves, √(2δM): Young, "A first order approximation to the
    optimum checkpoint interval" (Communications of the ACM 17, 1974). Lesson: surviving_failures.

    save: seconds that training stands still for a save, δ. between_failures: mean seconds between
    failures of the whole run, M; N ranks that each fail every F seconds have F/N. Raises ValueError
    for numbers of 0 or less.
    """
    _require_positive(save=save, between_failures=between_failures)
    return math.sqrt(2 * save * between_failures)


def expected_time(
    work: float, interval: float, save: float, between_failures: float, restart: float = 0.0
) -> float:
    """Mean seconds that `work` seconds of training take, if failures come at random, in saving and
    restarting too: M e^(R/M) (e^((τ+δ)/M) - 1) work/τ. Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps" (Future Generation Computer Systems 22, 2006).
    Lesson: surviving_failures."""
    _require_positive(work=work, interval=interval, between_failures=between_failures)
    _require_not_negative(save=save, restart=restart)
    M = between_failures
    return M * math.exp(restart / M) * math.expm1((interval + save) / M) * work / interval


def run_with_failures(
    work: float,
    interval: float,
    save: float,
    between_failures: float,
    restart: float = 0.0,
    seed: int = 0,
) -> float:
    """Seconds that such a run takes, played out once. It saves after each `interval` of training; a
    failure throws it back to the last save that was whole, and it restarts. Raises ValueError also
    for an interval so long that no save would ever be whole. Lesson: surviving_failures."""
    _require_positive(work=work, interval=interval, between_failures=between_failures)
    _require_not_negative(save=save, restart=restart)
    if min(interval, work) + save > LONGEST * between_failures:
        raise ValueError(
            f"an interval of {interval} s, with failures every {between_failures} s on average: "
            "no save would ever be whole"
        )
    random = Random(seed)
    now, done = 0.0, 0.0
    fails = between_failures * random.expovariate(1)

    def lasts(seconds: float) -> bool:
        """Go on for so long, or until it fails."""
        nonlocal now, fails
        if now + seconds <= fails:
            now += seconds
            return True
        now, fails = fails, fails + between_failures * random.expovariate(1)
        return False

    while done < work:
        piece = min(interval, work - done)
        if lasts(piece + save):
            done += piece
        else:
            while not lasts(restart):
                pass
    return now


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be more than 0, not {number}")


def _require_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} must be 0 or more, not {number}")
