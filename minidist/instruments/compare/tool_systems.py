"""The training by FairScale, DeepSpeed, Accelerate, Lightning and Transformers.
Lesson: real_tools."""

import logging
import os
import sys
import tempfile
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minidist.instruments.compare.build_locks import remove_stale
from minidist.instruments.compare.systems import System
from minidist.instruments.compare.task import Task, bare, replicas
from minidist.instruments.compare.watched_steps import State, Watch


def oss(task: Task, watch: Watch) -> State:
    """FairScale's sharded optimizer states, beside torch's DDP."""
    from fairscale.optim.oss import OSS

    model = task.make()
    optimizer = OSS(model.parameters(), optim=task.optimizer_class, **task.options)
    return replicas(task, watch, TorchDDP(model), optimizer, holds=optimizer.optim)


def sharded_ddp(task: Task, watch: Watch) -> State:
    """Gradients, too. With buckets it trains wrongly after torch's own `zero_grad()`."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = task.make()
    optimizer = OSS(model.parameters(), optim=task.optimizer_class, **task.options)
    model = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
    return replicas(task, watch, model, optimizer, holds=optimizer.optim)


def deepspeed_zero(task: Task, watch: Watch, stage: int) -> State:
    """An engine of DeepSpeed's. Its C++ is compiled at the first use, for minutes."""
    os.environ["DS_ACCELERATOR"] = task.device.type
    built = os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"  # where ninja is
    import deepspeed

    remove_stale(Path(built))
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # its collectives
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    # The defaults are for large models: a bucket of 2 GB, parameters below 100,000 elements whole,
    # and what is gathered stays if backward needs it within a billion elements.
    zero = {"stage": stage, "reduce_bucket_size": 10_000, "stage3_param_persistence_threshold": 0}
    zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.rows // dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    model = task.make()
    optimizer = task.optimizer(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for batch in task.batches():
        inputs, targets = task.share(batch)
        with watch.step(engine, optimizer):
            loss = task.loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        watch.loss(loss)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def accelerate_ddp(task: Task, watch: Watch) -> State:
    """Accelerate's default. On a CPU its plugins for FSDP give the same, and say nothing."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=task.device.type == "cpu")
    model = task.make()
    model, optimizer = accelerator.prepare(model, task.optimizer(model.parameters()))
    return by_backward(task, watch, model, optimizer, accelerator.backward)


def fabric_ddp(task: Task, watch: Watch) -> State:
    """Lightning's Fabric. Its environment is named: looking for one loads MPI."""
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    warnings.filterwarnings("ignore", "`isinstance.treespec", FutureWarning)  # in Lightning
    fabric: Any = lightning.Fabric(
        accelerator=task.device.type,
        devices=dist.get_world_size(),
        strategy="ddp",
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    model = task.make()
    model, optimizer = fabric.setup(model, task.optimizer(model.parameters()))
    return by_backward(task, watch, model, optimizer, fabric.backward)


def trainer_ddp(task: Task, watch: Watch) -> State:
    """Transformers' Trainer, which has the loop itself."""
    import transformers

    model = task.make()
    optimizer = task.optimizer(model.parameters())
    step = ExitStack()

    class Loop(transformers.Trainer):
        def compute_loss(self, model: Any, rows: dict[str, Any], *_: Any, **__: Any) -> Any:
            self.found = task.loss(model(rows["inputs"]), rows["targets"])
            return self.found

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            step.enter_context(watch.step(loop.model_wrapped, optimizer))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step.close()
            watch.loss(loop.found)

    rows = [
        {"inputs": inputs.cpu(), "targets": targets.cpu()}
        for batch in task.batches()
        for inputs, targets in zip(*batch, strict=True)
    ]
    quiet = dict(report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
    # Without these it shuffles, clips, changes the learning rate, and drops what it does not know.
    plain = dict(
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    with tempfile.TemporaryDirectory() as folder, step:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.rows // dist.get_world_size(),
            use_cpu=task.device.type == "cpu",
            dataloader_pin_memory=False,
            **quiet,
            **plain,
        )
        loop = Loop(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        loop.remove_callback(transformers.PrinterCallback)
        loop.add_callback(Steps())
        loop.train()
    return bare(model.state_dict())


def by_backward(task: Task, watch: Watch, model: Any, optimizer: Any, backward: Any) -> State:
    """The usual loop, with the system's own backward pass."""
    for batch in task.batches():
        inputs, targets = task.share(batch)
        with watch.step(model, getattr(optimizer, "optimizer", optimizer)):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            backward(loss)
            optimizer.step()
        watch.loss(loss)
    return bare(model.state_dict())


def deepspeed(stage: int) -> System:
    train = partial(deepspeed_zero, stage=stage)
    name = f"DeepSpeed ZeRO-{stage}"
    needs = ("deepspeed", "ninja")
    return System(name, train, peer=True, needs=needs, float64=False, stage=stage, timeout=300)


HUGGING_FACE = ("transformers", "accelerate")

SYSTEMS = [
    System("FairScale ZeRO-1", oss, peer=True, needs=("fairscale",), stage=1),
    System("FairScale ZeRO-2", sharded_ddp, peer=True, needs=("fairscale",), stage=2),
    *map(deepspeed, range(4)),
    System("Accelerate DDP", accelerate_ddp, peer=True, needs=("accelerate",), stage=0),
    System("Lightning DDP", fabric_ddp, peer=True, needs=("lightning",), stage=0),
    System("Transformers DDP", trainer_ddp, peer=True, needs=HUGGING_FACE, stage=0),
]
