"""The page of ten traces: the rules of the lesson tell each from the others."""

import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

import minidist as md

HERE = Path(__file__).resolve().parents[1] / "notebooks/traces"
sys.path.insert(0, str(HERE))
import record  # noqa: E402
import traces  # noqa: E402


def diagnosis(number):
    """The cause and the rank, by the page's numbers. What is on all ranks first."""
    rows = traces.numbers(traces.load(number))
    typical = {name: median(row[name] for row in rows) for name in rows[0]}
    part = {name: typical[name] / typical["step"] for name in typical}
    if part["idle"] > 0.4:
        return "bound by Python", None
    if part["transfer"] > 0.25:
        if typical["kB each"] < 50:
            return "small messages", None
        return ("no overlap" if typical["hidden %"] < 5 else "slow link"), None
    if part["others"] < 0.15:
        return "healthy", None
    rank = min(range(len(rows)), key=lambda rank: rows[rank]["others"])
    if rows[rank]["others"] > 0.5 * typical["others"]:
        return "pauses in turn", None
    if any(e.detail["kind"] == "sent" for e in traces.load(number)[rank].of("communication")):
        return "uneven stages", rank
    if rows[rank]["computing"] < 1.15 * typical["computing"]:
        return "slow loader", rank
    more = rows[rank]["operations"] > 1.15 * typical["operations"]
    return ("more rows" if more else "slow device"), rank


@pytest.mark.parametrize("number", record.SCENES)
def test_the_rules_name_the_cause_of_each_trace(number):
    cause, rank = diagnosis(number)
    assert (cause, rank) == record.SCENES[number][:2]
    for row in traces.numbers(traces.load(number)):
        parts = sum(row[name] for name in ("computing", "others", "transfer", "idle"))
        assert abs(parts - row["step"]) < 1e-6
    assert traces.name(number, cause, rank).right
    others = [(other, rank) for other in traces.SHOWS if other != cause]
    others += [(cause, other) for other in [None, *range(4)] if other != rank]
    assert not any(traces.name(number, *other).right for other in [(None, rank), *others])


def test_the_files_are_ten_causes_and_small():
    assert sorted(scene.cause for scene in record.SCENES.values()) == sorted(traces.SHOWS)
    files = sorted(HERE.glob("*.json.gz"))
    assert files == [record.path_of(number) for number in record.SCENES]
    assert sum(path.stat().st_size for path in files) < 2**20
    assert min(map(md.tracing.validate, files)) > 500


@pytest.mark.parametrize("number", record.SCENES)
def test_a_trace_holds_what_its_scene_does(pools, number):
    """What is in it, not when."""

    def held(trace):
        found = [trace.of(category) for category in ("compute", "communication")]
        spans = sum(found, trace.steps())
        return trace.rank, Counter((e.name, e.detail.get("nbytes")) for e in spans)

    scene = record.SCENES[number]
    again = pools(4)(scene.run, **scene.arguments)
    assert list(map(held, traces.load(number))) == list(map(held, again))
