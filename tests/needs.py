"""A plugin of pytest: a test is skipped if its tools or GPUs are not here.

It stands beside conftest.py, which pytest does not read where only notebooks are tested.
"""

import os
from importlib.util import find_spec

import pytest

# What the lesson real_tools needs besides, and how it comes.
TOOLS = ("accelerate", "transformers", "lightning", "fairscale", "deepspeed", "ninja")
GET_TOOLS = "pip install -c constraints.txt -e '.[tools]'"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the lesson real_tools and what is marked `tools` where these are not installed, and
    what is marked `gpu(n)` where there are fewer than n GPUs (one if it says nothing)."""
    without = bool(os.environ.get("WITHOUT_TOOLS"))  # an argument of make test
    missing = ", ".join(tool for tool in TOOLS if without or find_spec(tool) is None)
    for item in items:
        lesson = item.path.parent.name == "notebooks" and item.path.stem.endswith("_real_tools")
        if missing and (lesson or item.get_closest_marker("tools")):
            item.add_marker(pytest.mark.skip(f"needs {missing}: {GET_TOOLS}"))
        if marker := item.get_closest_marker("gpu"):
            needed, there = (marker.args or (1,))[0], _gpus()
            if needed > there:
                item.add_marker(pytest.mark.skip(f"needs {needed} GPU(s); here: {there}"))


def _gpus() -> int:
    import torch  # takes a second, which a test without this mark need not wait for

    return torch.cuda.device_count()
