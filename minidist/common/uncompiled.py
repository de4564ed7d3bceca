"""What torch.compile leaves as it stands.

Where a compiled function calls something that Dynamo cannot compile, Dynamo goes on with the Python
functions that this calls in turn: with the methods of a process group too, if it is one in Python.
But it takes groups for objects of C++, and raises UnsafeScriptObjectError at their attributes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Left = TypeVar("Left", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP


def uncompiled(left: Left) -> Left:
    """A decorator of functions, and of classes for all their methods: Dynamo compiles neither them
    nor what they call.

    `torch.compiler.disable` does the same, but imports Dynamo, which takes seconds, and costs
    microseconds at each call."""
    for member in vars(left).values() if isinstance(left, type) else [left]:
        function: Any = getattr(member, "fget", member)  # of a property
        if hasattr(function, "__code__"):
            function._torchdynamo_disable = True  # as a part of what it compiles
            strategy = eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # it, and what it calls
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return left
