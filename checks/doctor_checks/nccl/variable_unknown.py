"""NCCL001: a variable that no known release or plug-in reads."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    EnvironmentFacts,
    Finding,
    Job,
    NcclFacts,
    Setting,
    Severity,
    Sick,
    Stated,
    Verdict,
    Well,
    check,
    concerns_nccl,
    healthy,
    is_foreign_variable,
    known_variable,
    merge,
    nearest_variable,
    source_of,
    stated_settings,
)

_PLUG_INS = {
    "NCCL_VERSION": "2.27.3",
    "NCCL_HOME": "/usr/local/nccl",
    "NCCL_FASTRAK_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1",
    "NCCL_UCX_TLS": "dc,cuda_copy",
    "NCCL_TUNER_CONFIG_PATH": "/opt/tuner.textproto",
    "OFI_NCCL_PROTOCOL": "RDMA",
    "RCCL_MSCCL_ENABLE": "1",
}


@check(
    id="NCCL001",
    severity=Severity.WARNING,
    needs=(EnvironmentFacts,),
    cases=lambda: (
        Well("nothing set", healthy()),
        Well("known settings", healthy().environ(NCCL_SOCKET_IFNAME="eth0", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")),
        Well("packages, build paths and plug-ins", healthy().environ(ranks=None, **_PLUG_INS)),
        Sick("a letter is missing", healthy(2, 2).environ(NCCL_SOKET_IFNAME="eth0", ranks=(1, 3)), ranks=(1, 3)),
        Sick("an underscore too many", healthy().environ(NCCL_SOCKET_IF_NAME="eth0"), ranks=(0, 1)),
        Sick("a longer word", healthy().environ(TORCH_NCCL_ASYNC_ERROR_HANDLE="1"), ranks=(0, 1)),
        Sick("the prefix of torch", healthy().environ(TORCH_NCCL_IB_DISABLE="1"), ranks=(0, 1)),
        Sick(
            "blanks around the name in a file",
            healthy(2, 1).alter(
                NcclFacts,
                ranks=(1,),
                settings=(Setting("NCCL_DEBUG ", " INFO", "system file", "/etc/nccl.conf", 2),),
            ),
            ranks=(1,),
        ),
        Sick("near to nothing", healthy().environ(NCCL_TEAM_COLOUR="blue"), ranks=(0, 1), severity=Severity.INFO),
    ),
)
def variable_unknown(job: Job) -> Iterator[Verdict]:
    """Ask whether every NCCL_* and TORCH_NCCL_* variable is one that somebody reads.

    Why it hurts: nobody tells you: the setting has no effect, and the run behaves as if it were not there.
    Fix: write the name as NCCL's or torch's documentation has it, or remove the variable.
    """
    yield from merge(
        _finding(stated, nearest_variable(stated.setting.name))
        for stated in stated_settings(job)
        if _is_unknown(stated.setting.name)
    )


def _is_unknown(name: str) -> bool:
    return concerns_nccl(name) and known_variable(name) is None and not is_foreign_variable(name)


def _finding(stated: Stated, near: str | None) -> Finding:
    setting = stated.setting
    shown = setting.name if setting.name == setting.name.strip() else repr(setting.name)
    hint = f"; {near} was probably meant" if near else ""
    fix = f'export {near}="${setting.name}"; unset {setting.name}' if near else f"unset {setting.name}"
    if source_of(setting):
        fix = f"in {stated.origin}, write {near}={setting.value.strip()}" if near else f"remove it from {stated.origin}"
    return Finding(
        f"{shown} is no variable that NCCL, torch or a known plug-in reads{hint}",
        ranks=stated.ranks,
        evidence={"name": setting.name, "value": setting.value, "from": stated.origin, "near": near},
        fix=fix,
        severity=None if near else Severity.INFO,
        source=source_of(setting),
    )
