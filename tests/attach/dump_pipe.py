"""A rank that dumps its flight recorder when its FIFO holds a line, as ``DumpPipe`` of torch does.

``python dump_pipe.py CALLS [BEHAVIOR]`` is rank RANK of WORLD_SIZE, which enqueued CALLS collectives; the newest is
open. It becomes the user USER_ID if that is not 0. ``BEHAVIOR``: ``done`` has completed the newest one, too; ``silent``
never looks into the FIFO; ``garbage`` writes a damaged dump, ``huge`` one that is too large; ``slow`` writes in parts.
"""

import os
import pickle
import sys
import time


def recorder(world: int, calls: int, is_open: bool) -> bytes:
    """A dump of format 2.10 with ``calls`` entries, of which the newest may be open."""
    done = calls - is_open
    now = time.time_ns() - 100 * 10**9
    entries = [
        {
            "frames": [{"name": "train", "filename": "/home/me/train.py", "line": 41}],
            "record_id": number,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": now + number,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": "completed" if number < done else "started",
            "time_discovered_started_ns": now + number,
            "time_discovered_completed_ns": now + number if number < done else None,
            "retired": number < done,
            "timeout_ms": 600000,
            "is_p2p": False,
        }
        for number in range(calls)
    ]
    status = {
        "last_enqueued_collective": calls,
        "last_started_collective": calls,
        "last_completed_collective": calls - 1,
    }
    return pickle.dumps(
        {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
            "pg_status": {"0": status},
            "entries": entries,
            "nccl_comm_state": {},
        },
        protocol=2,
    )


def write(path: str, dump: bytes, behavior: str) -> None:
    """Write a dump, as ``std::ofstream`` does."""
    with open(path, "wb", buffering=0) as stream:
        if behavior == "slow":
            stream.write(dump[:20])
            time.sleep(0.05)
            stream.write(dump[20:])
        elif behavior == "huge":
            stream.truncate(1 << 30)
        else:
            stream.write(dump[:-9] + b"garbage" if behavior == "garbage" else dump)


def train() -> None:
    """Look into the FIFO from time to time."""
    if user := int(os.environ.get("USER_ID", "0")):
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    rank, calls, behavior = os.environ["RANK"], int(sys.argv[1]), "".join(sys.argv[2:])
    name = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    if os.path.lexists(name):
        os.unlink(name)
    os.mkfifo(name, 0o666)
    pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
        if behavior != "silent" and os.read(pipe, 128):
            dump = recorder(int(os.environ["WORLD_SIZE"]), calls, behavior != "done")
            write(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, dump, behavior)


if __name__ == "__main__":
    train()
