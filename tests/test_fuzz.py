"""Random trials: they find nothing in the strategies, and they do find what is wrong."""

import sys

import pytest

from minidist import __main__, fuzz


@pytest.mark.parametrize("strategy", fuzz.STRATEGIES)
def test_trials_of_each_strategy_are_equal_to_one_process(pools, strategy):
    numbers = (number for number in range(1000) if fuzz.draw(number).strategy == strategy)
    for _, number in zip(range(3), numbers, strict=False):
        trial = fuzz.draw(number)
        assert pools(trial.world_size)(fuzz.on_a_rank, trial) == [""] * trial.world_size, trial


def without_averages(trial):
    def alone(trial, module):
        kind, rates = fuzz.OPTIMIZERS[trial.optimizer]
        return module, kind(module.parameters(), **rates)

    right, fuzz.wrap = fuzz.wrap, alone
    try:
        return fuzz.on_a_rank(trial)
    finally:
        fuzz.wrap = right


def test_ranks_that_do_not_average_are_found(pools):
    trial = next(t for t in map(fuzz.draw, range(100)) if t.strategy == "ddp" and t.batch > 1)
    for said in pools(trial.world_size)(without_averages, trial):
        assert said.startswith("step 0: ") and "differs from one process" in said


def test_a_number_is_always_the_same_trial_and_all_options_are_drawn():
    assert fuzz.draw(7) == fuzz.draw(7) != fuzz.draw(8)
    trials = list(map(fuzz.draw, range(300)))
    for field in "world_size", "backend", "model", "strategy", "optimizer", "passes", "clip":
        assert len({getattr(trial, field) for trial in trials}) > 1, field
    assert len({str(trial.options) for trial in trials}) > 40


def test_the_command_prints_what_differs_and_ends_with_1(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist", "fuzz", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return ended.value.code, capsys.readouterr()

    code, said = command("--first", "5", "--trials", "1")
    assert code == 0 and said.out.startswith("1 trials (") and "0 differ" in said.out
    broken = fuzz.Trial(5, 2, "shm", "mlp", "ddp", "SGD", 2, 1, None, {"bucket_cap_mb": -1})
    monkeypatch.setattr(fuzz, "draw", lambda number: broken)
    code, said = command("--trials", "2")
    assert code == 1 and "2 differ" in said.out and said.out.count("bucket_cap_mb must be") == 2
    assert command("--minutes", "0")[0] == 2
