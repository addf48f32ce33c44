"""NCCL016: a variable differs from the site profile that the user chose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from doctor.analysis.effective_settings import only_nccl
from doctor.api import Finding, Job, Severity, Unknown, Verdict, check, merge
from doctor.facts import (
    EnvironmentFacts,
    Gpu,
    GpuFacts,
    NcclFacts,
    NcclLibrary,
    Setting,
    SiteProfileFacts,
    SoftwareFacts,
)
from doctor.knowledge.environment_variables import known
from doctor.knowledge.releases import within
from doctor.knowledge.sites.profiles import Recommendation, SiteProfile, site_profiles
from doctor.knowledge.variable_values import effective
from doctor.testing import Fails, JobBuilder, Passes, healthy

_JUWELS = SiteProfileFacts(name="jsc-juwels-booster")
_IMAGE = (
    Setting("NCCL_IB_PCI_RELAXED_ORDERING", "1", "system file", "/etc/nccl.conf", 1),
    Setting("NCCL_TOPO_FILE", "/opt/microsoft/ndv5/topo.xml", "system file", "/etc/nccl.conf", 2),
    Setting("NCCL_IGNORE_CPU_AFFINITY", "1", "system file", "/etc/nccl.conf", 3),
)


def _on_frontier(hosts: int) -> JobBuilder:
    return healthy(hosts, 1).environ(NCCL_SOCKET_IFNAME="hsn0").put(SiteProfileFacts(name="olcf-frontier"))


def _on_efa() -> JobBuilder:
    sketch = healthy(2, 1).environ(FI_EFA_USE_HUGE_PAGE="0", NCCL_SOCKET_IFNAME="^docker,lo")
    return sketch.put(SiteProfileFacts(name="aws-efa"))


def _on_a10g(release: str) -> JobBuilder:
    library = NcclLibrary("/usr/lib/libnccl.so.2", release, "system", chosen=True)
    sketch = _on_efa().alter(GpuFacts, gpus=(Gpu(0, name="NVIDIA A10G"),))
    return sketch.alter(SoftwareFacts, nccl_libraries=(library,))


@check(
    id="NCCL016",
    severity=Severity.INFO,
    needs=(EnvironmentFacts, SiteProfileFacts),
    cases=lambda: (
        Passes("no profile was chosen", healthy()),
        Passes(
            "all variables of the profile",
            healthy().environ(NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="ib0").put(_JUWELS),
        ),
        Passes(
            "set by the configuration file of the image",
            healthy().alter(NcclFacts, settings=_IMAGE).put(SiteProfileFacts(name="azure-ndv5-image")),
        ),
        Passes("an alternative, on other GPUs than a variable is for", _on_efa()),
        Passes("one host, where several need more", _on_frontier(1)),
        Passes("a release that no longer reads the variable", _on_a10g("2.30.7")),
        Fails("several hosts", _on_frontier(2), ranks=(0, 1)),
        Fails("one variable is not set", healthy(2, 1).environ(NCCL_SOCKET_IFNAME="ib0").put(_JUWELS), ranks=(0, 1)),
        Fails(
            "another value on one host",
            healthy(2, 1)
            .environ(NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="ib0")
            .environ(ranks=(1,), GLOO_SOCKET_IFNAME="eth0")
            .put(_JUWELS),
            ranks=(1,),
        ),
        Fails("the GPU that a variable is for", _on_a10g("2.27.3"), ranks=(0, 1)),
    ),
)
def site_recommendation(job: Job) -> Iterator[Verdict]:
    """Ask whether the environment follows the recommendations of the selected site profile.

    Why it hurts: the provider or computing center publishes this value for the system. Without it, the job may be
    slower or run into a problem that the value avoids.
    Fix: Export the variable on all ranks, unless the job needs another value.
    """
    for chosen, same in job.each(SiteProfileFacts):
        if chosen.name not in site_profiles():
            yield Unknown(f"this release has no site profile {chosen.name}", same.ranks)
    yield from merge(_findings(job))


def _findings(job: Job) -> Iterator[Finding]:
    release = only_nccl(job)
    for environment, chosen, same in job.each(EnvironmentFacts, SiteProfileFacts, also=(NcclFacts, GpuFacts)):
        profile = site_profiles().get(chosen.name)
        if profile is None:
            continue
        values = _values(environment, same.find(NcclFacts))
        for name, recommended in profile.recommendations():
            value = values.get(name)
            is_met = value is not None and recommended.is_met_by(name, value)
            gpus = same.find(GpuFacts)
            if not is_met and _applies(recommended, job, gpus) and not _is_removed(name, release):
                models = list(dict.fromkeys(gpu.name for gpu in gpus.gpus)) if gpus else []
                yield _finding(chosen.name, profile, name, recommended, value, models, same.ranks)


def _values(environment: EnvironmentFacts, nccl: NcclFacts | None) -> dict[str, str]:
    """The variables of a process, and those that configuration files of NCCL add."""
    values = {variable.name: variable.value for variable in environment.variables}
    return values | {setting.name: setting.value for setting in (nccl.settings if nccl else ())}


def _applies(recommended: Recommendation, job: Job, gpus: GpuFacts | None) -> bool:
    """Whether a recommendation applies to this job; it does if the GPU model is unknown."""
    if recommended.multi_host and not job.is_multi_host:
        return False
    if not recommended.gpus or gpus is None or not gpus.gpus:
        return True
    return any(not set(recommended.gpus).isdisjoint(re.split(r"[\s-]", gpu.name)) for gpu in gpus.gpus)


def _is_removed(name: str, release: str | None) -> bool:
    """Whether this NCCL release no longer reads the variable."""
    info = known(name)
    if info is None or info.reader != "nccl" or info.superseded is None or info.still_read or release is None:
        return False
    return not within(release, before=info.superseded)


def _finding(
    chosen: str,
    profile: SiteProfile,
    name: str,
    recommended: Recommendation,
    value: str | None,
    models: list[str],
    ranks: tuple[int, ...],
) -> Finding:
    summary = _summary(chosen, name, recommended, value)
    evidence = {
        "system": profile.title,
        "value": None if f"{name}={value}" in summary else value,
        "also accepted": list(recommended.alternatives),
        "only_on_gpus": list(recommended.gpus),
        "models": models if recommended.gpus else [],
        "only_on_several_hosts": recommended.multi_host,
        "source": profile.source,
    }
    return Finding(
        summary,
        ranks=ranks,
        evidence={key: one for key, one in evidence.items() if one},
        effect=_effect(recommended, is_known=bool(models)),
        fix=_fix(name, recommended),
    )


def _effect(recommended: Recommendation, *, is_known: bool) -> str:
    why = recommended.why
    if not why or not recommended.gpus or is_known:
        return why
    return f"If the GPUs are {' or '.join(recommended.gpus)}, {why[:1].lower()}{why[1:]}"


_LONGEST = 100
"""The largest length of a title."""


def _summary(chosen: str, name: str, recommended: Recommendation, value: str | None) -> str:
    verb = "requires" if recommended.required else "recommends"
    is_default = value is None and effective(name, None) == effective(name, recommended.value)
    wish = f"the profile {chosen} {verb} {recommended.value}{', the default' if is_default else ''}"
    whole = f"{name} is not set; {wish}" if value is None else f"{name}={value}; {wish}"
    if len(whole) <= _LONGEST:
        return whole
    return (
        f"{name} is not set; {chosen} {verb} it"
        if value is None
        else f"{name} differs from the value that {chosen} {verb}"
    )


def _fix(name: str, recommended: Recommendation) -> str:
    option = recommended.batch_option
    before = f"Add `#SBATCH {option}` to the job script, and set the variable in it:\n" if option else ""
    return before + _export(name, recommended.value)


def _export(name: str, value: str) -> str:
    before = ":$LD_LIBRARY_PATH" if name == "LD_LIBRARY_PATH" else ""
    return f"export {name}={shlex.quote(value)}{before}"
