"""What runs on one node of a Ray cluster, as a task of Ray: a rank of the job that is the cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from doctor.collectors.base import Surroundings
from doctor.errors import UnusableError
from doctor.gather.arriving import arrive
from doctor.gather.attending import Attendant, NobodyKeeps
from doctor.gather.board import Board, BoardLost
from doctor.gather.ray_board import KeyValues
from doctor.gather.seat import Seat
from doctor.gather.secret_file import VARIABLE, secret_of
from doctor.gather.signing import Rejected, Signed
from doctor.gather.wanted import Wanted


def attend_on_node(
    number: int,
    world_size: int,
    run: str,
    timeout: float,
    wanted: Wanted | None,
    directories: tuple[tuple[str, str], ...],
    secret_file: str = "",
) -> str:
    """Take part in the gathering ``run`` as the node of that ``number``. ``secret_file``: the key of the job on this
    node. Empty, or why it came to nothing."""
    try:
        secret = secret_of({VARIABLE: secret_file})
    except UnusableError as error:
        return str(error)
    seat = Seat(number, world_size, run)
    surroundings = Surroundings(environ=given_environ(), directories=directories)
    party, survey = arrive(seat, surroundings, timeout=timeout, wanted=wanted, tell=_tell_nobody)
    rejected = Rejected()
    board = Board(Signed(KeyValues(run), run, secret, rejected))
    close_at = time.monotonic() + timeout
    try:
        Attendant(board, seat, party.hello, party.card, survey, close_at=close_at).attend()
    except NobodyKeeps:
        return rejected.words or "the driver was not heard of any more"
    except BoardLost as lost:
        return str(lost)
    return ""


def given_environ(proc: Path = Path("/proc")) -> Mapping[str, str]:
    """The environment that this node and the job give every worker: the one that this process was started with.

    Ray changes it while a task runs: CUDA_VISIBLE_DEVICES is empty for one without GPUs, and OMP_NUM_THREADS is the
    number of its CPUs. A rank would see other values. Where the beginning can't be read it is the environment of now.
    """
    try:
        entries = (proc / "self" / "environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    given = {name: value for name, _, value in pairs}
    # A process that gives itself a title may write it over its environment (setproctitle without SPT_NOENV).
    return given if "RAY_RAYLET_PID" in given or "RAY_JOB_ID" in given else dict(os.environ)


def _tell_nobody(line: str) -> None:
    """The driver speaks for all."""
