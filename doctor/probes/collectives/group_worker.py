"""Set up and use a process group on a store of its own, inside the child that has torch.

MASTER_ADDR is not read: the groups of the job and its port are not affected.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from doctor.core.decoding import prepared
from doctor.probes.collectives.group_steps import (
    ExchangeMessages,
    GroupStep,
    GroupStepResult,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    VerifyCollectives,
)
from doctor.probes.collectives.process_group import ProcessGroupSession
from doctor.probes.runtime.torch_child import WorkRefused

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class _State:
    """State of this child: the store that it hosts, and the group that it is in."""

    hosted: Store | None = None
    session: ProcessGroupSession | None = None


def work(argument: bytes) -> GroupStepResult:
    """Run the step in ``argument`` (:data:`doctor.probes.collectives.group_steps.GroupStep`).

    A collective that fails is reported in ``GroupStepResult.error``.

    Raises:
        WorkRefused: there is no group to run it in, or no store can be created.
    """
    step = msgspec.json.decode(argument, type=prepared(GroupStep))
    if isinstance(step, OpenStore):
        return _open(step)
    if isinstance(step, JoinGroup):
        _State.session = ProcessGroupSession(step)
        return _State.session.set_up()
    if _State.session is None:
        raise WorkRefused("there is no group")
    if isinstance(step, LeaveGroup):
        _State.session.leave(step, is_host=_State.hosted is not None)
        _State.session = _State.hosted = None
        return GroupStepResult()
    if isinstance(step, ExchangeMessages):
        return _State.session.exchange(step)
    return _State.session.verify(step) if isinstance(step, VerifyCollectives) else _State.session.time(step)


def _open(step: OpenStore) -> GroupStepResult:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The client half of the host goes over loopback; the server listens on every address, at a port that is free.
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=step.seconds), wait_for_workers=False)
    _State.hosted = store
    return GroupStepResult(port=store.port)
