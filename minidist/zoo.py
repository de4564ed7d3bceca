"""The course's small models and its real data, none of which is downloaded."""

import torch
from torch import nn


def digits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 handwritten digits that come with scikit-learn, in a fixed shuffled order.

    Returns images (1797, 64), of values from 0 to 1, and labels (1797,), from 0 to 9. Raises
    ImportError if scikit-learn is missing. Source: the UCI "Optical Recognition of Handwritten
    Digits" test set.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits need scikit-learn: pip install "minidist[course]"') from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(images, dtype=dtype) / 16)[order], torch.tensor(labels)[order]


def mlp(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between, the same on every rank for one seed.

    `mlp(64, 32, 10)` maps (B, 64) to (B, 10). Raises ValueError for fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ValueError(f"an MLP has at least an input and an output size, not {sizes}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(inputs, outputs, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
