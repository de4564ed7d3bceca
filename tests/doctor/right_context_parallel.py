"""minidist's ContextParallel: a sequence cut over the ranks."""

import torch
import torch.distributed as dist

import minidist as md

dist.init_process_group("gloo")
torch.manual_seed(1)
model = md.ContextParallel(md.zoo.Decoder())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, targets = md.zoo.text(64)
for step in range(6):
    rows = slice(4 * step, 4 * step + 4)
    optimizer.zero_grad()
    loss = model(inputs[rows], targets[rows])
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(step, loss.item())
dist.destroy_process_group()
