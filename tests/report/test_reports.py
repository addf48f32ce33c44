import io
import json
import re
import xml.etree.ElementTree as ET

import msgspec
import pytest

from doctor.api import Finding, Scope, Severity, Skip, Source, check
from doctor.core.check_registry import CheckRegistry
from doctor.core.report_document import ReportInput
from doctor.core.settings import IgnoreEntry, Settings
from doctor.core.text import byte_size, ranges
from doctor.facts import HostFacts, SoftwareFacts
from doctor.report.evidence_text import evidence_lines
from doctor.report.formatting import cell, some
from doctor.report.machine_formats import render_github, render_json, render_junit
from doctor.report.markdown import render_markdown
from doctor.report.narrative import commands
from doctor.report.terminal import draw_report, make_console
from doctor.session import judge
from doctor.testing import healthy


def finds(*findings, check_id="NET901", severity=Severity.ERROR):
    def faulty_thing(job):
        yield from findings

    return check(id=check_id, severity=severity, needs=(SoftwareFacts,))(faulty_thing)


def skips(reason):
    def quiet_thing(job):
        yield Skip(reason)

    return check(id="NET902", severity=Severity.ERROR, needs=(SoftwareFacts,))(quiet_thing)


def raises():
    def broken_thing(job):
        raise ValueError("oops")
        yield

    return check(id="NET903", severity=Severity.ERROR, scope=Scope.JOB, needs=(SoftwareFacts,))(broken_thing)


BAD = Finding(
    "eth9 is not there",
    ranks=(2, 3),
    evidence={"NCCL_SOCKET_IFNAME": "eth9", "free_bytes": 64 << 20, "interfaces": ["lo", "eth0"], "seen": None},
    effect="NCCL ends with `no socket interface found`.",
    fix="`export NCCL_SOCKET_IFNAME='=eth0'`",
)


def report_of(*checks, sketch=None, settings=None):
    return judge((sketch or healthy(hosts=2, per_host=2)).job(), CheckRegistry(checks), settings or Settings())


def text_of(report, width=100, **options):
    return draw_report(report, make_console(io.StringIO(), width=width), **options)


def test_a_finding_says_where_what_and_the_way_out():
    text = text_of(report_of(finds(BAD)))
    assert "✗ error   NET901 faulty-thing" in text
    assert "where    ranks 2-3 (node1)" in text
    assert "NCCL_SOCKET_IFNAME: eth9" in text
    assert "free: 64 MiB" in text
    assert "interfaces: lo, eth0" in text
    assert "seen:" not in text
    assert "fix      export NCCL_SOCKET_IFNAME='=eth0'" in text
    assert "doctor explain NET901" in text
    assert "Failed: 1 error" in text
    assert "Fix NET901 first" in text


def test_what_was_read_after_the_event_is_told_in_a_sentence_first():
    said = ["job.log:7: rank 2: NCCL WARN no socket interface found", "job.log:9: rank 3: " + "x" * 900 + " the end"]
    report = report_of(finds(Finding("eth9 is not there", ranks=(2, 3), evidence={"said": said}, fix="`unset X`")))
    report = msgspec.structs.replace(report, inputs=(ReportInput("job.log", "log"),))
    lines = text_of(report).splitlines()
    assert lines[2] == "Ranks 2-3 (node1): eth9 is not there."
    assert lines[3] == "NET901 faulty-thing, confidence very high (1)"
    assert lines[4] == "  job.log:7: rank 2: NCCL WARN no socket interface found"
    assert "fix: unset X" in lines
    assert "the end" in text_of(report)
    assert "x" * 300 not in "".join(text_of(report).split())
    assert "x" * 900 in "".join(text_of(report, verbose=True).split())
    assert max(map(len, text_of(report, width=60).splitlines())) <= 60


def test_a_report_of_now_tells_its_findings_at_once():
    assert "Ranks 2-3 (node1): eth9" not in text_of(report_of(finds(BAD)))


def test_what_is_fine_is_folded_unless_asked_for():
    report = report_of(finds(check_id="NET904"), skips("one host"))
    assert "1 pass, 1 skip" in text_of(report)
    assert "one host" not in text_of(report)
    assert "NET902 quiet-thing: one host" in text_of(report, verbose=True)


def test_quiet_begins_with_what_to_fix_first():
    info = finds(Finding("a note"), check_id="NET904", severity=Severity.INFO)
    warning = finds(Finding("a risk"), check_id="NET905", severity=Severity.WARNING)
    text = text_of(report_of(info, warning, finds(BAD)), quiet=True)
    assert re.findall("eth9 is not there|A risk|A note", text) == ["eth9 is not there", "A risk", "A note"]


def test_a_consequence_is_short_unless_all_is_asked_for():
    report = report_of(finds(BAD))
    (result,) = report.results
    followed = msgspec.structs.replace(result.findings[0], explained_by="NCCL001")
    report = msgspec.structs.replace(report, results=(msgspec.structs.replace(result, findings=(followed,)),))
    text = text_of(report)
    assert "caused by NCCL001" in text
    assert "64 MiB" not in text
    assert "export NCCL" not in text
    assert "64 MiB" in text_of(report, verbose=True)
    assert "export NCCL" in text_of(report, verbose=True)


def test_quiet_shows_findings_and_the_verdict_alone():
    text = text_of(report_of(finds(BAD), skips("one host")), quiet=True)
    assert text.startswith("✗ error   NET901")
    assert "skip" not in text.splitlines()[-2]
    assert text_of(report_of(skips("one host")), quiet=True).lstrip("\n").startswith("─")


def test_many_alike_are_counted():
    text = text_of(report_of(finds(*(Finding(f"bad {n}", ranks=(n % 4,)) for n in range(9)))))
    assert "bad 2" in text
    assert "bad 3" not in text
    assert "and 6 more findings of this check, ranks 0-3 (--verbose shows all)" in text
    assert "bad 8" in text_of(report_of(finds(*(Finding(f"bad {n}") for n in range(9)))), verbose=True)


def test_what_is_ignored_is_shown_with_its_reason():
    settings = Settings(ignore=(IgnoreEntry("NET901", "known", by="doctor.toml:3"),))
    text = text_of(report_of(finds(BAD), settings=settings))
    assert "- ignored NET901" in text
    assert "known (doctor.toml:3)" in text
    assert "No problems found (1 ignored)" in text


def test_a_crash_is_inconclusive():
    report = report_of(raises())
    assert (report.exit_code, report.verdict) == (3, "inconclusive")
    assert "ValueError: oops" in text_of(report)
    assert "NET903 failed to run" in text_of(report)


def test_one_process_is_named_by_its_host():
    report = report_of(finds(Finding("bad", ranks=(0,))), sketch=healthy(1, 1))
    assert "where    node0" in text_of(report)


@pytest.mark.parametrize("width", [30, 48, 72, 120])
def test_no_line_is_longer_than_the_terminal(width):
    text = text_of(report_of(finds(BAD), raises()), width=width, verbose=True)
    assert max(len(line) for line in text.splitlines() if "export" not in line) <= width


COMMANDS = (
    "sudo sed -i -E '/^127\\./s/[[:space:]]vm([[:space:]]|$)/ /; $a 192.0.2.2 vm' /etc/hosts",
    'export NCCL_SOCKET_IFNAME="$NCCL_SOKET_IFNAME"',
)


@pytest.mark.parametrize("width", [30, 60, 120])
@pytest.mark.parametrize("quiet", [True, False])
def test_commands_are_never_broken(width, quiet):
    """One a line, whole, with nothing glued to it: what is copied from a terminal or a pipe can be pasted."""
    block = Finding("bad", fix="Say it to the shell, for this job and for good:\n" + "\n".join(COMMANDS))
    bare = Finding("bad", fix=COMMANDS[0])
    for finding in (block, bare):
        lines = [line.strip() for line in text_of(report_of(finds(finding)), width=width, quiet=quiet).splitlines()]
        for command in COMMANDS if finding is block else COMMANDS[:1]:
            assert command in [line.removeprefix("fix").strip() for line in lines]
    assert commands(block.fix) == [*COMMANDS]
    inline = Finding("bad", fix=f"Do it by `{COMMANDS[0]}`, on all hosts, or by `{COMMANDS[1]}` on one; look again.")
    text = text_of(report_of(finds(inline)), width=width, quiet=quiet)
    assert all(command in text for command in COMMANDS)
    assert all(len(line) <= width for line in text.splitlines() if not any(one in line for one in COMMANDS))


def test_addresses_of_a_log_are_no_links_in_markdown():
    said = "see https://evil.example/x?y=1 or www.evil.example or mail a.b@evil.example &#60;b&#62; <http://x.example>"
    text = render_markdown(report_of(finds(Finding(said, effect=said, fix=said))))
    for line in text.splitlines():
        prose = re.sub(r"`[^`]*`", "", line)
        assert not re.search(r"https?://|www\.|@evil|&#60;", prose), line


def test_json_shows_no_control_to_a_terminal():
    nasty = "a\x1b[31m\x9b31m\u202e\u2066\x7fz"
    text = render_json(report_of(finds(Finding(nasty, evidence={nasty: nasty}))))
    assert not set(text) & set("\x1b\x9b\u202e\u2066\x7f")
    assert json.loads(text)["results"][0]["findings"][0]["summary"] == nasty


def test_json_holds_the_schema():
    document = json.loads(render_json(report_of(finds(BAD), skips("one host"))))
    assert list(document) == [
        *("schema", "tool", "started", "seconds", "exit_code", "verdict", "job", "coverage", "primary", "inputs"),
        "results",
    ]
    assert document["job"] == {
        "launcher": "torchrun",
        "world_size": 4,
        "hosts": [{"name": "node0", "ranks": [0, 1]}, {"name": "node1", "ranks": [2, 3]}],
        "absent": [],
    }
    assert document["coverage"] == {
        "checks": {"pass": 0, "fail": 1, "unknown": 0, "skip": 1, "error": 0},
        "ranks_seen": 4,
        "ranks_expected": 4,
    }
    faulty, skipped = document["results"]
    assert list(faulty) == [
        *("id", "name", "family", "status", "severity", "seen", "expected", "reason", "seconds", "findings"),
    ]
    assert list(faulty["findings"][0]) == [
        *("summary", "severity", "ignored", "ranks", "hosts", "evidence", "effect", "fix", "confidence"),
        *("explained_by", "source"),
    ]
    assert (skipped["status"], skipped["reason"]) == ("skip", "one host")


def test_junit_counts_and_survives_control_characters():
    nasty = Finding("bad\x00\x1b[31m <&> \ud800", effect="e", fix="f")
    info = Finding("good to know", severity=Severity.INFO)
    text = render_junit(report_of(finds(nasty), finds(info, check_id="NET904"), skips("one host"), raises()))
    (suite,) = ET.fromstring(text.encode("utf-8", "replace"))
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"}


def test_github_annotations_are_one_line_each():
    finding = Finding("100 % bad\nreally", effect="e", fix="f", source=Source("nccl.conf", 3))
    lines = render_github(report_of(finds(finding))).splitlines()
    assert len(lines) == 2
    assert "confidence: very high (1)" in lines[0]
    assert lines[0].startswith("::error file=nccl.conf,line=3,title=NET901 faulty-thing::100 %25 bad%0Areally%0A")


def test_markdown_escapes_its_table():
    page = render_markdown(report_of(finds(BAD), skips("a | b")))
    assert "| NET902 quiet-thing | skip | 4/4 | a \\| b |" in page
    assert "Most likely root cause: **NET901** faulty-thing" in page


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((5, 4, 4, 1), "1,4-5")])
def test_ranges(numbers, text):
    assert ranges(numbers) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (64 << 20, "64 MiB"), (80 << 30, "80 GiB")])
def test_byte_size(count, text):
    assert byte_size(count) == text


def test_evidence_in_words():
    assert evidence_lines({"ranks_elsewhere": [0, 1, 2], "held": True, "gpu": {"index": 1, "used_bytes": 1 << 30}}) == [
        "ranks elsewhere: 0-2",
        "held: yes",
        "GPU: index 1, used 1 GiB",
    ]
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"


def test_lines_that_were_read_take_a_line_each():
    assert evidence_lines({"said": ["a.log:1: x", "a.log:9: y"], "times": 3}) == [
        "a.log:1: x",
        "a.log:9: y",
        "matching log lines: 3",
    ]


def test_evidence_that_is_empty_takes_no_line_and_where_ranks_stand_takes_one_each():
    evidence = {"goes_with": [], "inner": "", "others": {}, "held": False, "count": 0, "known": None}
    assert evidence_lines(evidence) == ["held: no", "received count: 0"]
    assert evidence_lines({"where": {"0": "ended", "1": "training"}}) == ["rank 0: ended", "rank 1: training"]


def test_ranks_at_the_same_place_share_a_line():
    waits = "stalled; training, batch 4; waits in all_reduce at train.py:62"
    assert evidence_lines({"where": {"2": "stalled; is at train.py:58", "0": waits, "1": waits, "3": waits}}) == [
        "rank 2: stalled; is at train.py:58",
        "ranks 0-1, 3: stalled; training, batch 4; wait in all_reduce at train.py:62",
    ]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("NCCL_SOCKET_IFNAME", None, "NCCL_SOCKET_IFNAME: not set"),
        ("set", {"RANK": "0", "MASTER_ADDR": None}, "set: RANK=0, MASTER_ADDR not set"),
        ("missing", ["/dev/infiniband"], "missing: /dev/infiniband"),
        ("checksums", {"c": [0, 1, 3], "z": [2]}, "checksums: c (ranks 0-1, 3), z (rank 2)"),
        (
            "by_rank",
            {"0": {"limit_bytes": 1 << 30}, "1": {"limit_bytes": 1 << 30}, "2": {"limit_bytes": 1 << 31}},
            "by rank: ranks 0-1 (limit 1 GiB); rank 2 (limit 2 GiB)",
        ),
        ("elsewhere", {"torch": "2.8.0", "CUDA": "12.8"}, "other ranks: PyTorch 2.8.0, CUDA 12.8"),
        (
            "ranks_by_subnet",
            {"10.0.0.0/8": 2, "10.1.0.0/16": 1},
            "ranks by subnet: 10.0.0.0/8 (2 ranks), 10.1.0.0/16 (1 rank)",
        ),
        ("memory_bytes_by_rank", {"1": 9 << 30}, "memory by rank: rank 1: 9 GiB"),
        ("numa_node_by_gpu", {"0": 0, "1": 1}, "NUMA node by GPU: GPU 0: 0, GPU 1: 1"),
        (
            "reserved",
            {"bytes": 60 << 30, "peers_median_bytes": 30 << 30},
            "reserved: these ranks: 60 GiB, median of the others: 30 GiB",
        ),
        ("claims", [{"host": "a", "rank": 0}, {"host": "b", "rank": 0}], "processes: host a, rank 0; host b, rank 0"),
        (
            "by_rank",
            {"3": {"own": 0.06, "count": 0.0499999}},
            "by rank: rank 3 (these ranks: 0.06, received count: 0.05)",
        ),
        (
            "seconds_a_step_by_rank",
            {"3": {"own": 0.19, "excess": 0.09, "others_wait": 0.08, "step": 0.4}},
            "time in this phase per step: rank 3 (190 ms, 90 ms more than its peers)",
        ),
        ("said_by_rank", {"0": "a", "1": "b", "4": "a"}, "errors by rank: ranks 0, 4: a; rank 1: b"),
        ("throttled_share", {"node1": 0.25}, "share of throttled periods: node1 25%"),
        ("contents_alike", 1.0, "identical tensors in the first batches: 100%"),
        ("device", "0000:0f:00", "PCI address: 0000:0f:00"),
        ("device", 3, "device: 3"),
        ("part", "17", "compared parameters: part 17 of the tensors"),
        ("source", "NCCL_CONF_FILE", "set in: NCCL_CONF_FILE"),
        ("left", {"expected": 3222.4, "low": 3000.0, "high": 4000.0}, "left: 3222 (3000 to 4000)"),
        ("bytes_a_batch", {"median": 1 << 21, "low": 1 << 21, "high": 1 << 21}, "growth: 2 MiB per batch"),
        ("step_seconds", 0.4, "step time: 400 ms"),
        ("timeout_seconds", 1800, "timeout: 1800 s"),
        ("seconds_waited", 7200.0, "time waited: 2 h"),
        ("age_seconds", 600_000.0, "age: 6.94 days"),
        ("offset_seconds", {"node2": 37.0}, "clock offset: node2 37 s"),
        (
            "recovery_errors_by_link",
            {"0": 2, "10": 2, "1": 2, "3": 5},
            "recovery errors by link: 2 on links 0-1,10, 5 on link 3",
        ),
        ("gpus", [1], "GPU: 1"),
        ("missing", [1, 2], "missing ranks: 1-2"),
        ("missing", "/dev/kfd", "missing: /dev/kfd"),
        ("absent", 2, "number of missing ranks: 2"),
        ("absent", ["0000:11:00.0"], "missing: 0000:11:00.0"),
        ("limit_microseconds", 50, "limit: 50 µs"),
        ("busy_percent_by_rank", {"0": 23.5}, "busy by rank: rank 0: 23.5%"),
        ("power_limit_milliwatts", 700_000, "power limit: 700 W"),
        ("clock_mhz", 345, "clock: 345 MHz"),
        ("places", {"rank 1": "a.py:5", "ranks 0, 2": "a.py:4"}, "call sites: rank 1: a.py:5; ranks 0, 2: a.py:4"),
    ],
)
def test_evidence_of_mappings_and_numbers_in_words(name, value, line):
    assert evidence_lines({name: value}) == [line]


def test_values_of_the_finding_are_named_by_its_ranks():
    evidence = {"own": {"CUDA": "12.6"}, "class": {"here": "A", "elsewhere": "B"}, "MASTER_ADDR": "localhost"}
    assert evidence_lines({**evidence, "elsewhere": ["node0"]}, (2, 3)) == [
        "ranks 2-3: CUDA 12.6",
        "class: ranks 2-3: A, other ranks: B",
        "MASTER_ADDR: localhost",
        "MASTER_ADDR on other ranks: node0",
    ]
    assert evidence_lines({"class": {"here": "A"}, "here_ranks": [1]}, (0, 1)) == ["class: rank 1: A"]


def test_evidence_that_is_not_known_takes_no_line():
    assert evidence_lines({"error": None, "seeds": {"0": None, "1": None}}) == []


NASTY = "bad\x1b[2J\x9b31m\u202e\r\n## heading <script> | [bold red]x[/] ::error::x"


def nasty():
    return Finding(
        NASTY,
        hosts=(NASTY,),
        evidence={NASTY: NASTY, "list": [NASTY], "map": {NASTY: None}},
        effect=NASTY,
        fix=f"```\n{NASTY}",
        source=Source(NASTY, 3),
    )


@pytest.mark.parametrize("render", [render_markdown, render_junit, render_github, text_of])
def test_nothing_that_was_read_steers_a_terminal(render):
    text = render(report_of(finds(nasty()), skips(NASTY), sketch=healthy(2, 2).alter(HostFacts, hostname=NASTY)))
    assert not [
        sign for sign in text if (sign < " " and sign not in "\n\t") or "\x7f" <= sign <= "\x9f" or sign == "\u202e"
    ]
    assert "\\x1b[2J" in text
    assert "[bold red]x[/]" in text


def test_a_cell_that_ends_in_a_backslash_stays_a_cell():
    assert cell("a\\|b\nc") == "a\\\\\\|b c"


def test_github_commands_are_only_ours():
    lines = render_github(report_of(finds(nasty()))).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::error", "rankdoctor:"]


def test_a_crash_after_a_finding_is_shown_by_all():
    def breaks(job):
        yield Finding("bad")
        raise ValueError("oops")

    report = report_of(check(id="NET905", severity=Severity.WARNING, needs=(SoftwareFacts,))(breaks))
    assert report.verdict == "inconclusive"
    for render in (text_of, render_json, render_markdown, render_github):
        assert "ValueError: oops" in render(report)
    assert "NET905 failed to run" in text_of(report)
