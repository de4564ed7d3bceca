"""A backend of matplotlib for ranks: what a rank draws is shown by the notebook, under its rank.

A kernel's own backend draws into that kernel, and a rank has none. matplotlib finds this one by
MPLBACKEND, and only in a rank that plots is it imported.
"""

import base64
import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from minidist.machine.runtime.output import PICTURE, tell

__all__ = ["FigureCanvas", "show"]


def show(*_: Any, **__: Any) -> None:
    """Send all open figures to the notebook, and close them, as a notebook does."""
    import matplotlib.pyplot as plt

    try:
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, format="png", bbox_inches="tight")
            tell(PICTURE, base64.b64encode(picture.getvalue()).decode())
    finally:
        plt.close("all")
