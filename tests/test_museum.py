"""The museum of silent bugs: each exhibit is silent, trains, and is seen by whom it names."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "notebooks/museum"
sys.path.insert(0, str(HERE))
import museum  # noqa: E402

museum.STEPS = 40
SAY = "watch", "parity"  # the other tools are read
MENDS = {  # of the sealed ones: the line that is wrong, and what it should be
    21: (
        22,
        "    norm = sum(p.grad.square().sum() for p in model.parameters()).full_tensor().sqrt()",
    ),
    22: (18, "    layers = list(model)"),
    23: (19, "    for _ in range(1):"),
    24: (17, "    seen = loss_of(model, micro_batches[0]).item()"),
    25: (15, "    sampler = DistributedSampler(range(EPOCH), 2, rank, seed=epoch)"),
}
SEEN = {
    21: {"watch": "in the part of rank 0", "parity": "step 1", "bytes": ""},
    22: {"watch": "1.weight", "parity": "1.weight", "hashes": "", "bytes": ""},
    23: {"parity": "step 2"},
    24: {"memory": ""},
    25: {"watch": "the order of an earlier one"},
}


def holds(ranks, exhibit, seen, right, form):
    """The wrong form trains, and these tools see it, with these words; the right one none sees."""
    wrong = {tool: museum.reading(ranks, exhibit, "WRONG", tool) for tool in museum.TOOLS}
    other = {tool: museum.reading(ranks, right, form, tool) for tool in museum.TOOLS}
    assert [tool for tool in SAY if other[tool]] == []
    read = {tool for tool in museum.TOOLS[2:-1] if wrong[tool] != other[tool]}
    assert {tool for tool in SAY if wrong[tool]} | read == set(seen) - {"curve"}
    assert [tool for tool in SAY if seen.get(tool, "") not in wrong[tool]] == []
    falls = wrong["curve"][-1] < wrong["curve"][0]
    assert falls == ("curve" not in seen) and other["curve"][-1] < other["curve"][0]


@pytest.mark.parametrize("exhibit", range(1, 21))
def test_an_open_exhibit_is_seen_as_it_says(pools, exhibit):
    holds(pools(2), exhibit, museum.load(exhibit).SEEN, exhibit, "RIGHT")


@pytest.mark.parametrize("exhibit", MENDS)
def test_a_sealed_exhibit_is_mended_at_the_line_that_opens_it(pools, exhibit, tmp_path):
    line, mended = MENDS[exhibit]
    lines = Path(museum.path_of(exhibit)).read_text().splitlines()
    lines[line - 1] = mended
    right = tmp_path / "right.py"
    right.write_text("\n".join(lines))
    holds(pools(2), exhibit, SEEN[exhibit], str(right), "WRONG")
    assert museum.open(exhibit, line).right and "#" in museum.open(exhibit, line).says
    others = set(range(len(lines) + 1)) - {line - 1, line, line + 1}
    assert not any(museum.open(exhibit, other).right for other in [None, *others])
