"""A trial's training on a rank: the model by its strategy, and its optimizers."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import minidist as md
from fuzz.alone import Alone, optimizers_of
from fuzz.random_models import LlamaBlock, llama_plan
from fuzz.trials import Trial
from minidist.fully_sharded import by_class, by_size
from minidist.fully_sharded.fully_sharded_data_parallel import chosen
from minidist.instruments.parity import cross_entropy


class Data(Alone):
    """A replica on each rank, or a part of one."""

    def wrap(self, module: nn.Module) -> list[Any]:
        self.model = md.DistributedDataParallel(module, **self.options)
        return optimizers_of(self.trial, self.model)

    def share(self) -> slice:
        return slice(self.rank, None, self.ranks)

    def waits(self, waits: bool) -> Any:
        waits_by = self.trial.waiting if waits else ""
        self.model.require_backward_grad_sync = waits_by != "attribute"
        return self.model.no_sync() if waits_by == "no_sync" else contextlib.nullcontext()


class ShardedStates(Data):
    def wrap(self, module: nn.Module) -> list[Any]:
        self.model = md.DistributedDataParallel(module, **self.options)
        return optimizers_of(self.trial, self.model, process_group=None)


class ShardedGradients(Data):
    def wrap(self, module: nn.Module) -> list[Any]:
        optimizers = optimizers_of(self.trial, module, process_group=None)
        self.model = md.ShardedDataParallel(module, optimizers[0], **self.options)
        return optimizers


class ShardedParameters(Data):
    def clip(self, norm: float) -> None:
        if hasattr(self.model, "clip_grad_norm_") and self.trial.number % 2:
            self.model.clip_grad_norm_(norm)
        else:
            super().clip(norm)

    def wrap(self, module: nn.Module) -> list[Any]:
        options = dict(self.options)
        units, mesh = self.policy(module, options.pop("units")), self.mesh(options.pop("hybrid"))
        self.model = md.FullyShardedDataParallel(
            module, auto_wrap_policy=units, device_mesh=mesh, **options
        )
        return optimizers_of(self.trial, self.model)

    def policy(self, module: nn.Module, units: str) -> Any:
        tied = len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)])
        blocks = by_class(md.zoo.Block, LlamaBlock, nn.LSTM)
        policies = {"none": None, "by class": by_class(nn.Linear), "by size": by_size(100)}
        policy = policies[units]
        tied_ends = tied and self.trial.model == "transformer"
        if tied:  # ties stay within a unit
            policy = blocks if tied_ends and policy else None
        return policy

    def mesh(self, hybrid: bool) -> Any:
        return dist.init_device_mesh("cpu", (2, 2)) if hybrid and self.ranks == 4 else None


class ShardedInPlace(ShardedParameters):
    """By `fully_shard`, the parts first."""

    def wrap(self, module: nn.Module) -> list[Any]:
        options = dict(self.options)
        policy, mesh = self.policy(module, options.pop("units")), self.mesh(options.pop("hybrid"))
        for part in [*(chosen(module, policy) if policy else ()), module]:
            md.fully_shard(part, mesh=mesh, **options)
        self.model = module
        return optimizers_of(self.trial, module)

    def waits(self, waits: bool) -> Any:
        self.model.set_requires_gradient_sync(not waits or self.trial.waiting == "nothing")
        return contextlib.nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict()
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


class Stages(Alone):
    def wrap(self, module: Any) -> list[Any]:
        self.model = md.Pipeline(module, **self.options)
        return optimizers_of(self.trial, self.model)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        passes = self.trial.passes
        loss = self.model.train_step(inputs, targets, lambda y, t: self.loss(y, t) / passes)
        return loss.item() * passes

    def clip(self, norm: float) -> None:
        self.model.clip_grad_norm_(norm)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.model.full_state_dict())


class Features(Alone):
    def wrap(self, module: nn.Module) -> list[Any]:
        plan = _plan(self.trial, module)
        self.model = md.tensor_parallel.parallelize_module(module, None, plan, **self.options)
        return optimizers_of(self.trial, self.model)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return md.vocab_parallel_cross_entropy(outputs, targets)

    def state(self) -> dict[str, torch.Tensor]:
        return md.tensor_parallel.full_state_dict(self.model)


class Mesh(Stages):
    """A replica is on several ranks."""

    def wrap(self, module: nn.Module) -> list[Any]:
        options = dict(self.options)
        mesh, shard = md.mixed.mesh(*options.pop("mesh")), options.pop("shard")
        self.replica, self.replicas = mesh.get_local_rank("data"), mesh["data"].size()
        units = md.FullyShardedDataParallel if shard == "units" else None
        plan = _plan(self.trial, module) if mesh["tensor"].size() > 1 else None
        self.model = md.mixed.MixedParallel(module, mesh, shard=units, plan=plan, **options)
        data = {"process_group": mesh.get_group("data")} if shard == "states" else {}
        return optimizers_of(self.trial, self.model, **data)

    def share(self) -> slice:
        return slice(self.replica, None, self.replicas)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.model.cross_entropy(outputs, targets)
        return words

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.model.eval()
        with getattr(torch, self.trial.evaluation or "no_grad")():
            loss = cross_entropy(self.model(inputs), targets).item()
        self.model.train()
        return loss


def _plan(trial: Trial, module: nn.Module) -> dict[str, Any] | None:
    return llama_plan(module) if trial.model == "llama" else None


STRATEGIES: dict[str, type[Alone]] = {
    "ddp": Data,
    "zero1": ShardedStates,
    "zero2": ShardedGradients,
    "fsdp": ShardedParameters,
    "fully_shard": ShardedInPlace,
    "pipeline": Stages,
    "tensor": Features,
    "mixed": Mesh,
}
