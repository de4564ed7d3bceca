"""In a process of the script: what its steps train on and what comes of them, written down.

`python -m minidist.doctor.witness SCRIPT WORDS` runs the script as it is, with hooks in torch. A
step begins with the first forward pass after an optimizer's step, and so ends the one before. When
the last one has ended, the process waits to be killed: nothing after it happens.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

import minidist as md
from minidist.doctor.feed import Feed
from minidist.saving.parts import cuts_of, part_of
from minidist.watching.snapshot import bare_name, box, fingerprint

JOB = "MINIDIST_DOCTOR"
Held = dict[str, tuple[torch.Size, dict[tuple[int, ...], torch.Tensor]]]  # this rank's pieces


@dataclass
class Job:
    """who: the name of the process's files in `folder`. fed: whose batches it takes, in place of
    its own: joined, or `apart`, in turns. Then each step begins with the weights in `begin`."""

    folder: str
    who: str
    steps: int
    fed: list[str] = field(default_factory=list)
    apart: bool = False

    def path(self, who: str, what: object) -> Path:
        return Path(self.folder, f"{who}.{what}")

    def write(self, what: object, value: Any) -> None:
        path = self.path(self.who, what)
        torch.save(value, unfinished := path.with_suffix(".unfinished"))
        unfinished.rename(path)

    def environ(self) -> dict[str, str]:
        return {JOB: json.dumps(asdict(self))}


class Witness:
    def __init__(self, job: Job) -> None:
        self.job, self.feed = job, Feed(job, self.hungry)
        self.models: list[nn.Module] = []
        self.held: dict[int, torch.Tensor] = {}  # by the optimizers, by id
        self.step, self.stepped, self.inside, self.nested, self.forwards = 1, False, False, 0, 0
        self.record = self.new()

    def new(self) -> dict[str, Any]:
        lists = ("options", "draws", "norms", "backwards", "inputs")
        tables = ("before", "grads", "trained")
        numbers = {"low": False, "random": False, "kept": "", "models": 0}
        return {key: [] for key in lists} | {key: {} for key in tables} | numbers

    # ---- a step begins, and ends -----------------------------------------------------------

    def forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In the place of each call of a module."""
        trains = not self.inside and torch.is_grad_enabled() and module.training
        if not trains or not any(p.requires_grad for p in module.parameters()):
            return call(module, *args, **kwargs)
        if self.stepped:
            self.end_step()
        if all(module is not known for known in self.models):
            self.models.append(module)
        self.begin_step()
        self.forwards += 1
        self.job.write("forwards", self.forwards)
        args, kwargs = self.feed.inputs(args, kwargs)
        self.record["inputs"].append(self.feed.seen)
        drawn = torch.get_rng_state()
        self.inside = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            self.inside = False
        self.record["random"] |= not torch.equal(drawn, torch.get_rng_state())
        floats = [*module.parameters(), *tree_leaves(output)]
        low = {getattr(each, "dtype", None) for each in floats} & {torch.bfloat16, torch.float16}
        self.record["low"] |= bool(low) or torch.is_autocast_enabled("cpu")
        return output

    def begin_step(self) -> None:
        if len(self.models) == self.record["models"]:
            return
        self.record["models"] = len(self.models)
        if self.job.fed:
            path = self.job.path("begin", self.step)
            begin = torch.load(path, weights_only=False) if path.exists() else {}
            for name, part in self.parts():
                for at, own in part.pieces.items():
                    if name in begin and begin[name].shape == part.shape:
                        own.copy_(begin[name][box(at, own.shape)])
        self.record["before"] = self.copies(self.parts())

    def end_step(self) -> None:
        # A gradient that comes to a parameter which no optimizer has.
        self.record["outside"] = [
            n for n, key in self.record["trained"].items() if key not in self.held
        ]
        self.record["after"] = self.copies(self.parts())
        modules = [each for model in self.models for each in model.modules()]
        self.record["unknown"] = any(hasattr(each, "_fsdp_wrapped_module") for each in modules)
        self.record["shares"] = self.shares()
        self.record["group"] = dist.is_initialized() and dist.get_world_size()
        self.job.write(self.step, self.record)
        self.job.write("feed", self.feed.noted)
        self.step, self.stepped, self.record = self.step + 1, False, self.new()
        if self.step > self.job.steps:
            self.wait("done")

    def wait(self, why: str) -> None:
        self.job.write(why, None)
        time.sleep(1000)

    def hungry(self) -> None:
        """The ranks had no more batches than that."""
        self.wait("hungry")

    # ---- what this process has -------------------------------------------------------------

    def named(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Name, parameter, and which features of it are here."""
        for number, model in enumerate(self.models):
            cuts, prefix = dict(cuts_of(model)), f"{number}." if number else ""
            for name, p in model.named_parameters():
                yield prefix + bare_name(name), p, cuts.get(p)

    def parts(self, grads: bool = False) -> Iterator[tuple[str, Any]]:
        for name, p, cut in self.named():
            own = p.grad if grads else p
            partial = any(each.is_partial() for each in getattr(own, "placements", ()))
            if own is not None and own.shape == p.shape and not partial:
                yield name, part_of(own, cut)

    def copies(self, parts: Iterator[tuple[str, Any]]) -> Held:
        return {
            name: (part.shape, {at: x.to("cpu", copy=True) for at, x in part.pieces.items()})
            for name, part in parts
        }

    def shares(self) -> bool:
        """Whether ranks may share layers, and so see the same examples."""
        units = (FSDPModule, md.FullyShardedDataParallel)
        data = any(isinstance(each, units) for m in self.models for each in m.modules())
        mesh = any(
            getattr(p, "device_mesh", None) and p.device_mesh.ndim > 1 for _, p, _ in self.named()
        )
        pieces = ((x, part) for _, part in self.parts() for x in part.pieces.values())
        return mesh or (not data and any(x.shape != part.shape for x, part in pieces))

    # ---- torch's hooks ---------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.nested += 1

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.nested -= 1
        if self.nested:  # an optimizer in an optimizer
            return
        self.held |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.record["grads"] |= self.copies(self.parts(grads=True))
        self.record["trained"] |= {n: id(p) for n, p, _ in self.named() if p.grad is not None}
        for group in optimizer.param_groups:
            numbers = {k: v for k, v in group.items() if isinstance(v, float | int | tuple)}
            self.record["options"].append(numbers)
        self.stepped = True

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.inside:  # of a part that is computed again
            return original(*args, **kwargs)
        if self.step > 1 and not self.record["backwards"]:
            kept = [n for n, p in self.parts(grads=True) if any(x.any() for x in p.pieces.values())]
            self.record["kept"] = kept[0] if kept else ""
        self.inside = True
        try:
            original(*args, **kwargs)
        finally:
            self.inside = False
        solo = len(self.job.fed) == 1
        self.record["backwards"].append(self.copies(self.parts(grads=True)) if solo else {})

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> Any:
        """Drops nothing, since one process draws other masks. Noted is what it draws from."""
        if training and p:
            self.record["draws"].append(fingerprint(torch.get_rng_state()))
        return x

    def batch_norm(
        self, original: Callable[..., Any], x: Any, mean: Any, var: Any, *more: Any, **named: Any
    ) -> Any:
        """The mean is over the examples of a rank, in one process as well."""
        training = named.get("training", more[2] if len(more) > 2 else False)
        if training and mean is not None:
            self.record["norms"].append(fingerprint(mean))
        parts = x.chunk(len(self.job.fed)) if training and self.feed.joins else [x]
        return torch.cat([original(each, mean, var, *more, **named) for each in parts])

    def install(self) -> None:
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        places: Any = (nn.Module, torch.autograd, F)
        module, autograd, functional = places
        call, back, norm = module.__call__, autograd.backward, functional.batch_norm
        attention = functional.scaled_dot_product_attention
        module.__call__ = lambda m, *a, **k: self.forward(call, m, a, k)
        autograd.backward = lambda *a, **k: self.backward(back, *a, **k)
        functional.dropout = self.dropout
        functional.batch_norm = lambda *a, **k: self.batch_norm(norm, *a, **k)

        def attend(
            q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, *more: Any, **named: Any
        ) -> Any:
            self.dropout(q, named.pop("dropout_p", p))
            return attention(q, k, v, named.pop("attn_mask", mask), 0.0, *more, **named)

        functional.scaled_dot_product_attention = attend
        self.feed.install(lambda: not self.inside)


def main() -> None:
    job = Job(**json.loads(os.environ.pop(JOB)))
    torch.manual_seed(1000 + int(os.environ["RANK"]))  # of scripts that set no seed
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    witness = Witness(job)
    witness.install()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if witness.stepped:
            witness.end_step()


if __name__ == "__main__":
    main()
