"""The script in which a replica is killed and joins again: what it prints, and what heals."""

from pathlib import Path

import pytest
from programs import HERE, Program

SCRIPT = Path(HERE) / "notebooks/scripts/heal.py"
SOON = 5  # seconds
pytestmark = pytest.mark.timeout(90)

PRINTED = """\
step 0: replica 1 has the state of 0
step 0: replica 2 has the state of 0
step 0: the mean of replicas [0, 1, 2]
step 1: the mean of replicas [0, 1, 2]
step 2: one has died and nobody steps; left are [0, 2]
step 2: the mean of replicas [0, 2]
step 3: the mean of replicas [0, 2]
step 4: the mean of replicas [0, 2]
step 5: replica 1 has the state of 0
step 5: the mean of replicas [0, 1, 2]
step 6: the mean of replicas [0, 1, 2]
step 7: the mean of replicas [0, 1, 2]
3 replicas are equal to one process that saw the same batches
"""


def run(source, tmp_path):
    with Program(source, tmp_path) as program:
        code, out, err = program.finish(timeout=80)
        assert program.gone_within(SOON) and program.temporary() == []
    return code, out, err


@pytest.mark.soak  # by day the lesson runs the script
def test_training_goes_on_without_a_replica_and_it_heals_when_it_joins(tmp_path):
    code, out, err = run(SCRIPT.read_text(), tmp_path)
    assert (code, out) == (0, PRINTED), err


BREAKS = {
    "no weights": ("model.load_state_dict(weights)", "model"),
    "no optimizer states": ("optimizer.load_state_dict(optimizer)", "optimizer"),
}


@pytest.mark.soak
@pytest.mark.parametrize("broken", BREAKS)
def test_the_script_finds_what_does_not_heal(tmp_path, broken):
    right, wrong = BREAKS[broken]
    source = SCRIPT.read_text()
    assert source.count(right) == 1
    code, _, err = run(source.replace(right, wrong), tmp_path)
    assert code == 1 and "assert max(differences) < 1e-12" in err
