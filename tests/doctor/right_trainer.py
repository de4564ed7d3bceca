"""The Trainer of Hugging Face, with a small GPT-2."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(32, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids.where(torch.arange(12) < 4 + index % 8, -100)}


config = GPT2Config(
    vocab_size=32,
    n_positions=12,
    n_embd=16,
    n_layer=2,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-3,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sentences()).train()
