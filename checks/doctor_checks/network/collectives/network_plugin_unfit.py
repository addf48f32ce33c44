"""NET026: a network or tuner plugin of NCCL cannot be used."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from doctor.analysis.interface_choice import (
    active_rdma_ports,
    loaded_net_plugin,
    nccl_matters,
    nccl_rdma_ports,
    nccl_release,
    release_of,
    setting_text,
    what_forces_sockets,
)
from doctor.analysis.logs.event_timeline import spans_hosts
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    hosts_text,
    is_logged,
    merge,
    ranks_in_words,
    source_of,
)
from doctor.core.text import lazy_compile
from doctor.facts import (
    EnvironmentFacts,
    GpuFacts,
    NcclFacts,
    NcclPlugin,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Setting,
    SoftwareFacts,
    TrainerFacts,
)
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.knowledge.net_plugins import readable_interfaces
from doctor.testing import Fails, Passes, healthy, logged

VARIABLES = {"net": "NCCL_NET_PLUGIN", "tuner": "NCCL_TUNER_PLUGIN"}
_SYMBOLS = {"net": lazy_compile(r"ncclNetPlugin_v(\d+)$"), "tuner": lazy_compile(r"ncclTunerPlugin_v(\d+)$")}

_PATH = "/opt/amazon/ofi-nccl/lib/libnccl-net.so"
_GOOD = (NcclPlugin("net", "libnccl-net.so", path=_PATH, symbols=("ncclNetPlugin_v8", "ncclNetPlugin_v9")),)
_STALE = (NcclPlugin("net", "libnccl-net.so", path="/opt/old/libnccl-net.so", symbols=("ncclNetPlugin_v4",)),)
_GONE = (NcclPlugin("net", "libnccl-net-ofi.so", "ofi", error="not found by the loader: ofi, libnccl-net-ofi.so"),)
_TUNER = (NcclPlugin("tuner", "libnccl-tuner-x.so", "x", error="not found by the loader: x, libnccl-tuner-x.so"),)
_PORT = RdmaPort(1, "ACTIVE", "LinkUp", 100.0, "Unspecified")
_EFA = RdmaFacts(devices=(RdmaDevice("rdmap0s6", (_PORT,), driver="efa", has_uverbs=True),))
_SHUT_EFA = RdmaFacts(devices=(RdmaDevice("rdmap0s6", (_PORT,), driver="efa", has_uverbs=False),))


def _warnings_of_libfabric(job: Job) -> Iterator[Finding]:
    """Report plugin warnings about failures that no other log event explains."""
    if not is_logged(job, "nccl.ofi_failed", "nccl.ofi_error"):
        for group in event_groups(job, "nccl.ofi_warned"):
            what = group.value("what") or ""
            yield finding_from_logs(
                group,
                f"The EFA network plugin failed: {_reason(what)}",
                effect=_EFFECT_IN_RUN if "egister memory" in what else "",
                fix=_fix_of_efa(what),
                confidence=0.5,
            )


_SOCKETS = "NCCL silently uses TCP sockets between hosts, which are often more than ten times slower than RDMA."
_EFFECT_IN_RUN = "The rank fails with an NCCL error, and the other ranks wait for it until their timeout."


def _reason(text: str) -> str:
    """``Couldn't open AV. RC: -12, ERROR: Cannot allocate memory`` without the number, and without addresses."""
    return re.sub(r"\. RC: -?\d+, (?:ERROR|Error): ", ": ", re.sub(r" 0x[0-9a-f]+", "", text))


def _fix_of_efa(text: str) -> str:
    if "Cannot allocate memory" in text:
        # ib_umem_get (Linux drivers/infiniband/core/umem.c) returns ENOMEM above RLIMIT_MEMLOCK, for EFA as well.
        return "Raise the limit of locked memory with `ulimit -l unlimited` (in a container: `--ulimit memlock=-1`)."
    if re.search("provider|fi_getinfo", text):
        return "Pass `--device=/dev/infiniband` to the container, and check that `fi_info -p efa` lists a device in it."
    return (
        "Install the plugin and libfabric from the same EFA installer, and check that `fi_info -p efa` lists a device."
    )


def _fix_of_google(text: str) -> str:
    if text.startswith("FastSocket"):
        return "Run `export NCCL_NET_PLUGIN=none` to use NCCL's own sockets, or update the plugin."
    return "Start the receive data-path manager (RxDM) on every host before the job, and read its log."


def _of_libfabric(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.ofi_failed"):
        networks = {group.value("net") for group in event_groups(job, "nccl.net.using", by=("net",))}
        fallen_back = not networks.isdisjoint(("Socket", "IB"))
        if networks and not fallen_back:
            continue  # the plugin found another provider and is in use
        yield finding_from_logs(
            group,
            f"NCCL cannot use its network plugin: {group.value('what2')}"
            if group.value("what2")
            else f"NCCL cannot use the EFA network plugin: {_reason(group.value('what') or '')}",
            severity=Severity.WARNING if fallen_back and spans_hosts(job) else Severity.INFO if fallen_back else None,
            confidence=0.85,
            effect=f"None on one host: NCCL uses its built-in {conjunction(sorted(filter(None, networks)))} transport."
            if fallen_back and not spans_hosts(job)
            else "",
            fix="export NCCL_NET_PLUGIN=none"
            if fallen_back and not spans_hosts(job)
            else _fix_of_google(group.value("what2") or "")
            if group.value("what2")
            else _fix_of_efa(group.value("what") or ""),
            symptoms=not fallen_back,
        )


@check(
    id="NET026",
    severity=Severity.ERROR,
    when="PM",
    needs=(NcclFacts,),
    from_logs=(_of_libfabric, _warnings_of_libfabric),
    impacts={
        r"^NCCL_NET=.* cannot be used|that NCCL_NET selects": (
            "NCCL fails with `Failed to initialize any NET plugin`, and the job ends at startup."
        ),
        r"could not initialize any network": "The job ends when NCCL starts.",
        r"no network plugin: NCCL uses sockets": _SOCKETS,
        # src/plugin/net.cc (src/net.cc before 2.28): the internal networks are IB, then Socket.
        r"needs v|cannot be loaded": (
            "NCCL silently uses its built-in IB transport if the host has RDMA ports, otherwise TCP sockets, which are "
            "often more than ten times slower."
        ),
        r"cannot use (?:the EFA|its) network plugin|plugin failed": (
            "NCCL fails when it starts, or falls back to TCP sockets, which are often more than ten times slower."
        ),
    },
    cases=lambda: (
        Passes("NCCL's own networks", healthy(hosts=2, per_host=2, rdma=2)),
        Passes("a plugin that fits", healthy(2, 2).alter(NcclFacts, plugins=_GOOD).environ(NCCL_NET="AWS Libfabric")),
        Passes("no plugin is wanted", healthy(2, 2).environ(NCCL_NET_PLUGIN="none", NCCL_TUNER_PLUGIN="none")),
        Passes("RDMA is asked for and there", healthy(2, 2, rdma=2).environ(NCCL_NET="IB")),
        Passes("EFA with its plugin", healthy(2, 2).put(_EFA).alter(NcclFacts, plugins=_GOOD)),
        Fails(
            "a plugin on one of two hosts",
            healthy(2, 1).alter(NcclFacts, ranks=(1,), plugins=_GOOD),
            ranks=(0,),
        ),
        Fails("the plugin's library is missing", healthy(2, 1).alter(NcclFacts, plugins=_GONE), ranks=(0, 1)),
        Fails(
            "the library is missing where NCCL's own network uses RDMA",
            healthy(2, 1, rdma=2).alter(NcclFacts, plugins=_GONE),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "a network of a plugin that is not installed",
            healthy(2, 1).environ(ranks=(1,), NCCL_NET="AWS Libfabric"),
            ranks=(1,),
        ),
        Fails("RDMA is asked for and not there", healthy(2, 1).environ(NCCL_NET="IB"), ranks=(0, 1)),
        Fails("a stale plugin is found first", healthy(2, 1).alter(NcclFacts, plugins=_STALE), ranks=(0, 1)),
        Fails(
            "the tuner is missing",
            healthy(2, 1).alter(NcclFacts, ranks=(0,), plugins=_TUNER),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "EFA whose device files are not in the container",
            healthy(2, 2).put(_SHUT_EFA).alter(NcclFacts, plugins=_GOOD),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "one host of two has the plugin and no EFA device",
            healthy(2, 1).put(_EFA, ranks=(0,)).alter(NcclFacts, plugins=_GOOD),
            ranks=(1,),
        ),
        Passes("no host has EFA, and the plugin is in the image", healthy(2, 1).alter(NcclFacts, plugins=_GOOD)),
        Passes("the same on one host", healthy(1, 2).put(_SHUT_EFA).alter(NcclFacts, plugins=_GOOD)),
        Fails(
            "EFA is asked for and not there",
            healthy(2, 2).alter(NcclFacts, plugins=_GOOD).environ(FI_PROVIDER="efa"),
            ranks=(0, 1, 2, 3),
        ),
        Passes(
            "another provider of libfabric",
            healthy(2, 2).alter(NcclFacts, plugins=_GOOD).environ(FI_PROVIDER="^efa"),
        ),
        Fails("EFA without its plugin", healthy(2, 2).put(_EFA), ranks=(0, 1, 2, 3)),
        Fails("EFA without its plugin on one host", healthy(1, 2).put(_EFA), ranks=(0, 1), severity=Severity.INFO),
        Passes(
            "no external plugin: NCCL has its own",
            logged(
                "node1:41:77 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No "
                "such file or directory No plugin found (libnccl-net.so), using internal implementation",
                "node1:41:77 [0] NCCL INFO Using network IB",
            ),
        ),
        Passes(
            "the plugin of EFA on one host without EFA",
            logged(
                "node1:41:77 [0] NCCL INFO NET/OFI No eligible providers were found",
                "node1:41:77 [0] NCCL INFO Using network Socket",
            ),
            silent=False,
        ),
    ),
)
def network_plugin_unfit(job: Job) -> Iterator[Verdict]:
    """Ask whether the configured network and tuner plugins of NCCL can be loaded.

    Why it hurts: with NCCL_NET, NCCL fails with `Failed to initialize any NET plugin`; with NCCL_NET_PLUGIN, a stale
    library, or EFA without its plugin, it silently uses TCP sockets, which are often more than ten times slower. A
    missing tuner plugin only disables its tuning.
    Fix: Run `unset NCCL_NET NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN`, or add the directory of the plugin to LD_LIBRARY_PATH.
    """
    found: list[Finding] = []
    for nccl, identical in job.each(NcclFacts, also=_ALSO):
        found += [*_missing(nccl, identical), *_stale(nccl, identical), *_network(job, nccl, identical)]
        found += _elastic_fabric(nccl, identical, job.is_multi_host)
        found += _absent_fabric(nccl, identical, job.is_multi_host)
    for finding in merge(found):
        yield finding.reworded(functools.partial(_named, hosts=job.hosts_of(finding.ranks)))
    yield from _on_some_ranks(job)
    yield from _fabric_on_some_ranks(job)


_HOSTS, _HAVE, _EACH = "{hosts}", "{have}", "{each}"
"""Replaced by the hosts of a finding and their verb when the findings of all hosts are merged."""


def _named(text: str, hosts: Sequence[str]) -> str:
    have, each = ("has", "") if len(hosts) == 1 else ("have", " each")
    return text.replace(_HOSTS, hosts_text(hosts)).replace(_HAVE, have).replace(_EACH, each)


_ALSO = (RdmaFacts, SoftwareFacts, GpuFacts, TrainerFacts, EnvironmentFacts)


def _on_some_ranks(job: Job) -> Iterator[Finding]:
    """Whether a plugin would carry data on some ranks, and NCCL's own network on the others."""
    present: list[int] = []
    absent: list[int] = []
    paths = set()
    for nccl, identical in job.each(NcclFacts, also=(RdmaFacts, SoftwareFacts, GpuFacts, TrainerFacts)):
        if nccl_matters(identical):
            plugin = loaded_net_plugin(nccl)
            (absent if plugin is None else present).extend(identical.ranks)
            paths |= {plugin.path} if plugin and plugin.path else set()
    if present and absent and job.is_multi_host:
        yield Finding(
            f"An NCCL network plugin was found on only {len(present)} of {len(present) + len(absent)} ranks "
            f"({_apart(present, absent)})",
            ranks=tuple(sorted(present if len(present) < len(absent) else absent)),
            evidence={"ranks_with": sorted(present)[:64], "ranks_without": sorted(absent)[:64], "paths": sorted(paths)},
            effect="Ranks that choose different networks cannot connect: the job hangs or fails when NCCL starts.",
            fix="Use one image on all hosts, or set `NCCL_NET_PLUGIN=none` on all ranks.",
        )


def _apart(present: Sequence[int], absent: Sequence[int]) -> str:
    """``not on rank 1``, or ``rank 0`` if fewer ranks have it than lack it."""
    lacking = len(absent) <= len(present)
    return f"not on {ranks_in_words(tuple(absent), 4)}" if lacking else ranks_in_words(tuple(present), 4)


def _fabric_on_some_ranks(job: Job) -> Iterator[Finding]:
    """Report ranks without an EFA device whose plugin is loaded on ranks with one; without one, it gives way to NCCL's
    own networks (`NET/OFI No eligible providers were found`)."""
    present: list[int] = []
    absent: list[int] = []
    for nccl, identical in job.each(NcclFacts, also=_ALSO):
        rdma, missing = identical.find(RdmaFacts), identical.missing(RdmaFacts)
        if not nccl_matters(identical) or loaded_net_plugin(nccl) is None:
            continue
        if rdma is None and (missing is None or missing.lack.value != "absent"):
            continue
        has_fabric = rdma is not None and any(device.driver == "efa" for device in rdma.devices)
        (present if has_fabric else absent).extend(identical.ranks)
    if present and absent and job.is_multi_host:
        yield Finding(
            f"EFA devices were found on only {len(present)} of {len(present) + len(absent)} ranks "
            f"({_apart(present, absent)})",
            ranks=tuple(sorted(absent)),
            evidence={"ranks_with": sorted(present)[:64], "ranks_without": sorted(absent)[:64]},
            effect="NCCL uses EFA on some ranks and sockets on the others: they cannot connect.",
            fix=f"Pass the EFA devices to the containers on {', '.join(job.hosts_of(absent)[:4])} with "
            "`--device=/dev/infiniband`, or replace hosts whose instance type has no EFA.",
        )


def _missing(nccl: NcclFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    for plugin in nccl.plugins:
        variable = VARIABLES.get(plugin.kind)
        if variable and plugin.error and (plugin.requested or plugin.path):
            # src/plugin/tuner.cc: initialization succeeds without a tuner. Google's profiles name one that does not
            # exist (UNUSED) to disable it.
            is_tuner = plugin.kind == "tuner"
            is_harmless = is_tuner or _has_own_network(nccl, identical)
            setting = nccl.setting(variable)
            name = setting_text(setting) if setting and plugin.requested else plugin.path or plugin.name
            yield Finding(
                f"{name} cannot be loaded: {plugin.error.partition(': ')[0] if plugin.requested else plugin.error}",
                ranks=identical.ranks,
                evidence={"error": plugin.error if plugin.requested and ": " in plugin.error else None},
                fix=f"Run `unset {variable}`, or add the directory of {plugin.name} to LD_LIBRARY_PATH."
                if is_harmless
                else f"Install {plugin.name}, or add its directory to LD_LIBRARY_PATH.",
                effect=_INTERNAL[plugin.kind] if is_harmless else "",
                severity=Severity.INFO if is_harmless else None,
                source=source_of(setting),
            )


_INTERNAL = {
    "tuner": "None: NCCL uses its built-in tuner, as with NCCL_TUNER_PLUGIN=none.",
    "net": "None: NCCL uses its built-in IB transport, as with NCCL_NET_PLUGIN=none.",
}


def _has_own_network(nccl: NcclFacts, identical: IdenticalRanks) -> bool:
    """Whether NCCL's own network uses RDMA here without the plugin (src/plugin/net.cc: a library that is not found
    leaves the internal networks). Oracle's settings for GB200 name a plugin that does not exist (sys) for that."""
    rdma = identical.find(RdmaFacts)
    if rdma is None or any(device.driver == "efa" for device in rdma.devices):
        return False
    return nccl.setting("NCCL_NET") is None and _why_no_rdma(nccl, identical) is None


def _stale(nccl: NcclFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    release = nccl_release(identical)
    for plugin in nccl.plugins:
        span = readable_interfaces(plugin.kind, release_of(release))
        if plugin.path is None or plugin.error or span is None or not plugin.symbols:
            continue
        pattern = _SYMBOLS[plugin.kind]
        offered = sorted(int(match[1]) for symbol in plugin.symbols if (match := pattern.search(symbol)))
        if not any(span[0] <= version <= span[1] for version in offered):
            has = ", ".join(f"v{version}" for version in offered) or "no plugin interface"
            # src/plugin/tuner.cc: initialization succeeds without a tuner.
            is_harmless = plugin.kind == "tuner" or _has_own_network(nccl, identical)
            yield Finding(
                f"{plugin.path} provides interface {has}, but NCCL {release} needs v{span[0]} to v{span[1]}",
                ranks=identical.ranks,
                evidence={"interfaces": list(plugin.symbols)},
                effect=_INTERNAL[plugin.kind] if is_harmless else "",
                severity=Severity.INFO if is_harmless else None,
                fix=f"Run `unset {VARIABLES[plugin.kind]}`, or install a plugin for NCCL {release}."
                if plugin.requested
                else f"Remove {plugin.path.rpartition('/')[0]} from LD_LIBRARY_PATH, or install a plugin for NCCL "
                f"{release} there.",
            )


def _network(job: Job, nccl: NcclFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report an NCCL_NET that NCCL cannot initialize; it must be IB, Socket or the name that a plugin declares."""
    setting = nccl.setting("NCCL_NET")
    name = setting.value.lower() if setting else ""
    if setting is None or name == "socket" or loaded_net_plugin(nccl) is not None:
        return
    why = _why_no_rdma(nccl, identical) if name == "ib" else f"no network plugin is found on {_HOSTS}"
    if why is not None:
        yield Finding(
            f"{setting_text(setting)} cannot be used: {why}",
            ranks=identical.ranks,
            evidence={"plugins": [plugin.name for plugin in nccl.plugins]},
            fix=_fix_of_network(job, setting),
            source=source_of(setting),
        )


def _fix_of_network(job: Job, setting: Setting) -> str:
    """How to fix an NCCL_NET that fails on some hosts: the plugin is missing there if others with the setting have it,
    otherwise all hosts do without."""
    name = setting.value.lower()
    remove = "Run `unset NCCL_NET`" if source_of(setting) is None else f"Remove NCCL_NET from {setting.source}"
    asking = [(nccl, same) for nccl, same in job.each(NcclFacts) if (nccl.get("NCCL_NET") or "").lower() == name]
    places = hosts_text(host for _, same in asking for host in same.hosts)
    plugin = "aws-ofi-nccl" if name == "aws libfabric" else f"the plugin that provides {setting.value}"
    if name != "ib" and any(loaded_net_plugin(nccl) is not None for nccl, _ in asking):
        return f"Install {plugin} on {_HOSTS}, or add its directory to LD_LIBRARY_PATH there."
    if name == "ib":
        return f"{remove} on {places}."
    return f"{remove} on {places}, or install {plugin} on all hosts."


def _why_no_rdma(nccl: NcclFacts, identical: IdenticalRanks) -> str | None:
    if parse_nccl_integer(nccl.get("NCCL_IB_DISABLE"), 0) != 0:
        return "NCCL_IB_DISABLE disables it"
    missing, rdma = identical.missing(RdmaFacts), identical.find(RdmaFacts)
    if missing is not None:
        return f"{_HOSTS} {_HAVE} no RDMA device" if missing.lack.value == "absent" else None
    if rdma is not None and rdma.verbs_library is False:
        return f"libibverbs is not installed on {_HOSTS}"
    return None if rdma is None or active_rdma_ports(rdma) else f"no RDMA port of {_HOSTS} is active"


def _elastic_fabric(nccl: NcclFacts, identical: IdenticalRanks, multi_host: bool) -> list[Finding]:
    """Report EFA devices without a network plugin; NCCL needs the plugin aws-ofi-nccl for libfabric."""
    rdma = identical.find(RdmaFacts)
    cards = [device for device in rdma.devices if device.driver == "efa"] if rdma else []
    devices = [device.name for device in cards]
    if not devices or not nccl_matters(identical) or (nccl.get("NCCL_NET") or "").lower() == "socket":
        return []
    if loaded_net_plugin(nccl) is not None:
        # The provider of libfabric opens them through libibverbs (prov/efa/src/efa_device.c).
        shut = all(device.has_uverbs is False for device in cards)
        return [_closed_fabric(devices, nccl, identical)] if shut and multi_host else []
    if any(plugin.requested for plugin in nccl.plugins):
        return []
    return [
        Finding(
            f"{_HOSTS} {_HAVE} {_counted(devices)}{_EACH}, but no network plugin: NCCL uses sockets",
            ranks=identical.ranks,
            effect="" if multi_host else "None while the job runs on one host.",
            severity=Severity.ERROR if multi_host else Severity.INFO,
            evidence={"devices": devices[:8]},
            # The EFA installer uses either directory, depending on its release and the distribution.
            fix="Install aws-ofi-nccl, then run:\nexport LD_LIBRARY_PATH="
            "/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:$LD_LIBRARY_PATH",
        )
    ]


def _absent_fabric(nccl: NcclFacts, identical: IdenticalRanks, multi_host: bool) -> Iterator[Finding]:
    """Report FI_PROVIDER=efa on a host without an EFA device: libfabric then offers no provider to the plugin."""
    environment, rdma = identical.find(EnvironmentFacts), identical.find(RdmaFacts)
    missing = identical.missing(RdmaFacts)
    wanted = (environment.get("FI_PROVIDER") if environment else None) or ""
    if "efa" not in wanted.split(",") or loaded_net_plugin(nccl) is None or not nccl_matters(identical):
        return
    if rdma is None and (missing is None or missing.lack.value != "absent"):
        return
    if rdma is None or not any(device.driver == "efa" for device in rdma.devices):
        yield Finding(
            f"FI_PROVIDER={wanted} is set, but {_HOSTS} {_HAVE} no EFA device",
            ranks=identical.ranks,
            severity=Severity.ERROR if multi_host else Severity.INFO,
            evidence={"RDMA devices": [device.name for device in rdma.devices[:8]] if rdma else "none"},
            effect=_effect_without_fabric(nccl, rdma),
            fix="Pass the EFA devices to the container with `--device=/dev/infiniband`, or, without EFA hardware, run "
            f"`unset FI_PROVIDER` on {_HOSTS}.",
        )


def _counted(devices: list[str]) -> str:
    return f"{len(devices)} EFA device{'s' if len(devices) > 1 else ''}"


def _effect_without_fabric(nccl: NcclFacts, rdma: RdmaFacts | None = None) -> str:
    """The impact of a plugin without a usable device: src/plugin/net.cc falls back, unless NCCL_NET names it."""
    setting = nccl.setting("NCCL_NET")
    if setting is None or setting.value.lower() in ("ib", "socket"):
        ports = nccl_rdma_ports(nccl, rdma) if rdma is not None and what_forces_sockets(nccl) is None else ()
        return "NCCL uses its built-in IB transport instead of the plugin." if ports else _SOCKETS
    return f"NCCL fails, because {setting_text(setting)} allows no other network, and the job ends at startup."


def _closed_fabric(devices: list[str], nccl: NcclFacts, identical: IdenticalRanks) -> Finding:
    return Finding(
        f"NCCL cannot open {_counted(devices)} on {_HOSTS}: "
        f"the device file{'s are' if len(devices) > 1 else ' is'} missing",
        ranks=identical.ranks,
        evidence={"devices": devices[:8], "missing": "/dev/infiniband/uverbs*"},
        effect=_effect_without_fabric(nccl),
        fix="Pass the EFA devices to the container with `--device=/dev/infiniband`.",
    )
