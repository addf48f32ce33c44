"""NCCL002: a known variable has an invalid value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings, only_nccl
from doctor.api import Finding, Job, Severity, Verdict, check, merge, source_of
from doctor.core.text import lazy_compile
from doctor.facts import EnvironmentFacts, NcclFacts, NcclLibrary, Setting, SettingsFile, SoftwareFacts
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.knowledge.variable_values import ValueFault
from doctor.knowledge.variable_values import fault as value_fault
from doctor.testing import Fails, Passes, healthy

_SOUND = {
    "NCCL_IB_DISABLE": "0x1",
    "NCCL_ALGO": "tree,ring;allreduce:nvls,tree;allgather:^pat",
    "NCCL_PROTO": "^LL128",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NET_GDR_LEVEL": "2",
    "NCCL_DEBUG": "info",
    "NCCL_DEBUG_SUBSYS": "^ENV,GRAPH",
    "NCCL_NET": "AWS Libfabric",
    "NCCL_CUMEM_ENABLE": "-2",
    "NCCL_IB_GID_INDEX": "",
    "TORCH_NCCL_BLOCKING_WAIT": "no",
    "TORCH_DISTRIBUTED_DEBUG": "info",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}

_OLD_NCCL = (NcclLibrary("/usr/lib/libnccl.so.2", "2.20.5", "system", chosen=True),)
_NEW_NCCL = (NcclLibrary("/usr/lib/libnccl.so.2", "2.30.7", "system", chosen=True),)


@check(
    id="NCCL002",
    severity=Severity.ERROR,
    needs=(EnvironmentFacts,),
    impacts={
        r"unused: InfiniBand is off": "None while NCCL_IB_DISABLE turns InfiniBand off.",
        r"rejects it on import": "`import torch` fails on every rank that has the variable.",
        r"PyTorch rejects it": "Creating the process group fails on every rank that has the variable.",
        r"NCCL rejects it": "NCCL fails to initialize on every rank that has the variable.",
        r"leaves no algorithm": "Each call of a collective without an algorithm fails with an error.",
        r"writes no log|logs nothing": "If NCCL fails, the log does not show the cause.",
        r"does not expand|does not exist": "NCCL runs without the settings in this file and logs no message.",
        r"silently ignores|has no effect": "NCCL behaves as if the variable were not set.",
        r"disables nothing": "The feature stays enabled, and NCCL logs no message.",
        r"truncate": "Lost packets are retried fewer times than intended, and other devices may reject the value.",
        r"reads it as": "The setting does not have the intended effect, and NCCL logs no message.",
        r"treats it as": "The setting may not have the intended effect, and NCCL logs no message.",
        r"sets no time limit": "If a link or a peer fails, NCCL waits for it instead of reporting an error.",
        r"NCCL replaces it": "NCCL uses another number instead, so the setting does not have the intended effect.",
        r"out of range": "The value is rejected with an error, or silently replaced with one in the range.",
        r"ignores$": "The other entries of the list still take effect.",
        r"whole list|default list": "NCCL logs what it logs without the variable.",
    },
    cases=lambda: (
        Passes("nothing set", healthy()),
        Passes("sound values", healthy().environ(ranks=None, **_SOUND)),
        Fails("true is read as 0", healthy(2, 2).environ(NCCL_IB_DISABLE="true", ranks=(3,)), ranks=(3,)),
        Fails("only 1 disables it", healthy().environ(NCCL_P2P_DISABLE="2"), ranks=(0, 1)),
        Fails("a number with a unit", healthy().environ(NCCL_BUFFSIZE="8M"), ranks=(0, 1)),
        Fails("an unknown algorithm", healthy().environ(NCCL_ALGO="Rings"), ranks=(0, 1)),
        Fails(
            "an algorithm that not every collective has",
            healthy().environ(NCCL_ALGO="Tree"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "one collective without an algorithm",
            healthy().environ(NCCL_ALGO="ring;allgather:tree,collnetchain"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "a release that falls back to another algorithm",
            healthy().environ(NCCL_ALGO="Tree").alter(SoftwareFacts, nccl_libraries=_OLD_NCCL),
        ),
        Fails(
            "more retries than three bits hold",
            healthy().environ(NCCL_IB_RETRY_CNT="14"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("retries of which the device keeps none", healthy().environ(NCCL_IB_RETRY_CNT="8"), ranks=(0, 1)),
        Fails("a level in small letters", healthy().environ(NCCL_P2P_LEVEL="nvl"), ranks=(0, 1)),
        Fails(
            "a timeout that never ends",
            healthy().environ(NCCL_IB_TIMEOUT="64"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails("out of range", healthy().environ(NCCL_IB_TIMEOUT="-5"), ranks=(0, 1)),
        Fails(
            "an unknown log level, which costs the log and not the job",
            healthy().environ(NCCL_DEBUG="DEBUG"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "a log level that is none and is quiet, as it was meant to be",
            healthy().environ(NCCL_DEBUG="ERROR"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "a number of threads that NCCL replaces, with which nothing fails",
            healthy().environ(NCCL_NTHREADS="1"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails("no bool to torch", healthy().environ(TORCH_NCCL_BLOCKING_WAIT="on"), ranks=(0, 1)),
        Fails("an unknown debug level of torch", healthy().environ(TORCH_DISTRIBUTED_DEBUG="1"), ranks=(0, 1)),
        Fails(
            "a word too many in a list of what is logged",
            healthy().environ(NCCL_DEBUG_SUBSYS="INIT,GRAPH,ENV,TUNING,NET,VERSION"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "a word too many, for a release that then ignores the list",
            healthy().environ(NCCL_DEBUG_SUBSYS="INIT,VERSION").alter(SoftwareFacts, nccl_libraries=_NEW_NCCL),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "a list of what is logged without a known word",
            healthy().environ(NCCL_DEBUG_SUBSYS="INFO"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "of InfiniBand, which is off",
            healthy().environ(NCCL_IB_DISABLE="1", NCCL_IB_TIMEOUT="3600"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "of InfiniBand, which is on", healthy().environ(NCCL_IB_DISABLE="0", NCCL_IB_TIMEOUT="3600"), ranks=(0, 1)
        ),
        Fails("taken for 1", healthy().environ(NCCL_IB_DISABLE="2"), ranks=(0, 1), severity=Severity.WARNING),
        Fails("taken for 0", healthy().environ(NCCL_SHM_DISABLE="2"), ranks=(0, 1), severity=Severity.WARNING),
        Fails(
            "more sockets than NCCL opens",
            healthy().environ(NCCL_SOCKET_NTHREADS="16", NCCL_NSOCKS_PERTHREAD="8"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "NCCL_CONF_FILE names no file",
            healthy()
            .environ(NCCL_CONF_FILE="~/nccl.conf")
            .alter(NcclFacts, files=(SettingsFile("~/nccl.conf", "user file", exists=False),)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "in the system's file",
            healthy(2, 1).alter(
                NcclFacts,
                ranks=(1,),
                settings=(Setting("NCCL_P2P_DISABLE", "yes", "system file", "/etc/nccl.conf", 7),),
            ),
            ranks=(1,),
        ),
    ),
)
def value_invalid(job: Job) -> Iterator[Verdict]:
    """Ask whether every known variable has a valid value.

    Why it hurts: NCCL reads text as 0 and silently ignores values that it does not know, so the setting does not have
    the intended effect. For TORCH_ variables, PyTorch raises an error when it creates the process group.
    Fix: Set the variable to a valid value, or unset it.
    """
    release = only_nccl(job)
    settings = list(effective_settings(job))
    without_ib = {
        rank
        for stated in settings
        if stated.setting.name == IB_DISABLE and parse_nccl_integer(stated.setting.value, 0)
        for rank in stated.ranks
    }
    for stated in settings:
        yield from _judge(stated, release, is_off=without_ib.issuperset(stated.ranks))
    yield from merge(_sockets(job))
    yield from merge(_files(job))


def _judge(stated: EffectiveSetting, release: str | None, *, is_off: bool) -> Iterator[Finding]:
    setting = stated.setting
    is_unused = is_off and is_of_infiniband(setting.name)
    info = known_variable(setting.name)
    fault = value_fault(setting.name, setting.value, release=release if info and info.reader == "nccl" else None)
    if info is None or fault is None:
        return
    shown = setting.value if setting.value else "''"
    unused = UNUSED if is_unused else ""
    whole = f"{setting.name}={shown} {fault.problem}{unused}"
    yield Finding(
        whole
        if len(whole) <= _LONGEST or not fault.problem.startswith("contains")
        else f"{setting.name} {fault.problem}{unused}",
        ranks=stated.ranks,
        evidence={"from": stated.origin, "expected": fault.expected, **_cut(setting.value, len(whole))},
        fix=_fix(stated, fault),
        severity=Severity.INFO if is_unused else severity_of(fault),
        source=source_of(setting),
    )


IB_DISABLE = "NCCL_IB_DISABLE"
UNUSED = " (unused: InfiniBand is off)"


def _cut(value: str, length: int) -> dict[str, object]:
    """The value if the summary is too long to contain it."""
    return {"value": value} if length > _LONGEST else {}


def is_of_infiniband(name: str) -> bool:
    """Whether NCCL reads a variable only if NCCL_IB_DISABLE is 0: ncclIbInit (src/transport/net_ib.cc)."""
    return name.startswith("NCCL_IB_") and name != IB_DISABLE


_LONGEST = 100
"""Characters of a summary; the evidence has the value."""


def severity_of(fault: ValueFault) -> Severity | None:
    """The severity of a fault if it differs from that of the check."""
    return Severity.INFO if fault.harmless else Severity.WARNING if fault.mild else None


_MEANT = {"1": ("true", "yes", "on", "t", "y", "enable", "enabled"), "0": ("false", "no", "off", "f", "n", "disabled")}


def meant_number(value: str) -> str | None:
    """1 or 0 for a word such as ``true`` or ``off``."""
    return next((number for number, words in _MEANT.items() if value.strip().lower() in words), None)


def intended_value(name: str, value: str, expected: str) -> str | None:
    """The valid value that was probably intended: ``1`` for ``true``, ``NVL`` for ``nvl``, bytes for ``8M``."""
    if (number := meant_number(value)) is not None and expected.startswith("0 or 1"):
        return number
    if name in _SAFE:
        return _SAFE[name]
    if value.strip().upper() in re.findall(r"\w+", expected):
        return value.strip().upper()
    if (size := _SIZE.fullmatch(value.strip())) and "integer" in expected:
        return str(int(size[1]) << _BITS[size[2].lower()])
    # A longer word for a known one: ``NVLINK``, ``Rings``.
    words = _WORD.findall(expected) if value.isalpha() and ":" not in expected else ()
    return max((word for word in words if value.upper().startswith(word.upper())), key=len, default=None)


def _fix(stated: EffectiveSetting, fault: ValueFault) -> str:
    setting = stated.setting
    in_file = source_of(setting) is not None
    meant = intended_value(setting.name, setting.value, fault.expected)
    if meant is not None:
        assignment = f"{setting.name}={meant}"
        return f"Replace the setting in {stated.origin} with `{assignment}`." if in_file else f"export {assignment}"
    if fault.ignored:
        place = f"{setting.name} in {stated.origin}" if in_file else setting.name
        return f"Remove {', '.join(fault.ignored)} from {place}."
    wanted = valid_values(fault)
    if in_file:
        return f"Remove {setting.name} from {stated.origin}, or set it to {wanted}."
    return f"Unset {setting.name}, or set it to {wanted}."


def valid_values(fault: ValueFault, *, longest: int = 80) -> str:
    """The valid values for a fix; the evidence has a long list of them."""
    if len(fault.expected) <= longest:
        return fault.expected
    return f"{'a list' if fault.expected.startswith('a list') else 'one'} of the expected values"


_SAFE = {"NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
"""Values that log what a failure needs, without a cost."""
_SIZE = lazy_compile(r"(\d{1,9}) ?([kmg])(?:i?b)?", re.IGNORECASE)
_BITS = {"k": 10, "m": 20, "g": 30}
_WORD = lazy_compile(r"\b[A-Z][A-Za-z]{2,}\b")
"""A value such as ``NVL`` or ``Ring`` in the description of those that are valid."""


def _sockets(job: Job, *, most: int = 64, most_threads: int = 16) -> Iterator[Finding]:
    """``most``, ``most_threads``: MAX_SOCKETS and MAX_THREADS of NCCL src/transport/net_socket.cc, which lowers the
    threads first, and then the sockets of each thread."""
    for nccl, identical in job.each(NcclFacts):
        threads, sockets = nccl.get("NCCL_SOCKET_NTHREADS"), nccl.get("NCCL_NSOCKS_PERTHREAD")
        if not threads or not sockets:
            continue
        used = min(parse_nccl_integer(threads, 0), most_threads)
        asked = used * parse_nccl_integer(sockets, 0)
        if asked > most:
            kept = most // max(used, 1)
            yield Finding(
                f"NCCL_SOCKET_NTHREADS={threads} × NCCL_NSOCKS_PERTHREAD={sockets} exceeds NCCL's limit of {most} "
                "sockets",
                ranks=identical.ranks,
                evidence={"sockets_asked": asked},
                effect=f"NCCL opens {kept} sockets per thread instead of {sockets}, and logs a warning.",
                fix=f"export NCCL_NSOCKS_PERTHREAD={kept}",
                severity=Severity.WARNING,
            )


def _files(job: Job) -> Iterator[Finding]:
    for nccl, identical in job.each(NcclFacts, also=(EnvironmentFacts,)):
        environment = identical.find(EnvironmentFacts)
        named = environment.get("NCCL_CONF_FILE") if environment else None
        for file in nccl.files if named else ():
            if file.path == named and not file.exists:
                yield Finding(
                    f"NCCL_CONF_FILE={named} is ignored: NCCL does not expand `~`"
                    if named.startswith("~")
                    else f"NCCL_CONF_FILE={named} does not exist: NCCL silently ignores it",
                    ranks=identical.ranks,
                    evidence={"error": file.error},
                    fix=f'export NCCL_CONF_FILE="$HOME/{named[2:]}"'
                    if named.startswith("~/") and shlex.quote(named[2:]) == named[2:]
                    else "Unset NCCL_CONF_FILE, or set it to the absolute path of an existing file.",
                    severity=Severity.WARNING,
                )
