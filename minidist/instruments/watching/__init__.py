"""One process in anybody's loop: did this step train as one process would have trained?

`md.parity.check` trains twice, and compares. This looks at a training that runs, at every k-th
step, and asks the strategy for nothing but what each rank has of weights and optimizer states,
before the step and after it. From the whole of these follows which gradient the optimizer saw. Rank
0 computes the gradient of each rank's micro-batches with the bare model, and finds with which
weight each of them is in what the optimizer saw. One process weighs them by their examples.

To read, in this order:

    naive       the idea: whose examples are in a gradient? Least squares
    snapshot    what each rank has, and the whole of it on rank 0
    ranks       the ranks side by side: copies, random numbers, examples
    mixture     the gradient that an optimizer saw, from what it left; and words for it
    reference   the gradient and the step of one process

The same aim by other means: TrainCheck (OSDI 2025, arXiv 2506.14813) infers what must hold from
good runs; TTrace (arXiv 2506.09280) compares the tensors within a step with those of one device.
Lesson: wrong_in_silence.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from minidist.common.tensors_in import tensors_of
from minidist.instruments.watching import ranks
from minidist.instruments.watching.ranks import Seen
from minidist.instruments.watching.reference import TOLERANCES, Loss, Reference
from minidist.instruments.watching.snapshot import Snapshot, Whole, fingerprint, gather, to_rank_0
from minidist.rank import device
from minidist.saving.rank_states import capture, restore
from minidist.saving.states import merged

__all__ = ["SilentError", "Watch", "watch"]


class SilentError(AssertionError):
    """A step that one process would have taken otherwise. Lesson: wrong_in_silence."""


class Watch:
    """Hold a training on ranks against one process, at every k-th step. Lesson: wrong_in_silence.

        watch = md.watch(model, optimizer, bare=make_model, loss=loss_sum, every=100)
        for micro_batches in loader:
            with watch(micro_batches):
                step(model, optimizer, micro_batches)

    All ranks make it, and enter it at every step. A look finds: ranks whose copies differ; whose
    gradients are in the optimizer's, and with which weights; a step that is another one than that
    of one process; examples that are there twice; random numbers that are the same where they must
    differ; parameters that are in no group of the optimizer. It knows minidist's strategies, and
    torch's DDP, fully_shard, FSDP1 and ZeRO; SGD and Adam with their kin. With another optimizer it
    compares weights alone.

    micro_batches: this rank's, of one step: a list of what `loss` takes, tensors with the examples
        first. With one micro-batch a list of one.
    bare: a function that makes the model as one process has it; its weights do not count.
    loss: loss(model, batch) gives the sum over the examples of a micro-batch, and their number (of
        tokens, if the loop takes the mean over tokens).
    every: look at every so many steps, the first one included.
    make_optimizer: a function of the bare model: what one process would train it with. None is the
        class and the options of `optimizer`, which then are right by definition.
    clip: the largest norm of the gradients of all parameters, if the loop clips.
    sources: the ranks that have a batch of their own; None is all. The ranks of a pipeline or of
        tensor parallel share that of the first one.
    examples: how many different examples an epoch has, for `end_of_epoch`, which then knows those
        of steps without a look, too.

    Raises SilentError, on every rank, with what is wrong in one sentence each. Where it cannot
    look, it warns, and the training goes on.

    Limits: one optimizer has all parameters, and no layer is frozen for a while. Steps that it does
    not look at. What `bare` and `loss` share with the loop, such as labels that are shifted by one.
    Weights that were wrong from the start. Learning rates, momentum and betas, which it takes from
    the loop. Layers and losses that mix the examples of several ranks. Batches that the step
    changes in place. A parameter with less than two elements for each micro-batch: whose gradients
    it has, it does not say. The bare model must fit rank 0, beside its optimizer's states. Ranks
    that hang in the step, hang.

    step: how many steps were taken. noise: how far gradients were from those of one process, in the
    last look (on rank 0).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bare: Callable[[], nn.Module],
        loss: Loss,
        every: int = 1,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        clip: float | None = None,
        sources: Sequence[int] | None = None,
        examples: int | None = None,
    ) -> None:
        self.model, self.bare, self.loss = model, bare, loss
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's
        self.every, self.make_optimizer, self.clip = every, make_optimizer, clip
        self.sources = range(dist.get_world_size()) if sources is None else sources
        self.examples, self.step, self.noise = examples, 0, 0.0
        self._rows: list[str] = []  # of this epoch
        self._orders: set[str] = set()  # of earlier ones

    @contextmanager
    def __call__(self, micro_batches: Sequence[Any]) -> Iterator[None]:
        """Around one step of the optimizer, and its micro-batches."""
        self.step += 1
        looks = (self.step - 1) % self.every == 0
        noted = looks or self.examples
        rows = [row for batch in micro_batches if noted for row in ranks.rows_of(batch)]
        if self.examples:
            self._rows += rows
        if not looks:
            yield
            return
        seen = Seen(rows=rows, dtype=_lowest(self.model.parameters()))
        states: list[dict[str, Any]] = []  # of the random numbers, before each forward

        def forward(*_: Any) -> None:
            states.append(capture())

        def output(_: nn.Module, __: Any, outputs: Any) -> None:
            seen.dtype = _lowest(tensors_of(outputs), seen.dtype)

        def step(optimizer: Any, *_: Any) -> None:
            kept = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            seen.options.append(kept)

        before, start = self._snapshot(seen), capture()
        with ExitStack() as hooks:
            hooks.callback(self.model.register_forward_pre_hook(forward).remove)
            hooks.callback(register_module_forward_hook(output).remove)
            hooks.callback(self.optimizer.register_step_pre_hook(step).remove)
            yield
        seen.drew = _stream(start) != _stream(capture())
        if len(states) != len(micro_batches):
            if states and seen.drew:
                words = f"{len(states)} forward passes for {len(micro_batches)} micro-batches"
                seen.cannot.append(f"the model draws random numbers in {words}")
            states = [start] * len(micro_batches)  # a pipeline calls no forward
        seen.stream = _stream([*states, start][0])
        mine = list(zip(micro_batches, states, strict=True))
        self._look(seen, before, self._snapshot(seen), mine)

    def same(self) -> None:
        """All ranks: do they have the same weights, and buffers too, as those of batch norm? Before
        an evaluation or a checkpoint."""
        seen = Seen()
        if (now := self._snapshot(seen)) is not None:
            seen.take(now)
        everyone = gather(seen)
        problems = ranks.own_problems(everyone) or ranks.replicas(everyone, buffers=True)
        self._conclude(problems, [words for each in everyone for words in each.cannot][:1])

    def end_of_epoch(self) -> None:
        """All ranks: have all `examples` been seen, and in another order than in earlier epochs?
        Raises ValueError if the watch was not told how many they are."""
        if not self.examples:
            raise ValueError("tell md.watch how many `examples` an epoch has")
        everyone = gather(self._rows)
        rows = [row for rank in self.sources for row in everyone[rank]]
        missing = self.examples - len(set(rows))
        problems = [f"{missing} of {self.examples} examples were not seen"] * (missing > 0)
        order = ranks.digest("".join(rows).encode())
        if order in self._orders:
            problems.append("this epoch had the order of an earlier one (sampler.set_epoch?)")
        self._rows, self._orders = [], {*self._orders, order}
        self._conclude(problems)

    # ---- a look ----------------------------------------------------------------------------

    def _snapshot(self, seen: Seen) -> Snapshot | None:
        try:
            return Snapshot(self.model, self.optimizer)
        except ValueError as error:  # the optimizer has a parameter that is not the model's
            seen.wrong.append(str(error))
        except Exception as error:
            seen.cannot.append(f"{type(error).__name__}: {error}")
        return None

    def _look(
        self, seen: Seen, before: Snapshot | None, after: Snapshot | None, mine: list[Any]
    ) -> None:
        seen.wrong = [*dict.fromkeys(seen.wrong), *ranks.ungrouped(self.model, self.optimizer)]
        if len(seen.options) > 1:
            seen.cannot.append(f"the optimizer took {len(seen.options)} steps")
        if after is not None:
            seen.take(after)
        everyone: list[Seen] = gather(seen)
        problems = ranks.own_problems(everyone)
        cannot = [words for each in everyone for words in each.cannot][:1]
        if problems or not seen.options:  # without a step there is nothing to see
            return self._conclude(problems, cannot)
        own = [everyone[rank] for rank in self.sources]
        problems = ranks.replicas(everyone) + ranks.draws(own) + ranks.doubles(own)
        if before is not None and after is not None and not cannot:
            mine = mine if dist.get_rank() in self.sources else []
            mine = tree_map_only(torch.Tensor, lambda x: x.cpu().clone(), mine)  # without its rest
            found = to_rank_0([before, after], [each.prints for each in everyone], mine)
            if found:
                own_stream = capture()  # which the bare model, when it is made, may move
                try:
                    problems += self._oracle(*found, everyone)
                except Exception as error:  # of the bare model, of the loss: training goes on
                    cannot = [f"{type(error).__name__}: {error}"]
                finally:
                    restore([own_stream], 0)
        self._conclude(problems, cannot)

    def _conclude(self, problems: list[str], cannot: Sequence[str] = ()) -> None:
        verdict = [problems, cannot]
        dist.broadcast_object_list(verdict, 0)  # one for all, so that all raise, or none
        if verdict[1]:
            words = f"md.watch cannot compare step {self.step}: {verdict[1][0]}"
            warnings.warn(words, stacklevel=2)
        if verdict[0]:
            raise SilentError(f"step {self.step}: " + "; ".join(verdict[0]))

    def _oracle(self, pieces: list[Any], own: list[Any], everyone: Sequence[Seen]) -> list[str]:
        """On rank 0: what one process would have done otherwise."""
        before, after = map(Whole, pieces)
        reference = Reference(self.bare().to(device(self.model)), before, self.model)
        if problems := reference.difference(after):
            return problems
        tolerance = TOLERANCES[everyone[0].dtype]
        for rank, parts in enumerate(own):
            for number, (batch, state) in enumerate(parts):
                label = f"rank {rank}" + f" part {number}" * (len(parts) > 1)
                restore([state], 0)
                reference.add(label, self.loss, batch)
        wanted = reference.weigh(self.clip)
        groups: list[list[dict[str, Any]]] = [
            [{"options": o, "names": n} for o, n in zip(each.options[0], each.groups, strict=True)]
            for each in everyone
        ]
        options = {n: group["options"] for of in groups for group in of for n in group["names"]}
        held = [list(each.prints) for each in everyone]
        problems = reference.gradients(after, options, held, wanted, tolerance)
        self.noise = reference.noise
        if problems:
            return problems
        optimizer = self._optimizer(reference, groups)
        for group, theirs in zip(optimizer.param_groups, groups[0], strict=False):
            scheduled = {"lr", "momentum", "betas"} & group.keys() & theirs["options"].keys()
            group.update({key: theirs["options"][key] for key in scheduled})
        return reference.step(optimizer, after, tolerance)

    def _optimizer(self, reference: Reference, groups: list[Any]) -> torch.optim.Optimizer:
        if self.make_optimizer is not None:
            return self.make_optimizer(reference.model)
        made = [
            {**g["options"], "params": [p for n, p in reference.names.items() if n in g["names"]]}
            for g in merged(groups)
        ]
        kind: Any = type(_innermost(self.optimizer))
        optimizer: torch.optim.Optimizer = kind(made)
        return optimizer


watch = Watch


def _lowest(tensors: Iterable[torch.Tensor], least: torch.dtype = torch.float64) -> torch.dtype:
    """The dtype of the fewest digits."""
    kinds = [x.dtype for x in tensors if x.is_floating_point()]
    return min([*kinds, least], key=lambda kind: kind.itemsize)


def _stream(numbers: dict[str, Any]) -> int:
    """Where random numbers are, in a few bytes."""
    return fingerprint(numbers.get("cuda", numbers["torch"]))


def _innermost(optimizer: Any) -> Any:
    """The optimizer in ZeRO's, ours and torch's."""
    for name in ("inner", "optim"):
        if hasattr(optimizer, name):
            return _innermost(getattr(optimizer, name))
    return optimizer
