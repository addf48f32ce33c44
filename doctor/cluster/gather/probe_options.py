"""What the user wants measured, and the survey that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from doctor.cluster.gather.probe_schedule import ProbeSchedule, light_schedule
from doctor.collectors.base import Machine
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.bandwidth.stage import TransfersStage
from doctor.probes.base import Stage
from doctor.probes.collectives.mesh import Axis
from doctor.probes.collectives.stage import GroupsStage
from doctor.probes.devices.stage import DevicesStage
from doctor.probes.reachability.stage import LightStage
from doctor.probes.storage.stage import StorageStage


class ProbeOptions(msgspec.Struct, frozen=True):
    """``probe``: how much; ``mesh``: the axes of the job, outermost first, empty where they are to be found out;
    ``why``: try what mends what is slow or fails. ``directories``: pairs of role and path."""

    probe: Literal["light", "full"] = "light"
    mesh: tuple[Axis, ...] = ()
    why: bool = False


def probe_schedule(
    wanted: ProbeOptions,
    number: int,
    timeout: float,
    surroundings: Machine,
    *,
    speaks: bool,
    tell: Callable[[str], None],
) -> ProbeSchedule:
    """The survey of the process ``number`` in a gathering that may take ``timeout`` seconds. Light probes end within
    these; full ones begin when all are here or these are over."""
    if wanted.probe == "light":
        return light_schedule(number, timeout, surroundings, speaks=speaks, tell=tell)
    return ProbeSchedule(number, tuple(full_stages(wanted)), surroundings, speaks=speaks, tell=tell)


def full_stages(wanted: ProbeOptions) -> Iterator[Stage]:
    """All stages of full probes, in their order: what is quiet before what is loud, and why comes last."""
    yield LightStage()
    yield TransfersStage()
    yield StorageStage()
    yield DevicesStage()
    yield GroupsStage(wanted.mesh)
    if wanted.why:
        yield WhyStage()
