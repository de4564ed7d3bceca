"""Seven traps of real tools, each in a few lines: python traps.py (lesson: wrong_in_silence).

Each trains in silence, and otherwise than it seems to. The script stops where one of them is gone.
It needs the tools of the lesson real_tools.
"""

import os
import runpy
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import minidist as md
from minidist.instruments.parity import relative_difference

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TEXT = md.zoo.text(16)[0][:32]


def network():
    return md.zoo.mlp(64, 64, 10)


def sharded(model):
    """FairScale's buckets are left behind by `zero_grad()`, which sets `.grad` to None."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=MOMENTUM.func, **MOMENTUM.keywords)
    return ShardedDataParallel(model, optimizer), optimizer


def engine(model):
    """DeepSpeed clips gradients to a norm of 1 if the configuration does not say otherwise."""
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 0}}
    optimizer = MOMENTUM(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[:2]


def engine_step(engine, optimizer, inputs, targets, loss_fn):
    loss = loss_fn(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    return loss


def loud(*given):
    return 10 * F.cross_entropy(*given)  # so that there is something to clip


def tiny(name, **more):
    import transformers

    make = getattr(transformers, name)
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    return make(make.config_class(**sizes, bos_token_id=0, eos_token_id=0, **more))


GPT_2 = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)


def own_loop():
    model = tiny("GPT2LMHeadModel", **GPT_2)
    optimizer = MOMENTUM(model.parameters())
    for rows in TEXT.split(8):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    return model.state_dict()


def trainer(name, folder, sizes, **options):
    """Transformers' Trainer with our SGD. Gives the type of the optimizer within, and weights."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    options |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    options |= {"disable_tqdm": True, "log_level": "error", "log_level_replica": "error"}
    options |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 0.1}
    options |= {"train_sampling_strategy": "sequential", "ddp_find_unused_parameters": False}
    options |= {"max_steps": 4, "per_device_train_batch_size": 4, "dataloader_pin_memory": False}
    model = tiny(name, **sizes)
    job = transformers.Trainer(
        model,
        transformers.TrainingArguments(folder, **options),
        train_dataset=[{"input_ids": row, "labels": row} for row in TEXT],
        optimizers=(MOMENTUM(model.parameters()), None),
    )
    job.remove_callback(transformers.PrinterCallback)
    job.train()
    weights = {} if "deepspeed" in options else model.state_dict()
    return md.compare.kinds_of(model, job.optimizer).rpartition(", ")[2], weights


def lightning_rows():
    """The numbers of the rows that a rank sees, of a loader that must not shuffle."""
    import logging

    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    warnings.filterwarnings("ignore")
    logging.disable()
    seen = []

    class Rows(lightning.LightningModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.arange(64)), 16, shuffle=False)

        def training_step(self, batch, number):
            seen.extend(batch[0].tolist())
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD([self.weight], lr=0.1)

    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    quiet |= {"enable_model_summary": False, "plugins": [LightningEnvironment()]}
    model = Rows()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    options = {"strategy": "ddp", "accelerator": "cpu", "devices": 2, "max_epochs": 1}
    lightning.Trainer(**options, **quiet).fit(model)
    return seen


def mask():
    torch.manual_seed(7)
    return F.dropout(torch.ones(1000), 0.3)


def two_epochs():
    sampler = DistributedSampler(range(1792), dist.get_world_size(), dist.get_rank())
    return list(sampler), list(sampler)


def found_out(ranks, strategy, **options):
    """What a comparison with one process says."""
    try:
        md.parity.check(strategy, ranks=ranks, model=network, **options)
    except md.parity.ParityError as error:
        return str(error)
    raise SystemExit(f"{strategy.__name__}: this trap is gone")


def tell(system, trains, is_there=True):
    print(f"{system:13}{trains}")
    if not is_there:
        raise SystemExit(f"{system}: this trap is gone")


def main(folder):
    with md.ranks(2, timeout=100) as ranks:
        tell("FairScale", said := found_out(ranks, sharded), said.startswith("step 2"))
        whole = {"weights": lambda engine: engine.module.state_dict(), "dtype": torch.float32}
        tell("DeepSpeed", found_out(ranks, engine, step=engine_step, loss_fn=loud, **whole))
        _, weights = ranks(trainer, "GPT2LMHeadModel", folder, GPT_2)[0]
        alone = ranks(own_loop)[0]
        off = max(relative_difference(weights[name], each) for name, each in alone.items())
        tell("Transformers", f"GPT-2 is {off:.0%} off your own loop", off > 1e-3)
        config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10_000}}
        config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        config |= {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
        sizes = {"intermediate_size": 64}
        kind, _ = ranks(trainer, "LlamaForCausalLM", folder, sizes, deepspeed=config)[0]
        tell("Transformers", f"with DeepSpeed, and our SGD: {kind} trains", kind == "AdamW")
        rows = ranks(lightning_rows)[0]  # the last one: it takes the ranks' addresses away
        tell("Lightning", f"rank 0 begins with the rows {rows[:4]}", rows[:4] != [0, 2, 4, 6])
        same = torch.equal(*ranks(mask))
        tell("torch", f"one seed, and equal masks on both ranks: {same}", same)
        first, second = ranks(two_epochs)[0]
        tell("torch", f"no set_epoch, and equal epochs: {first == second}", first == second)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["MINIDIST_PRELOAD"] = "torch.distributed.fsdp torch._inductor.compile_fx"
    runpy.run_path(str(Path(__file__).with_name("build_deepspeed.py")), run_name="__main__")
    with tempfile.TemporaryDirectory() as place:
        main(place)
