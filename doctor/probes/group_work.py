"""A process group on a store of its own, set up and used inside the child that has torch. MASTER_ADDR is not read: the
job's own groups and its port are left alone."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from doctor.probes.bench import Refused
from doctor.probes.group_messages import Done, Join, Leave, Meet, Open, Step, Values
from doctor.probes.group_session import Session

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class _State:
    """Of this child: the store that it hosts, and the group that it is in."""

    hosted: Store | None = None
    session: Session | None = None


def work(argument: bytes) -> Done:
    """Do the step in ``argument`` (:data:`doctor.probes.group_messages.Step`). What breaks a collective is told in
    ``Done.error``.

    Raises:
        Refused: there is no group to do it in, or no store can be made.
    """
    step = msgspec.json.decode(argument, type=Step)
    if isinstance(step, Open):
        return _open(step)
    if isinstance(step, Join):
        _State.session = Session(step)
        return _State.session.set_up()
    if _State.session is None:
        raise Refused("there is no group")
    if isinstance(step, Leave):
        return _leave(_State.session, step)
    if isinstance(step, Meet):
        return _State.session.meet(step)
    return _State.session.values(step) if isinstance(step, Values) else _State.session.pace(step)


def _open(step: Open) -> Done:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The client half of the host goes over loopback; the server listens on every address, at a port that is free.
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=step.seconds), wait_for_workers=False)
    _State.hosted = store
    return Done(port=store.port)


def _leave(session: Session, step: Leave) -> Done:
    session.leave(step, is_host=_State.hosted is not None)
    _State.session = _State.hosted = None
    return Done()
