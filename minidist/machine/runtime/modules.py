"""Which of the reader's modules were edited after a rank imported them, and run as they were."""

import os
import sys
from typing import Any

from minidist.machine.runtime.stack import is_library


class Modules:
    """The modules that this rank imports from now on, but for installed ones."""

    def __init__(self) -> None:
        self._seen = set(sys.modules)
        self._own: dict[str, tuple[Any, int]] = {}  # by name: its spec, when its file was written

    def edited(self) -> list[str]:
        """The files that were written since the last time this was called, but for modules reloaded
        since."""
        if sys.modules.keys() != self._seen:
            for name in (now := set(sys.modules)) - self._seen:
                if os.path.isabs(file := _file(_spec(name))) and not is_library(file):
                    self._own[name] = None, 0
            self._seen = now
        edited = []
        for name, (before, time) in self._own.items():
            spec = _spec(name)
            try:
                written = os.stat(_file(spec)).st_mtime_ns
            except OSError:  # the file is gone
                continue
            if spec is before and written != time:
                edited.append(_file(spec))
            self._own[name] = spec, written
        return edited


def _spec(name: str) -> Any:
    """A new one whenever the module is reloaded."""
    return getattr(sys.modules.get(name), "__spec__", None)


def _file(spec: Any) -> str:
    return getattr(spec, "origin", None) or ""
