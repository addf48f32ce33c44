"""The page for an issue, as a forge reads it: its shape, its size, and nothing in it that a log wrote as markup."""

import html.parser
import re

import msgspec
import pytest
from markdown_it import MarkdownIt

from doctor.api import Finding, Severity, check
from doctor.core.check_registry import CheckRegistry
from doctor.core.report_document import ReportInput
from doctor.core.settings import Settings
from doctor.facts import SoftwareFacts
from doctor.report.formatting import cell, line_of
from doctor.report.markdown import MOST, render_markdown
from doctor.session import examine, judge
from doctor.testing import healthy
from tests.lab.cases import each_case
from tests.report.pages import HOSTILE, logged_job, stalled_job

OURS = {"details", "summary"}


class Elements(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements(markdown):
    """What a forge makes of it: the elements of the page, HTML within Markdown taken as it is."""
    return Elements(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)).found


def report_of(*findings):
    def faulty_thing(job):
        yield from findings

    made = check(id="NET901", severity=Severity.ERROR, needs=(SoftwareFacts,))(faulty_thing)
    return judge(healthy(2, 2).job(), CheckRegistry([made]), Settings())


def test_the_verdict_and_the_way_out_stand_before_the_fold():
    job = logged_job(hostile="")
    before, _, folded = render_markdown(examine(job), job).partition("<details>")
    assert "NCCL found no network interface" in before
    assert "**NET007** interface-unmatched" in before
    assert "job.log:1:" in before
    assert "confidence very high (0.9" in before
    assert "unset NCCL_SOCKET_IFNAME" in before
    assert "| rank |" in folded
    assert "no such evidence" in folded
    assert len(before) < 3000


def test_folds_are_closed_and_their_tables_are_tables():
    job = stalled_job()
    text = render_markdown(examine(job), job)
    found = [tag for tag, _ in elements(text)]
    assert found.count("details") == text.count("</details>") >= 3
    assert found.count("table") == 4  # checks, ranks, lost time by cause and by rank
    assert found.count("tr") > 8


def hostile_reports():
    nasty = Finding(
        HOSTILE, hosts=(HOSTILE,), evidence={"said": [HOSTILE], HOSTILE: HOSTILE}, effect=HOSTILE, fix=HOSTILE
    )
    job = logged_job()
    inputs = (ReportInput(HOSTILE, HOSTILE, HOSTILE),)
    for report in (report_of(nasty, nasty), examine(job)):
        yield render_markdown(msgspec.structs.replace(report, inputs=inputs), job)


@pytest.mark.parametrize("text", list(hostile_reports()), ids=["finding", "log"])
def test_nothing_that_was_read_is_markup(text):
    found = elements(text)
    tags = {tag for tag, _ in found}
    assert not tags & {"script", "img", "b", "a"}
    assert not [attrs for _, attrs in found if any(name.startswith("on") for name in attrs)]
    assert "onerror" in text
    assert "@somebody" not in re.sub(r"^(`{3,})text$.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


@each_case(
    "text",
    [
        "`` <b> `",
        "\\`a <b> `",
        "`a` <b> ``c <b>` d",
        "[x](http://example.com)",
        "![x](http://example.com)",
        "[x]: http://example.com",
        "<http://example.com>",
        "*a* **b** ***",
        "` <b>",
        "a\\",
        "```\n<b>",
        "&lt;b&gt; <b",
    ],
)
def test_prose_holds_no_markup(text):
    for made in (line_of(text), f"- x: {line_of(text)}", f"| a |\n| --- |\n| {cell(text)} |"):
        assert not {tag for tag, _ in elements(made)} & {"b", "a", "img", "em", "strong", "h1", "hr", "script"}


@pytest.mark.parametrize("text", ["a | b", "`a | b`", "a\\", "a\\|b", "`a\\|b`", "`a\\` | b", "|", "\\\\|"])
def test_a_cell_is_one_cell(text):
    made = f"| x | y |\n| --- | --- |\n| {cell(text)} | end |"
    rendered = MarkdownIt("commonmark").enable("table").render(made)
    assert re.findall("<td>(.*)</td>", rendered)[1:] == ["end"]


def test_code_keeps_its_brackets():
    assert line_of("run `ip link show <name>` on <node>") == "run `ip link show <name>` on &lt;node>"


def test_nobody_is_called_by_name():
    assert line_of("by @somebody, me@host") == "by @\u200bsomebody, me@host"


def test_no_fence_is_closed_from_within():
    text = render_markdown(
        report_of(Finding("bad", evidence={"said": ["a.log:1: ```` <b>x</b>"]}, effect="e", fix="f"))
    )
    assert "`````text\na.log:1: ```` <b>x</b>\n`````" in text


def test_it_fits_into_a_comment_and_says_what_is_left_out():
    said = [f"job.log:{number}: {'long ' * 120}" for number in range(12)]
    findings = [Finding(f"thing {number}", ranks=(number % 4,), evidence={"said": said}) for number in range(300)]
    text = render_markdown(report_of(*findings))
    assert 20_000 < len(text) <= MOST + 1000
    assert "more are not shown; the HTML and JSON reports list all of them." in text
    assert text.count("<details>") == text.count("</details>")
    job = healthy(512, 8).job()
    text = render_markdown(examine(job), job)
    assert len(text) <= MOST + 1000
    assert "| 0 | node0 |" in text
