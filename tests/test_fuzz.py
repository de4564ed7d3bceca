"""Random trials: they find nothing in the strategies, and they do find what is wrong."""

import sys
from dataclasses import replace
from itertools import islice
from random import Random
from unittest import mock

import fuzz
import pytest
from fuzz import __main__ as command
from programs import SEED

from minidist.fully_sharded import state


def of(strategy):
    """The trials of a strategy, by their numbers."""
    return (trial for trial in map(fuzz.draw, range(1000)) if trial.strategy == strategy)


@pytest.mark.parametrize("strategy", fuzz.STRATEGIES)
def test_trials_of_each_strategy_are_equal_to_one_process(pools, strategy):
    for trial in islice(of(strategy), 5):
        assert pools(trial.world_size)(fuzz.on_a_rank, trial) == [""] * trial.world_size, trial


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_hundreds_of_trials_are_equal_to_one_process():
    assert fuzz.run(minutes=15, first=Random(SEED).randrange(10**9), trials=300) == []


def with_a_mean_that_is_too_large(trial):
    deliver = state.deliver

    def larger(parameter, anywhere):
        parameter.mean *= 1 + 1e-8
        deliver(parameter, anywhere)

    with mock.patch.object(state, "deliver", larger):
        return fuzz.on_a_rank(trial)


def test_a_wrong_mean_is_found(pools):
    trial = next(t for t in of("fully_shard") if t.optimizers == ("SGD",) and t.clip is None)
    found = pools(trial.world_size)(with_a_mean_that_is_too_large, trial)
    assert all(words.startswith("step 0: ") for words in found), found


def test_the_command_prints_what_differs_and_ends_with_1(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code, capsys.readouterr().out

    broken = replace(fuzz.draw(5), model="mlp", strategy="ddp", options={"bucket_cap": 1})
    monkeypatch.setattr(fuzz, "draw", {5: fuzz.draw(5), 6: broken}.get)
    code, said = run("--first", "5", "--trials", "1")
    assert code == 0 and said.startswith("1 trials (") and "0 differ" in said
    code, said = run("--first", "5", "--trials", "2")
    assert code == 1 and "1 differ" in said and said.count("unexpected keyword argument") == 1
    assert run("--minutes", "0")[0] == 2
