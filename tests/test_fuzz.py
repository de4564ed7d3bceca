"""Random trials: they find nothing in the strategies, and they do find what is wrong."""

import contextlib
import dataclasses
import pkgutil
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minidist import __main__, fuzz
from minidist.common import norm as norm_room


@pytest.mark.parametrize("strategy", fuzz.STRATEGIES)
def test_trials_of_each_strategy_are_equal_to_one_process(pools, strategy):
    numbers = (number for number in range(1000) if fuzz.draw(number).strategy == strategy)
    for _, number in zip(range(3), numbers, strict=False):
        trial = fuzz.draw(number)
        assert pools(trial.world_size)(fuzz.on_a_rank, trial) == [""] * trial.world_size, trial


# ---- what is planted is found -----------------------------------------------------------------


def lose(pass_backward):
    """A rank that has two stages loses the gradients of the second."""

    def backward(executor, stage, i):
        pass_backward(executor, stage, i)
        if stage >= dist.get_world_size():
            executor._stages[stage].module.zero_grad()

    return backward


@contextlib.contextmanager
def forgetful(model):
    """A `no_sync` after which nothing is left of the passes within it."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, False
    yield
    model.require_backward_grad_sync = before
    model.zero_grad()


def keep_the_old(module):
    """An LSTM that does not notice that its parameters are others."""
    if isinstance(module, torch.nn.LSTM):
        module._flat_weight_refs = [None for _ in module._flat_weights]


def clip_the_first(model, norm):
    shards = model._optimizers[0].shards
    return norm_room.clip_grad_norm_(
        shards, norm, groups=[model.process_group], device=torch.device("cpu")
    )


def without_the_last_norm(plan):
    def llama_plan(model):
        return {name: style for name, style in plan(model).items() if name != "model.norm"}

    return llama_plan


def averaged_only_if_no_other_wrapper_is(expect):
    seen = []

    def broken(reducer, sync, *ranks):
        expect(reducer, sync and not any(o._awaited or o.begun for o in seen), *ranks)
        seen.append(reducer)

    return broken


def before_all_hooks(expect):
    def broken(reducer, *sync):
        expect(reducer, *sync)
        for parameter, hook in reducer._hooks.items():
            parameter._post_accumulate_grad_hooks.move_to_end(hook.id, last=False)

    return broken


def without_hooks(accumulate):
    def broken(parameter, mean):
        hooks, parameter._backward_hooks = parameter._backward_hooks, None
        accumulate(parameter, mean)
        parameter._backward_hooks = hooks

    return broken


def the_last_mean_only(receive):
    def broken(flat, *mean):
        for each in flat.parameters:
            each.mean = None
        receive(flat, *mean)

    return broken


def until_any_pass_ends(end):
    def broken(reducer):
        end(reducer)
        reducer._sync = reducer._awaited = False

    return broken


# Of each kind: which trials are of it, what is broken in them, and by what.
PLANTED = {
    "no averages": (
        lambda t: t.strategy == "ddp" and t.batch > 1,
        "minidist.distributed_data_parallel.reducer.Reducer.expect",
        lambda _: lambda *_: None,
    ),
    "batch norm": (
        lambda t: t.strategy == "ddp" and t.model == "batch norm",
        "minidist.distributed_data_parallel.ddp.broadcast_state",
        lambda _: lambda *_: None,
    ),
    "llama": (
        lambda t: t.model == "llama" and t.strategy == "tensor" and t.options["sequence_parallel"],
        "minidist.tensor_parallel.llama_plan",
        without_the_last_norm,
    ),
    "lstm": (
        lambda t: t.model == "lstm" and t.strategy == "fsdp",
        "minidist.fully_sharded.flat_shard.relist",
        lambda _: keep_the_old,
    ),
    "lstm in place": (
        lambda t: t.model == "lstm" and t.strategy == "fully_shard",
        "minidist.fully_sharded.flat_shard.relist",
        lambda _: keep_the_old,
    ),
    "a mean that is too large": (
        lambda t: t.strategy == "fully_shard" and "SGD" in t.optimizers and t.clip is None,
        "minidist.fully_sharded.param_group._accumulate",
        lambda real: lambda parameter, mean: real(parameter, mean * 1.001),
    ),
    "mixed": (
        lambda t: t.strategy == "mixed" and t.options["mesh"][0] == 2,
        "minidist.mixed.mean_gradients.MeanGradients.take",
        lambda _: lambda *_, **__: None,
    ),
    "interleaved": (
        lambda t: t.options.get("schedule") == "interleaved",
        "minidist.pipeline.executor.Executor._backward",
        lose,
    ),
    "two optimizers": (
        lambda t: (
            t.strategy == "zero2" and len(t.optimizers) == 2 and t.clip == 0.1 and t.number % 2
        ),
        "minidist.ShardedDataParallel.clip_grad_norm_",
        lambda _: clip_the_first,
    ),
    "torch's clipping by the norm of this rank": (
        lambda t: t.strategy == "zero2" and t.clip == 0.1 and t.number % 2 == 0,
        "minidist.zero.shards.norms_over_ranks",
        lambda _: lambda shards, *_: [shard.norm() for shard in shards],
    ),
    "an average that is the model itself": (
        lambda t: t.strategy == "fsdp" and t.averaged,
        "minidist.fully_sharded.fsdp_module.FSDPModule.__deepcopy__",
        lambda _: lambda model, _: model,
    ),
    "a norm of this rank only": (
        lambda t: t.strategy == "pipeline" and t.clip == 0.1,
        "minidist.common.norm.norm_over_ranks",
        lambda _: lambda own, *_: own,
    ),
    "accumulation": (
        lambda t: t.strategy == "ddp" and t.passes > 1 and t.waiting == "no_sync",
        "minidist.DistributedDataParallel.no_sync",
        lambda _: forgetful,
    ),
    "a hook of a gradient": (
        lambda t: t.habit == "a hook of a gradient" and t.strategy == "fully_shard",
        "minidist.fully_sharded.param_group._accumulate",
        without_hooks,
    ),
    "a hook after a gradient": (
        lambda t: t.habit == "a hook after a gradient" and t.strategy == "ddp",
        "minidist.distributed_data_parallel.reducer.Reducer.expect",
        before_all_hooks,
    ),
    "a gradient is removed": (
        lambda t: t.habit == "a gradient is removed" and t.strategy == "zero2",
        "minidist.zero.shards.Piece.take",
        lambda _: lambda piece: piece.own.grad,
    ),
    "frozen for a step": (
        lambda t: t.habit == "frozen for a step" and t.strategy == "ddp",
        "minidist.distributed_data_parallel.reducer.on_any_rank",
        lambda _: lambda here, *_: [True for _ in here],
    ),
    "a layer is added": (
        lambda t: t.habit == "a layer is added" and t.strategy == "zero1",
        "minidist.common.wrapper.Guard.require_unchanged",
        lambda _: lambda *_: None,
    ),
    "a method computes": (
        lambda t: t.habit == "a method computes" and t.strategy == "zero2",
        "minidist.common.no_sync.Synchronized._forwarded",
        lambda _: lambda _, __, found: found,
    ),
    "two forward passes": (
        lambda t: t.habit == "two forward passes" and t.strategy == "fully_shard" and t.batch > 1,
        "minidist.fully_sharded.flat_shard.FlatShard._receive",
        the_last_mean_only,
    ),
    "gradients of inputs": (
        lambda t: t.habit == "gradients of inputs" and t.strategy == "zero1",
        "minidist.distributed_data_parallel.reducer.Reducer._end",
        until_any_pass_ends,
    ),
    "two wrappers": (
        lambda t: t.habit == "two wrappers" and t.strategy == "ddp",
        "minidist.distributed_data_parallel.reducer.Reducer.expect",
        averaged_only_if_no_other_wrapper_is,
    ),
}


def with_a_fault(trial, what):
    _, name, fault = PLANTED[what]
    with mock.patch(name, fault(pkgutil.resolve_name(name))):
        try:
            return fuzz.on_a_rank(trial)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(pools, what):
    trial = next(filter(PLANTED[what][0], map(fuzz.draw, range(1000))))
    said = pools(trial.world_size)(with_a_fault, trial, what)
    assert any(
        words.startswith(("step ", "RuntimeError: ", "AssertionError: ")) for words in said
    ), said
    assert pools(trial.world_size)(fuzz.on_a_rank, trial) == [""] * trial.world_size


def test_a_number_is_always_the_same_trial_and_all_options_are_drawn():
    assert fuzz.draw(7) == fuzz.draw(7) != fuzz.draw(8)
    trials = list(map(fuzz.draw, range(300)))
    for field in (
        *("world_size", "backend", "model", "strategy", "optimizers", "passes", "waiting", "clip"),
        *("averaged", "habit"),
    ):
        assert len({getattr(trial, field) for trial in trials}) > 1, field
    schedules = {trial.options.get("schedule") for trial in trials}
    assert schedules == {None, "gpipe", "1f1b", "interleaved", "zero_bubble"}
    assert len({str(trial.options) for trial in trials}) > 40


BROKEN = dict(world_size=2, model="mlp", strategy="ddp", options={"bucket_cap_mb": -1})


def test_the_command_prints_what_differs_and_ends_with_1(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist", "fuzz", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return ended.value.code, capsys.readouterr()

    code, said = command("--first", "5", "--trials", "1")
    assert code == 0 and said.out.startswith("1 trials (") and "0 differ" in said.out
    broken = dataclasses.replace(fuzz.draw(5), **BROKEN)
    monkeypatch.setattr(fuzz, "draw", lambda number: broken)
    code, said = command("--trials", "2")
    assert code == 1 and "2 differ" in said.out and said.out.count("bucket_cap_mb must be") == 2
    assert command("--minutes", "0")[0] == 2
