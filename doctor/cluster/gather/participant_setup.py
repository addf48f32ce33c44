"""Taking a seat: who speaks for the host is settled, facts begin to be collected, and the speaker answers probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from doctor.analysis.visible_devices import states_binding
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.participant import Participant
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.runner import collect_facts

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_options import ProbeOptions
    from doctor.cluster.gather.probe_schedule import ProbeSchedule


def start_participant(
    seat: ProcessIdentity,
    surroundings: Machine,
    *,
    timeout: float,
    wanted: ProbeOptions | None,
    tell: Callable[[str], None],
    announce: Callable[[str], None] | None = None,
) -> tuple[Participant, ProbeSchedule | None]:
    """What this process brings, and its part in the probes that are ``wanted``. ``timeout``: seconds of the gathering,
    and the most for any collector; ``announce`` is told what is still being read after a second."""
    identity = host_identity(surroundings)
    speaker = HostLease(seat.key_here, identity, "the host")
    survey = None
    if wanted is not None:
        from doctor.cluster.gather.probe_options import probe_schedule

        survey = probe_schedule(wanted, seat.number, timeout, surroundings, speaks=speaker.granted, tell=tell)
    party = Participant(
        seat,
        identity,
        speaker,
        lambda keys: collect_facts(keys, surroundings, timeout=timeout, announce=announce),
        answers_at=survey.answers_at if survey else None,
        own_gpus=states_binding(launch_facts(surroundings.environ)),
    )
    return party, survey
