"""NCCL001: a variable that no known release or plugin reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings, only_nccl, only_torch
from doctor.api import Finding, IdenticalRanks, Job, Severity, Verdict, check, merge, source_of
from doctor.facts import EnvironmentFacts, NcclFacts, NcclPlugin, Setting
from doctor.knowledge.environment_variables import (
    VariableInfo,
    concerns_nccl,
    misspelled,
    network_plugin_of,
    without_loss,
)
from doctor.knowledge.environment_variables import is_foreign as is_foreign_variable
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.environment_variables import nearest as nearest_variable
from doctor.knowledge.releases import within
from doctor.testing import Fails, Passes, healthy

_PLUG_INS = {
    "NCCL_VERSION": "2.27.3",
    "NCCL_HOME": "/usr/local/nccl",
    "NCCL_FASTRAK_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1",
    "NCCL_UCX_TLS": "dc,cuda_copy",
    "NCCL_TUNER_CONFIG_PATH": "/opt/tuner.textproto",
    "OFI_NCCL_PROTOCOL": "RDMA",
    "RCCL_MSCCL_ENABLE": "1",
    "NCCL_NCHANNELS_PER_PEER": "4",  # RCCL
    "NCCL_SOCK_BUSY_POLL": "50",  # nccl-fastsocket
    "NCCL_GPUVIZ_READ_INTERVAL_IN_MICROSECONDS": "1000000",  # GPUDirect-TCPXO
    "NCCL_COLLTRACE": "trace",  # NCCLX
}

_NET_PLUGIN = NcclPlugin("net", "libnccl-net.so", path="/opt/amazon/ofi-nccl/lib/libnccl-net.so")


@check(
    id="NCCL001",
    severity=Severity.WARNING,
    needs=(EnvironmentFacts,),
    cases=lambda: (
        Passes("nothing set", healthy()),
        Passes("known settings", healthy().environ(NCCL_SOCKET_IFNAME="eth0", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")),
        Passes(
            "packages, build paths, plugins and forks",
            healthy().environ(ranks=None, **_PLUG_INS).alter(NcclFacts, plugins=(_NET_PLUGIN,)),
        ),
        Passes(
            "libraries below and above NCCL, and a script",
            healthy().environ(
                UCX_TLS="rc", FI_PROVIDER="efa", GLOO_SOCKET_IFNAME="eth0", TORCH_HOME="/data", TORCH_RUN_NAME="a"
            ),
        ),
        Fails("a variable of Gloo, written with zeroes", healthy().environ(GL00_SOCKET_IFNAME="eth0"), ranks=(0, 1)),
        Fails("a letter of torch's is missing", healthy().environ(TORCH_DISTRIBUTED_DEBG="DETAIL"), ranks=(0, 1)),
        Fails("two letters of UCX's are swapped", healthy().environ(UCX_TSL="rc,cuda"), ranks=(0, 1)),
        Fails("a letter of CUDA's is missing", healthy().environ(CUDA_VISIBLE_DEVICE="0,1"), ranks=(0, 1)),
        Fails("a letter of OpenMP's is missing", healthy().environ(OMP_NUM_THREAD="8"), ranks=(0, 1)),
        Passes("folders of CUDA", healthy().environ(CUDA_HOME="/usr/local/cuda", CUDA_PATH="/usr/local/cuda")),
        Fails("a letter of libfabric's is missing", healthy().environ(FI_PROVIDR="efa"), ranks=(0, 1)),
        Fails(
            "variables of plugins on a host that has none",
            healthy().environ(NCCL_UCX_TLS="dc,cuda_copy", NCCL_IBEXT_DISABLE="0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "the old name of a variable that torch 2.8 no longer needs",
            healthy().environ(NCCL_AVOID_RECORD_STREAMS="1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "near to a name that NCCL ignores without a loss",
            healthy().environ(NCCL_CHECK_DISABLE="1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("near to a name that another replaced", healthy().environ(NCCL_MAX_RINGS="8"), ranks=(0, 1)),
        Fails("a letter is missing", healthy(2, 2).environ(NCCL_SOKET_IFNAME="eth0", ranks=(1, 3)), ranks=(1, 3)),
        Fails("an underscore too many", healthy().environ(NCCL_SOCKET_IF_NAME="eth0"), ranks=(0, 1)),
        Fails("a longer word", healthy().environ(TORCH_NCCL_ASYNC_ERROR_HANDLE="1"), ranks=(0, 1)),
        Fails("the prefix of torch", healthy().environ(TORCH_NCCL_IB_DISABLE="1"), ranks=(0, 1)),
        Fails(
            "blanks around the name in a file",
            healthy(2, 1).alter(
                NcclFacts,
                ranks=(1,),
                settings=(Setting("NCCL_DEBUG ", " INFO", "system file", "/etc/nccl.conf", 2),),
            ),
            ranks=(1,),
        ),
        Fails("near to nothing", healthy().environ(NCCL_TEAM_COLOUR="blue"), ranks=(0, 1), severity=Severity.INFO),
    ),
)
def variable_unknown(job: Job) -> Iterator[Verdict]:
    """Ask whether every NCCL_* variable is known and no variable of PyTorch, Gloo, UCX, CUDA or OpenMP is misspelled.

    Why it hurts: the setting is silently ignored.
    Fix: Write the name as in the documentation of NCCL, PyTorch, UCX, libfabric, CUDA or OpenMP.
    """
    releases = {"nccl": only_nccl(job), "torch": only_torch(job)}
    findings = []
    for stated in effective_settings(job):
        name = stated.setting.name
        if is_unknown_variable(name):
            near = nearest_variable(name)
            findings.append(_finding(stated, near, _superseded(near, releases)))
        elif near := misspelled(name):
            findings.append(_finding(stated, near, None))
    yield from merge(findings)
    yield from merge(finding for nccl, identical in job.each(NcclFacts) for finding in _without_plugin(nccl, identical))


def is_unknown_variable(name: str) -> bool:
    """Whether a variable looks like one of NCCL and nothing that is known reads it."""
    return concerns_nccl(name) and known_variable(name) is None and not is_foreign_variable(name)


def _superseded(near: str | None, releases: Mapping[str, str | None]) -> VariableInfo | None:
    """The entry of ``near`` if the job's release replaced it or no longer needs it."""
    info = known_variable(near) if near else None
    release = releases.get(info.reader) if info else None
    if info is None or info.superseded is None or release is None or within(release, before=info.superseded):
        return None
    return info


def _finding(stated: EffectiveSetting, near: str | None, old: VariableInfo | None) -> Finding:
    setting = stated.setting
    shown = setting.name if setting.name == setting.name.strip() else f"{setting.name!r} with a space"
    replaced_by = old.replaced_by if old else None
    kept = without_loss(near, setting.value) if near and old is not None and not old.still_read else ""
    obsolete = old is not None and (replaced_by is None or bool(kept))
    return Finding(
        unknown_summary(shown, near, _note(old), obsolete=obsolete),
        ranks=stated.ranks,
        evidence={"value": setting.value, "from": stated.origin},
        effect=(kept or _not_needed(near, old)) if obsolete else "" if near else _UNKNOWN_EFFECT,
        fix=_remove(stated) if obsolete else _fix(stated, replaced_by or near),
        severity=None if near and not obsolete else Severity.INFO,
        source=source_of(setting),
    )


def unknown_summary(name: str, near: str | None, note: str = "", *, obsolete: bool = False) -> str:
    """What a finding says about an unknown variable; ``near``: the known one that is most like it; ``obsolete``: no
    release in use reads that one either."""
    if near and obsolete:
        return f"Unknown variable {name} ({near} is obsolete)"
    if near:
        return f"Unknown variable {name}. Did you mean {near}{note}?"
    return f"Unknown variable {name}: neither NCCL, PyTorch nor a known plugin reads it"


def _note(old: VariableInfo | None) -> str:
    return f" (now {old.replaced_by})" if old is not None and old.replaced_by else ""


def _not_needed(near: str | None, old: VariableInfo | None) -> str:
    if old is None:
        return ""
    return f"None: {'NCCL' if old.reader == 'nccl' else 'PyTorch'} {old.superseded} and later do not need {near}."


def _without_plugin(nccl: NcclFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Variables of network plugins if NCCL would not load any plugin."""
    if any(one.kind == "net" and one.path for one in nccl.plugins):
        return
    owned: dict[str, list[Setting]] = {}
    for setting in nccl.settings:
        if (plugin := network_plugin_of(setting.name)) is not None:
            owned.setdefault(plugin, []).append(setting)
    for plugin, settings in owned.items():
        names = [setting.name for setting in settings[:8]]
        shown = " and ".join(names) if len(settings) < 3 else f"{names[0]} and {len(settings) - 1} other variables"
        yield Finding(
            f"Only a network plugin reads {shown}, and none was found",
            ranks=identical.ranks,
            evidence={"names": [setting.name for setting in settings[:16]] if len(settings) > 2 else None}
            | {"plugin that reads them" if len(settings) > 1 else "plugin that reads it": plugin},
            effect="None if the training process finds the plugin; otherwise the settings are silently ignored.",
            fix=f"Add the directory of libnccl-net.so to LD_LIBRARY_PATH, or run `unset {' '.join(names)}`.",
            severity=Severity.INFO,
            source=source_of(settings[0]),
        )


_UNKNOWN_EFFECT = "None if a script or another library reads it; otherwise it is silently ignored."
"""For a name that does not resemble a known one. Sites and forks of NCCL define their own variables, and removing one
that is in use would change a working job."""


def _remove(stated: EffectiveSetting) -> str:
    name = stated.setting.name.strip()
    return f"Remove {name} from {stated.origin}." if source_of(stated.setting) else f"unset {name}"


def _fix(stated: EffectiveSetting, near: str | None) -> str:
    setting = stated.setting
    if near is None:
        return f"Look up {setting.name.strip()} in the documentation of the software that it is meant for."
    if source_of(setting):
        return f"Replace the setting in {stated.origin} with `{near}={setting.value.strip()}`."
    return f'export {near}="${setting.name}"\nunset {setting.name}'
