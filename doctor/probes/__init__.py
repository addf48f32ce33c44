"""Active measurements: reachability, bandwidth, collectives, devices and storage of a job.

Light probes run between hosts: one process of each host has a :class:`Responder`, :func:`plan_light` assigns the
connections, and every agent runs :func:`probe_light` at the same time. The results are facts, judged by checks as any
others.
"""

from doctor.probes.reachability.assignments import Agent, Assignment, LightProbeResult, MasterTarget, ProbeTarget
from doctor.probes.reachability.connection_plan import plan_light
from doctor.probes.reachability.light_probe import probe_light
from doctor.probes.reachability.probe_cost import LIMIT_SECONDS, Budget, budget_of
from doctor.probes.responder.listener import Responder

__all__ = [
    "LIMIT_SECONDS",
    "Agent",
    "Assignment",
    "Budget",
    "LightProbeResult",
    "MasterTarget",
    "ProbeTarget",
    "Responder",
    "budget_of",
    "plan_light",
    "probe_light",
]
