"""A rank that skips a collective under torchrun, and what finds it.

    torchrun --standalone --nproc-per-node 3 hang.py stuck           rank 1 stays elsewhere
    torchrun --standalone --nproc-per-node 3 hang.py next            rank 1 goes on to another call
    torchrun --standalone --nproc-per-node 3 hang.py same            to a call that looks the same
    torchrun ... hang.py stuck --notes FOLDER                        writes what each rank does
    torchrun ... hang.py stuck --wait 5                              waits for 5 s, not for 15
    python hang.py read --notes FOLDER                               compares the ranks

A step has two collectives: of the gradients, and of the loss. At step 2 rank 1 leaves out the
second. Lesson: surviving_failures.

Who names what, with torch 2.13, gloo and three ranks, in the case "stuck":

    | with                               | the rank to blame | where it is | where the others wait |
    | nothing                            | no                | no          | yes (tracebacks)      |
    | TORCH_DISTRIBUTED_DEBUG=DETAIL     | yes (by rank 0)   | no          | yes                   |
    | the flight recorder                | yes               | its last call | yes                 |
    | faulthandler, py-spy               | no: read them all | yes         | yes                   |
    | --backend shm (minidist)           | yes (every rank)  | no          | yes                   |

- Nothing. gloo prints "Timed out waiting 15000ms for recv operation to complete" on the ranks that
  wait. Its own limit is 30 minutes. Next: "Connection closed by peer", at once.
- DETAIL. A monitored barrier goes before every collective. Stuck: "[Rank 0]: Ranks 1 failed to pass
  monitoredBarrier"; the other ranks say "Please check rank 0 logs for faulty rank". Next: "Detected
  mismatch between collectives", with both shapes, and no line of rank 1 but in its own traceback.
  It sees nothing in the case "same" until the calls differ: rank 1 is then a call ahead.
- The flight recorder. gloo writes into it too, and it is on (TORCH_FR_BUFFER_SIZE,
  2000 calls; TORCH_NCCL_TRACE_BUFFER_SIZE is the older name). gloo never dumps it by itself: call
  `_dump_fr_trace`, as below. The state of a call stays "scheduled" with gloo; look at
  `collective_seq_id` and `retired`. `torchfrtrace` ends in a KeyError on these files: gloo's group
  is named "" in one place and "0" in the other. So `read` below compares them.
  With NCCL: TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes the files, TORCH_FR_DUMP_TEMP_FILE says where, and
  `torchfrtrace` reads them.
- faulthandler shows where each rank is; the one that is not in a collective is the one.
  `py-spy dump --pid PID` shows the same of a run that nobody prepared.
- minidist's backend: "Timed out waiting 15 s for rank 1 in all_reduce(float32(1,), op=SUM), File
  ..., line ..." on every rank; and "every rank of a group must make the same call", with the call
  and the line of each rank, in the two other cases. It serves the ranks of one machine.
"""

import argparse
import faulthandler
import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # private, as of torch 2.13

import minidist  # noqa: F401  (registers the backend "shm")


def train(case: str, wait: float) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(1000))  # the gradients
        if step == 2 and dist.get_rank() == 1:
            if case == "stuck":
                time.sleep(2 * wait)  # it reads a file, it waits for a lock, ...
            continue
        dist.all_reduce(torch.ones(1000 if case == "same" else 1))  # the loss
    dist.barrier()


def write_notes(folder: Path, wait: float) -> None:
    """Both notes are written by other threads: this one may be in a call that never ends. They are
    not written at once: faulthandler may crash on a thread that ends meanwhile."""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    _dump_fr_trace()  # the first one imports torch._dynamo: that takes seconds
    dist.monitored_barrier(timeout=timedelta(minutes=2))  # so begin together (gloo alone has it)
    stacks = open(folder / f"stacks.{rank}", "w")
    faulthandler.dump_traceback_later(wait / 3, file=stacks)

    def dump() -> None:
        (folder / f"calls.{rank}").write_bytes(_dump_fr_trace())

    timer = threading.Timer(wait / 2, dump)
    timer.daemon = True
    timer.start()


def stuck(notes: Path, wait: float) -> str:
    """What gloo says on this rank in the case "stuck"."""
    try:
        write_notes(notes, wait)
        train("stuck", wait)
    except RuntimeError as error:
        return str(error)
    return ""


def read(folder: Path) -> None:
    """Print the last call of each rank, and who has not made the last one."""
    last, missing = {}, []
    for rank in sorted(int(path.suffix[1:]) for path in folder.glob("stacks.*")):
        path = folder / f"calls.{rank}"
        if not path.exists():
            print(f"rank {rank} ended before it left its calls")
            missing.append(rank)
            continue
        calls = pickle.loads(path.read_bytes())["entries"]
        last[rank] = max(calls, key=lambda call: call["collective_seq_id"])
    for rank, call in last.items():
        mine = [frame for frame in call["frames"] if "torch/distributed" not in frame["filename"]]
        done = "is done" if call["retired"] else "waits"
        number, name, sizes = (
            call[key] for key in ("collective_seq_id", "profiling_name", "input_sizes")
        )
        where = f"{Path(mine[0]['filename']).name}, line {mine[0]['line']}"
        print(f"rank {rank}: call {number}, {name} {sizes}, {done}: {where}")
    newest = max(call["collective_seq_id"] for call in last.values())
    missing += [rank for rank, call in last.items() if call["collective_seq_id"] < newest]
    print(f"call {newest} was not made by: {sorted(missing) or 'nobody'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=["stuck", "next", "same", "read"])
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--wait", type=float, default=15, help="seconds, for the other ranks")
    options = parser.parse_args()
    if options.case == "read":
        read(options.notes)
    else:
        dist.init_process_group(options.backend, timeout=timedelta(seconds=options.wait))
        dist.barrier()
        if options.notes:
            write_notes(options.notes, options.wait)
        train(options.case, options.wait)
        dist.destroy_process_group()
