"""Hugging Face's Trainer (transformers 5.23.0) and a loss that is a mean already.

The Trainer multiplies the loss by the number of ranks, since it expects one that is divided by the
number of items of all ranks. A BERT that classifies takes the mean of its own.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(32, (12,), generator=generator)
        return {"input_ids": ids, "labels": int(ids[0] > 15)}


config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_grad_norm=0.0,
    num_train_epochs=2,
    learning_rate=1e-3,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences()).train()
