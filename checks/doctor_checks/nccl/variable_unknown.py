"""NCCL001: a variable that no known release or plugin reads."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings
from doctor.api import (
    FileFails,
    FilePasses,
    Finding,
    Job,
    Severity,
    Verdict,
    Violation,
    check,
    merge,
    rule,
    source_of,
)
from doctor.facts import EnvironmentFacts, NcclFacts, Setting
from doctor.knowledge.environment_variables import concerns_nccl
from doctor.knowledge.environment_variables import is_foreign as is_foreign_variable
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.environment_variables import nearest as nearest_variable
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing import Fails, Passes, healthy
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes

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


@check(
    id="NCCL001",
    severity=Severity.WARNING,
    needs=(EnvironmentFacts,),
    cases=lambda: (
        Passes("nothing set", healthy()),
        Passes("known settings", healthy().environ(NCCL_SOCKET_IFNAME="eth0", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")),
        Passes("packages, build paths, plugins and forks", healthy().environ(ranks=None, **_PLUG_INS)),
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
    """Ask whether every NCCL_* and TORCH_NCCL_* variable is one that somebody reads.

    Why it hurts: a misspelled name is silently ignored, and the run behaves as if it were not set.
    Fix: write the name as the documentation of NCCL or PyTorch has it.
    """
    yield from merge(
        _finding(stated, nearest_variable(stated.setting.name))
        for stated in effective_settings(job)
        if _is_unknown(stated.setting.name)
    )


def _is_unknown(name: str) -> bool:
    return concerns_nccl(name) and known_variable(name) is None and not is_foreign_variable(name)


def _finding(stated: EffectiveSetting, near: str | None) -> Finding:
    setting = stated.setting
    shown = setting.name if setting.name == setting.name.strip() else repr(setting.name)
    return Finding(
        _summary(shown, near),
        ranks=stated.ranks,
        evidence={"name": setting.name, "value": setting.value, "from": stated.origin, "near": near},
        effect="" if near else _UNKNOWN_EFFECT,
        fix=_fix(stated, near),
        severity=None if near else Severity.INFO,
        source=source_of(setting),
    )


def _summary(name: str, near: str | None) -> str:
    hint = f". Did you mean {near}?" if near else ""
    return f"Unknown variable {name}: neither NCCL, PyTorch nor a known plugin reads it{hint}"


_UNKNOWN_EFFECT = "None, if a script or a library that is not in the table reads it; otherwise it is silently ignored."
"""Of a name that resembles no known one. Sites and forks of NCCL have variables of their own: removing one that is in
use would change a working job."""


def _fix(stated: EffectiveSetting, near: str | None) -> str:
    setting = stated.setting
    if near is None:
        return f"Compare {setting.name.strip()} with the documentation of the software that it is set for."
    if source_of(setting):
        return f"in {stated.origin}, write {near}={setting.value.strip()}"
    return f'export {near}="${setting.name}"; unset {setting.name}'


_POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: trainer
      env:
        - {name: NAME, value: eth0}
"""


@rule(
    check=variable_unknown,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["NCCL_DEBGU"] = "INFO"  # !\n'),
        passes("in a script, for a library of the project", 'os.environ["MYLIB_DEBGU"] = "INFO"\n'),
        shell_fails("a letter is missing", "export NCCL_SOKET_IFNAME=eth0  # !", "torchrun train.py"),
        shell_fails("an underscore too many", "NCCL_IB_DIS_ABLE=1 torchrun train.py  # !"),
        shell_fails("for mpirun", "mpirun -np 8 -x NCCL_SOCKET_IF_NAME=eth0 python train.py  # !"),
        FileFails(
            "in a pod", _POD.replace("NAME, value: eth0}", "NCCL_SOKET_IFNAME, value: eth0}  # !"), name="pod.yaml"
        ),
        shell_passes("known names", "export NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO", "torchrun train.py"),
        shell_passes(
            "packages, plugins and forks",
            "export NCCL_HOME=/opt/nccl NCCL_FASTRAK_CTRL_DEV=eth0 NCCL_NCHANNELS_PER_PEER=4",
            "torchrun a.py",
        ),
        shell_passes("of the script alone", "NCCL_TESTS_VERSON=2.13", "make -C nccl-tests"),
        shell_passes("near to nothing", "export NCCL_TEAM_COLOUR=blue", "torchrun train.py"),
        FilePasses("in a pod, known", _POD.replace("NAME", "NCCL_SOCKET_IFNAME"), name="pod.yaml"),
    ),
)
def variable_unknown_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether the NCCL_* and TORCH_NCCL_* variables of a launch file are ones that somebody reads."""
    for setting in file.settings:
        name = setting.name
        near = nearest_variable(name) if setting.is_exported and _is_unknown(name) else None
        if near is not None:
            yield Violation(
                setting.place,
                _summary(name, near),
                fix=f"`{near}` in place of `{name}`.",
                evidence=(("name", name), ("near", near)),
            )
