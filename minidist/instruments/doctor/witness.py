"""In a process of the script: what its steps train on and what comes of them, written down.

`python -m minidist.instruments.doctor.witness SCRIPT WORDS` runs the script as it is, with hooks in
torch. A
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
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

import minidist as md
from minidist.instruments.doctor.feed import Feed
from minidist.instruments.watching.ranks import rows_of
from minidist.instruments.watching.snapshot import Pieces, bare_name, box, fingerprint
from minidist.saving.parts import cuts_of, part_of

JOB = "MINIDIST_DOCTOR"


@dataclass
class Job:
    """who: the name of the process's files in `folder`. fed: whose batches it takes, in place of
    its own: joined, or `apart`, in turns. Then each step begins with the weights in `begin`."""

    folder: str
    who: str
    steps: int
    fed: list[str] = field(default_factory=list)
    apart: bool = False

    def path(self, what: object, who: str = "") -> Path:
        return Path(self.folder, f"{who or self.who}.{what}")

    def write(self, what: object, value: Any) -> None:
        torch.save(value, unfinished := self.path("unfinished"))
        unfinished.rename(self.path(what))

    def read(self, what: object, who: str = "") -> Any:
        path = self.path(what, who)
        return torch.load(path, weights_only=False) if path.exists() else None

    def environ(self) -> dict[str, str]:
        return {JOB: json.dumps(asdict(self))}


class Witness:
    def __init__(self, job: Job) -> None:
        self.job, self.feed = job, Feed(job, self.wait)
        self.parent = os.getppid()
        self.models: list[nn.Module] = []
        self.held: dict[int, torch.Tensor] = {}  # by the optimizers, by id
        self.step, self.stepped, self.inside, self.forwards = 1, False, False, 0
        self.record = self.new()

    def new(self) -> dict[str, Any]:
        lists = ("options", "draws", "norms", "backwards", "rows")
        tables = ("before", "grads", "trained", "kept")
        numbers = {"low": False, "random": False, "group": 0, "models": 0, "forwards": 0}
        return {key: [] for key in lists} | {key: {} for key in tables} | numbers

    # ---- a step begins, and ends -----------------------------------------------------------

    def forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In the place of each call of a module."""
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.record["low"] |= autocast
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
        self.record["forwards"] += 1
        self.record["rows"] += rows_of(self.feed.noted["inputs"][-1])
        drawn = torch.get_rng_state()
        output = self.within(call, module, *args, **kwargs)
        self.record["random"] |= not torch.equal(drawn, torch.get_rng_state())
        floats = [*module.parameters(), *tree_leaves(output)]
        low = {getattr(each, "dtype", None) for each in floats} & {torch.bfloat16, torch.float16}
        self.record["low"] |= bool(low)
        return output

    def within(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What modules do in there belongs to it."""
        self.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self.inside = False

    def begin_step(self) -> None:
        if len(self.models) == self.record["models"]:
            return
        self.record["models"] = len(self.models)
        begin = self.job.read(self.step, "begin") or {} if self.job.fed else {}
        for name, part in self.parts():
            for at, own in part.pieces.items():
                if name in begin and begin[name].shape == part.shape:
                    # Unseen by autograd: another model of the step may be computed already.
                    own.data.copy_(begin[name][box(at, own.shape)])
        self.record["before"] = self.copies()

    def end_step(self) -> None:
        modules = [each for model in self.models for each in model.modules()]
        self.record |= {
            # A gradient that comes to a parameter which no optimizer has.
            "outside": [n for n, p in self.record["trained"].items() if p not in self.held],
            "after": self.copies(),
            "unknown": any(hasattr(each, "_fsdp_wrapped_module") for each in modules),
            "shares": self.shares(modules),
        }
        self.job.write(self.step, self.record)
        self.job.write("feed", self.feed.noted)
        self.step, self.stepped, self.record = self.step + 1, False, self.new()
        if self.step > self.job.steps:
            self.wait()

    def wait(self) -> None:
        """For the end: the steps are done, or the ranks had no more batches than that."""
        self.job.write("done", True)
        while os.getppid() == self.parent:
            time.sleep(0.1)
        os._exit(1)

    # ---- what this process has -------------------------------------------------------------

    def named(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, parameter, and which features of it are here."""
        for number, model in enumerate(self.models):
            cuts, prefix = dict(cuts_of(model)), f"model{number}." if number else ""
            for name, p in model.named_parameters():
                yield prefix + bare_name(name), p, cuts.get(p)

    def parts(self, grads: bool = False) -> Iterator[tuple[str, Any]]:
        for name, p, cut in self.named():
            own = p.grad if grads else p
            partial = any(each.is_partial() for each in getattr(own, "placements", ()))
            if own is not None and own.shape == p.shape and not partial:
                yield name, part_of(own, cut)

    def copies(self, grads: bool = False) -> Pieces:
        return {
            (name, at, tuple(x.shape)): x.to("cpu", copy=True)
            for name, part in self.parts(grads)
            for at, x in part.pieces.items()
        }

    def shares(self, modules: list[nn.Module]) -> bool:
        """Whether ranks may share layers, and so see the same examples."""
        if any(getattr(getattr(p, "device_mesh", None), "ndim", 1) > 1 for _, p, _ in self.named()):
            return True
        if any(isinstance(each, md.ContextParallel) for each in modules):
            return True
        units = (FSDPModule, md.FullyShardedDataParallel)
        pieces = ((x, part) for _, part in self.parts() for x in part.pieces.values())
        cut = any(x.shape != part.shape for x, part in pieces)
        return cut and not any(isinstance(each, units) for each in modules)

    # ---- torch's hooks ---------------------------------------------------------------------

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.held |= own
        # A gradient that is left is another optimizer's business.
        self.record["kept"] = {n: p for n, p in self.record["kept"].items() if p in own}
        self.record["group"] = dist.is_initialized() and dist.get_world_size()
        self.record["grads"] |= self.copies(grads=True)
        self.record["trained"] |= {n: id(p) for n, p, _ in self.named() if p.grad is not None}
        for group in optimizer.param_groups:
            numbers = {k: v for k, v in group.items() if isinstance(v, float | int | tuple)}
            self.record["options"].append(numbers)
        self.stepped = True

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.inside:  # of a part that is computed again
            return original(*args, **kwargs)
        if self.step > 1 and not self.record["backwards"]:
            held = {name: id(p) for name, p, _ in self.named()}
            self.record["kept"] = {
                name: held[name]
                for name, part in self.parts(grads=True)
                if any(x.any() for x in part.pieces.values())
            }
        self.within(original, *args, **kwargs)
        solo = len(self.job.fed) == 1
        self.record["backwards"].append(self.copies(grads=True) if solo else {})

    def dropout(self, x: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
        """Drops nothing, since one process draws other masks. Noted is what it draws from."""
        if training and p:
            self.record["draws"].append(fingerprint(torch.get_rng_state()))
        return x

    def batch_norm(
        self, original: Callable[..., Any], x: Any, mean: Any, var: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The mean is over the examples of a rank, in one process as well."""
        training = kwargs.get("training", args[2] if len(args) > 2 else False)
        if training and mean is not None:
            self.record["norms"].append(fingerprint(mean))
        parts = x.chunk(len(self.job.fed)) if training and self.feed.joins else [x]
        return torch.cat([original(each, mean, var, *args, **kwargs) for each in parts])

    def install(self) -> None:
        register_optimizer_step_post_hook(self.after_step)
        places: Any = (nn.Module, torch.autograd, F)
        module, autograd, functional = places
        call, back, norm = module.__call__, autograd.backward, functional.batch_norm
        attention = functional.scaled_dot_product_attention

        def attend(
            q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, *a: Any, **b: Any
        ) -> Any:
            self.dropout(q, b.pop("dropout_p", p))
            return attention(q, k, v, b.pop("attn_mask", mask), 0.0, *a, **b)

        module.__call__ = lambda m, *a, **k: self.forward(call, m, a, k)
        autograd.backward = lambda *a, **k: self.backward(back, *a, **k)
        functional.dropout, functional.scaled_dot_product_attention = self.dropout, attend
        functional.batch_norm = lambda *a, **k: self.batch_norm(norm, *a, **k)
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
