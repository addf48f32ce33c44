"""NET015: packets are lost between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.analysis.fabric.packet_loss import PacketLoss, lossy_parts
from doctor.analysis.fabric.sent_samples import sent_samples
from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import HostUseFacts, InterfaceFacts, PathFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, running
from doctor.testing.host_transfers import between, received_by, touching, transferred
from doctor_checks._trial_conclusions import with_trials


def _fix_of(host: str) -> str:
    return (
        f"Check the NIC, cable and switch port of {host} for errors and drops (`ip -s link` shows those of the host), "
        "and the switches on its paths for congestion."
    )


def _fix_of_errors(host: str) -> str:
    return (
        f"Check the cable, transceiver and switch port of {host} (`ip -s link` shows the error counters), and replace "
        "the faulty part."
    )


def _counted(sent: int, again: int, errors: int = 0) -> PathFacts:
    return PathFacts(segments_sent=sent, segments_retransmitted=again, interface_errors=errors)


def _in_run(sent: int, again: int, hosts: int = 2, **errors: int) -> JobBuilder:
    """A running job whose last host counted these segments in ten minutes; ``errors`` by interface."""
    counted = HostUseFacts(
        seconds=600.0, segments=sent, retransmitted=again, interface_errors=tuple(sorted(errors.items()))
    )
    return running(hosts, 2).put(counted, hosts=(f"node{hosts - 1}",))


@check(
    id="NET015",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PR",
    needs=(PathFacts,),
    or_needs=(HostUseFacts,),
    cases=lambda: (
        Passes("not measured", healthy(hosts=2, per_host=1)),
        Passes("a handful of retransmissions", healthy(2, 1).put(_counted(200_000, 40))),
        Passes("too few segments to decide", healthy(2, 1).put(_counted(120, 6))),
        Fails(
            "one host in fifty segments sends again",
            healthy(2, 2).put(_counted(200_000, 10)).put(_counted(200_000, 4_000), hosts=("node1",)),
            ranks=(2, 3),
        ),
        Fails(
            "a bad cable",
            healthy(2, 1).put(_counted(200_000, 10)).put(_counted(200_000, 10, errors=900), hosts=("node0",)),
            ranks=(0,),
        ),
        Passes("bandwidth between hosts, without a loss", transferred(6)),
        Passes("a slow host whose queue overflows", transferred(6, touching(3), lossy=touching(3), queued=True)),
        Fails("one host loses in all transfers", transferred(6, lossy=touching(3)), ranks=(3,)),
        Fails("one host of three loses", transferred(3, touching(1), lossy=touching(1), share=0.05), ranks=(1,)),
        Fails("one host loses what it receives", transferred(6, lossy=received_by(3)), ranks=(3,)),
        Fails("packets between two hosts get lost", transferred(6, lossy=between(1, 2)), ranks=(1, 2)),
        Passes(
            "packets between two hosts get lost that have no processor", transferred(6, lossy=between(1, 2), waited=0.8)
        ),
        Fails(
            "one host loses in all transfers, and is busy", transferred(6, lossy=touching(3), waited=0.8), ranks=(3,)
        ),
        Fails("packets between all hosts get lost", transferred(4, lossy=lambda *way: True), ranks=(0, 1, 2, 3)),
        Passes("a run that loses next to nothing", _in_run(5_000_000, 900, eth0=3)),
        Passes("a run on one host", _in_run(5_000_000, 400_000, hosts=1)),
        Passes("a run that sends little over TCP", _in_run(700, 90)),
        Passes("drops of an interface that carries nothing of the job", _in_run(5_000_000, 900, docker0=90_000)),
        Passes("frames that no program asked for", _in_run(2_000_000, 100, eth0=700)),
        Passes("half a per cent", _in_run(2_000_000, 10_000)),
        Fails("a run that sends one segment in forty again", _in_run(2_000_000, 50_000), ranks=(2, 3)),
        Fails(
            "an interface that drops what it receives in a run",
            _in_run(2_000_000, 100, eth0=40_000).alter(
                HostUseFacts, hosts=("node1",), receive_drops=(("eth0", 39_000),)
            ),
            ranks=(2, 3),
        ),
        Fails("an interface that counts errors in a run", _in_run(2_000_000, 100, eth0=40_000), ranks=(2, 3)),
    ),
)
def path_lossy(
    job: Job,
    *,
    retransmitted_share: float = 0.01,
    error_share: float = 1e-4,
    least_segments: float = 1000,
    least_run_segments: float = 10_000,
    least_errors_a_second: float = 5,
) -> Iterator[Verdict]:
    """Ask whether packets between the hosts are lost.

    Why it hurts: some steps may take several times as long, because TCP slows down after each loss and each collective
    waits for its slowest connection.
    Fix: Check the NIC, cable and switch port of the host for errors and drops (`ip -s link` shows those of the host),
    and the switches on its paths for congestion.
    """
    # During a run rankdoctor sends no packets itself, so other traffic of the host must not count. An interface also
    # drops frames that no program requested (LLDP, spanning tree, foreign VLANs), about one per second.
    yield from _judge_run(job, retransmitted_share, error_share, least_errors_a_second, least_run_segments)
    ranks = {local.name: local.ranks for local in job.by_host()}
    for lossy in lossy_parts(job, share=retransmitted_share, least=least_segments):
        own = [rank for host in lossy.hosts for rank in ranks.get(host, ())]
        blamed = {"exclude": list(lossy.hosts)} if lossy.end in ("host", "sending", "receiving") else {}
        finding = Finding(
            f"{_losing(lossy)}: {lossy.share:.1%} of TCP segments retransmitted ({lossy.again:,} of {lossy.sent:,})",
            ranks=tuple(sorted(own)),
            evidence={
                "segments_sent": lossy.sent,
                "segments_retransmitted": lossy.again,
                "lossy transfers": f"{len(lossy.ways)} of {lossy.of}",
                "transfers": list(lossy.ways[:8]),
                **blamed,
            },
            fix=_fix(lossy),
            explains=("NET014", "NET027"),
        )
        yield with_trials(job, finding, "path", otherwise=finding.fix)
    most = max((sample.segments_sent or 0 for _, sample in sent_samples(job)), default=0)
    probed = False
    for paths, identical in job.each(PathFacts):
        probed = True
        most = max(most, paths.segments_sent or 0)
        if paths.segments_sent is None and paths.interface_errors is None:
            note = paths.why_hidden("segments_sent")
            yield Unknown(note.reason if note else "the TCP and interface counters are not visible", identical.ranks)
            continue
        sent, again = paths.segments_sent or 0, paths.segments_retransmitted or 0
        if sent >= least_segments and again / sent > retransmitted_share:
            share = f"{again / sent:.1%} of its TCP segments ({again:,} of {sent:,})"
            text = f"{', '.join(identical.hosts)} retransmitted {share}"
            fix = _fix_of(", ".join(identical.hosts))
            yield Finding(text, ranks=identical.ranks, evidence=_evidence(paths), fix=fix)
        if (paths.interface_errors or 0) > error_share * max(paths.segments_sent or 0, least_segments):
            errors = f"{paths.interface_errors:,} interface errors"
            text = f"{', '.join(identical.hosts)} counted {errors} during the measurement"
            fix = _fix_of_errors(", ".join(identical.hosts))
            effect = _effect(again / sent) if sent else ""
            yield Finding(text, ranks=identical.ranks, evidence=_evidence(paths), fix=fix, effect=effect)
    if most < least_segments and (probed or not any(rank.find(HostUseFacts) for rank in job.ranks)):
        yield Skip(f"at most {most:,} packets were sent, too few to measure the loss")


def _losing(lossy: PacketLoss) -> str:
    first, *others = lossy.hosts
    return {
        "host": f"Packets to and from {first} are lost",
        "sending": f"Packets from {first} are lost",
        "receiving": f"Packets to {first} are lost",
        "link": f"Packets between {first} and {', '.join(others)} are lost",
        "all": f"Packets between all {len(lossy.hosts)} hosts are lost",
    }[lossy.end]


def _fix(lossy: PacketLoss) -> str:
    first, *others = lossy.hosts
    if lossy.end == "all":
        return "Check the switches between the hosts for dropped packets and congestion."
    if lossy.end == "link":
        return f"Check the ports and cables between the switches of {first} and {', '.join(others)}."
    return _fix_of(first)


def _judge_run(job: Job, share: float, error_share: float, errors_a_second: float, least: float) -> Iterator[Verdict]:
    watched = [
        (local, use) for local in job.by_host() if (use := local.find(HostUseFacts)) and use.segments is not None
    ]
    if watched and not job.is_multi_host:
        yield Skip("one host: the job uses no network")
        return
    busy = [(local, use) for local, use in watched if (use.segments or 0) >= least]
    if watched and not busy:
        yield Skip("too few TCP segments were sent so far")
    for local, use in busy:
        sent, again = use.segments or 1, use.retransmitted or 0
        errors = {name: count for name, count in use.interface_errors if _carries(local, name)}
        if again / sent > share:
            counts = f"({again:,} of {sent:,})"
            text = f"{local.name} retransmitted {again / sent:.1%} of its TCP segments during this run {counts}"
            yield _finding_of_run(local, use, text, errors)
        elif sum(errors.values()) > max(error_share * (use.segments or 0), errors_a_second * use.seconds):
            names = ", ".join(errors)
            text = f"{names} of {local.name} counted {sum(errors.values()):,} errors or drops during this run"
            yield _finding_of_run(local, use, text, errors)


def _carries(local: LocalRanks, name: str) -> bool:
    """Whether the interface is hardware with an address; drops on bridges and virtual ones do not affect the job."""
    facts = local.find(InterfaceFacts)
    known = next((one for one in facts.interfaces if one.name == name), None) if facts else None
    return known is not None and known.kind != "loopback" and known.physical is not False and bool(known.addresses)


def _finding_of_run(local: LocalRanks, use: HostUseFacts, text: str, errors: dict[str, int]) -> Finding:
    return Finding(
        text,
        ranks=local.ranks,
        evidence={
            "segments_sent": use.segments,
            "segments_retransmitted": use.retransmitted,
            "interface_errors": errors,
            "receive_drops": dict(use.receive_drops) or None,
            "seconds": use.seconds,
        },
        effect=_effect((use.retransmitted or 0) / (use.segments or 1)),
        fix=_fix_of_counters(local.name, use, errors) if errors else _fix_of(local.name),
        explains=("RUN013",),
    )


def _effect(retransmitted: float, least: float = 0.01) -> str:
    """Empty, for the impact of the check, if TCP is slowed down considerably."""
    if retransmitted >= least:
        return ""
    return (
        f"Steps are hardly slower so far, because only {100 * retransmitted:.2g}% of the TCP segments were "
        "retransmitted; if the errors increase, TCP slows down after each loss."
    )


def _fix_of_counters(host: str, use: HostUseFacts, errors: Mapping[str, int]) -> str:
    """Packets that the host drops lack space in its receive ring; others are damaged on the link."""
    name, count = max(errors.items(), key=lambda item: item[1])
    drops = dict(use.receive_drops).get(name)
    if drops is not None and 2 * drops > count:
        return (
            f"Enlarge the receive ring of {name} on {host} with `sudo ethtool -G {name} rx N`, where N is the maximum "
            f"that `ethtool -g {name}` shows."
        )
    return (
        f"Check the error counters on {host} with `ethtool -S {name} | grep -iE 'err|drop|crc'`, then replace the "
        "cable, transceiver or port."
    )


def _evidence(paths: PathFacts) -> dict[str, object]:
    return {
        "segments_sent": paths.segments_sent,
        "segments_retransmitted": paths.segments_retransmitted,
        "interface_errors": paths.interface_errors,
    }
