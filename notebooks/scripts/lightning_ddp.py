"""Lightning's Trainer with DDP, by `python lightning_ddp.py`, which starts another rank, or by
`torchrun --standalone --nproc-per-node 2 lightning_ddp.py`."""

import logging

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import minidist as md

DIGITS = TensorDataset(*[each[:128] for each in md.zoo.digits()])
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = md.zoo.mlp(64, 32, 10)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(DIGITS, shuffle=False)  # Lightning's own would shuffle
        return DataLoader(DIGITS, batch_size=16, sampler=sampler)


def alone() -> torch.nn.Module:
    model = md.zoo.mlp(64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in DataLoader(DIGITS, batch_size=32):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(digits := Digits())
    if trainer.is_global_zero:
        pairs = zip(digits.model.parameters(), alone().parameters(), strict=True)
        apart = max(md.parity.relative_difference(a.detach(), b.detach()) for a, b in pairs)
        print(f"{trainer.world_size} ranks, as one process to 1e-6: {apart < 1e-6}")
