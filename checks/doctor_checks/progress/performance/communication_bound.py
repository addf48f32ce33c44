"""RUN013: much of each step is communication."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from doctor.analysis.interface_choice import active_rdma_ports
from doctor.analysis.stats.rank_roles import same_role, uses_lightning
from doctor.analysis.stats.step_times import common_windows, milliseconds, typical_parts, typical_total
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import InterfaceFacts, ModelFacts, RdmaFacts, StepFacts, TrainingFacts, Window
from doctor.testing import Fails, JobBuilder, Passes, running

MIB = 1 << 20

BACKWARD_TO_FORWARD = 2.0
"""The ratio of arithmetic in the backward and forward passes: one product for the gradients of the inputs and one for
those of the weights (Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1)."""


def _steps(forward: float, backward: float, windows: int = 6) -> StepFacts:
    total = forward + backward + 0.02
    return StepFacts(
        windows=tuple(
            Window(20 * place, 20, total, data=0.01, forward=forward, backward=backward, other=0.01)
            for place in range(windows)
        )
    )


def _all(steps: StepFacts, hosts: int = 2, parameters: int = 100_000_000) -> JobBuilder:
    return running(hosts, 2, gpus=0).put(steps).alter(ModelFacts, parameters=parameters, trainable=parameters)


@check(
    id="RUN013",
    severity=Severity.INFO,
    scope=Scope.JOB,
    when="R",
    needs=(StepFacts,),
    needs_peers=True,
    cases=lambda: (
        Passes("a tenth of the step", _all(_steps(0.1, 0.25))),
        Passes("a single rank", running(1, 1)),
        Passes("only one rank waits", _all(_steps(0.1, 0.2)).put(_steps(0.02, 0.28), ranks=(3,))),
        Passes("half of next to nothing", _all(_steps(0.0005, 0.004, windows=60))),
        Passes("too few windows", _all(_steps(0.05, 0.4, windows=2))),
        Fails("a backward pass of nine times the forward pass", _all(_steps(0.05, 0.45)), severity=Severity.INFO),
        Fails("on one host", _all(_steps(0.05, 0.45), hosts=1), severity=Severity.INFO),
    ),
)
def communication_bound(
    job: Job,
    *,
    communication_share: float = 0.4,
    least_seconds: float = 0.01,
    least_windows: float = 3,
    watched_seconds: float = 3,
) -> Iterator[Verdict]:
    """Ask whether communication takes a large part of each step on all ranks.

    Why it hurts: during this part of each step, the ranks wait for data instead of computing.
    Fix: Accumulate gradients over several batches, or use larger batches.
    """
    # At 30 %, doubling the batch (or accumulation) saves 15 % of the time per sample. The estimate attributes any
    # slowness of the backward pass to communication, so the threshold is larger.
    judged = False
    for ranks in same_role(job):
        steps, windows = common_windows(ranks, int(least_windows), watched_seconds)
        chosen = {rank: [own[step] for step in steps] for rank, own in windows.items()}
        if not steps or len(chosen) < 2:
            continue
        judged = True
        trainings = (rank.find(TrainingFacts) for rank in ranks)
        if any(training and (training.device or "").startswith("cuda") for training in trainings):
            unhide = "torch.profiler for a few steps, or TORCH_NCCL_ENABLE_TIMING=1 and the flight recorder"
            yield Unknown("the time that collectives take on GPUs is not visible to the host", tuple(chosen), unhide)
            continue
        parts = [typical_parts(own) for own in chosen.values()]
        total = median(typical_total(own) for own in chosen.values())
        if not all(own["forward"] and own["backward"] for own in parts):
            continue
        # The time on the rank that waits least; more is the wait for a straggler (RUN003). It is the excess of the
        # backward pass over its arithmetic, which is unknown on a host that only launches kernels.
        seconds = min(own["backward"] - BACKWARD_TO_FORWARD * own["forward"] for own in parts)
        if seconds > max(least_seconds, communication_share * total):
            yield _finding(job, seconds, total)
    if not judged:
        yield Skip("too few steps of ranks that do the same work")


def _finding(job: Job, seconds: float, total: float) -> Finding:
    """``seconds``: the estimated minimum time that every rank spends in collectives, of ``total`` per step."""
    # The bytes of one reduction: four for each trained parameter.
    size = max((4 * (model.trainable or model.parameters) for model, _ in job.facts(ModelFacts)), default=0)
    link = _slowest_link(job)
    ideal = 2 * size / link if size and link else None
    effect = (
        f"At the {8 * link / 1e9:g} Gb/s of the slowest link, an all-reduce of the gradients ({mebibytes(size)}) takes "
        f"{milliseconds(ideal)}; each step spends {milliseconds(seconds - ideal)} more."
        if ideal and link and ideal < seconds
        else ""
    )
    return Finding(
        f"All ranks spend an estimated {milliseconds(seconds)} of each {milliseconds(total)} step "
        f"({seconds / total:.0%}) in communication",
        evidence={
            "estimated_from": f"time of the backward pass beyond {BACKWARD_TO_FORWARD:g} times the forward pass",
            "gradient_bytes": size or None,
            "link_gbit_per_s": round(8 * link / 1e9, 3) if link else None,
        },
        effect=effect,
        fix=_fix(job, seconds, ideal),
        confidence=0.5,
    )


def _slowest_link(job: Job) -> float | None:
    """Bytes per second, ``None`` if unknown. A ring sends each gradient twice over the slowest network."""
    if not job.is_multi_host:
        return None
    speeds = []
    for host in job.hosts:
        rdma, interfaces = host.find(RdmaFacts), host.find(InterfaceFacts)
        ports = sum(port.rate or 0.0 for _, port in active_rdma_ports(rdma)) * 1e9 / 8 if rdma else 0.0
        fastest = max(((one.speed or 0) * 1e6 / 8 for one in interfaces.interfaces), default=0.0) if interfaces else 0.0
        speeds.append(max(ports, fastest))
    return min(speeds) if speeds and all(speeds) else None


def _fix(job: Job, seconds: float, ideal: float | None) -> str:
    if ideal is not None and seconds > 4 * ideal:
        return (
            "Run `doctor check --probe full` with the launcher and on the hosts of this job to measure the bandwidth "
            "between the hosts."
        )
    training = next((facts for facts, _ in job.facts(TrainingFacts)), None)
    more = 2 * (training.accumulate if training else 1)
    if uses_lightning(job):
        return (
            f"Accumulate gradients over more batches with `Trainer(accumulate_grad_batches={more})`, or use larger "
            "batches."
        )
    return f"Accumulate gradients over {more} batches with `model.no_sync()`, or use larger batches."
