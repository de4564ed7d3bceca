"""An emulated network: the ranks of one machine pass messages as slowly as over a network.

To read, in this order: `steps` (the messages that a collective is made of), `lines` (when which
line is busy) and `link` (how long a message takes). The backend "shm" asks them when the data of a
call has arrived, and lets nobody read it earlier; `pipeline.simulate` asks them without any ranks.
"""

from minidist.instruments.link.link import Link

__all__ = ["Link"]
