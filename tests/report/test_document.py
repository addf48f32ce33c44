import base64
import hashlib
import html
import html.parser
import itertools
import re

import msgspec
import pytest

from doctor.api import Finding, Severity, check
from doctor.core.check_registry import CheckRegistry
from doctor.core.report_document import ReportInput
from doctor.core.settings import IgnoreEntry, Settings
from doctor.facts import HostFacts, ProgressFacts, SoftwareFacts
from doctor.report.html.document import render_html
from doctor.report.html.rank_groups import rank_groups
from doctor.report.rank_table import rank_rows, used_columns
from doctor.session import examine, judge
from doctor.testing import healthy, running
from tests.lab.command import run_doctor
from tests.report.pages import HOSTILE, logged_job, stalled_job

VOID = {"meta", "link", "input", "br", "img", "hr", "meter"}


class Page(html.parser.HTMLParser):
    """A page as a parser sees it: its elements, whether they are closed in order, and the text of each kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        self.texts.setdefault(tag, []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def page_of(job, *, inputs=(), settings=None):
    report = examine(job, settings)
    return render_html(msgspec.structs.replace(report, inputs=inputs), job)


def report_of(*findings, check_id="NET901"):
    def faulty_thing(job):
        yield from findings

    made = check(id=check_id, severity=Severity.ERROR, needs=(SoftwareFacts,))(faulty_thing)
    return judge(healthy(2, 2).job(), CheckRegistry([made]), Settings())


def shown(text):
    """The text of a page outside of scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def stalled_page():
    return page_of(stalled_job())


def test_a_page_is_well_formed_and_its_parts_are_named(stalled_page):
    page = Page(stalled_page)
    assert page.open == []
    assert [len(page.all(tag)) for tag in ("main", "header", "footer", "h1")] == [1, 1, 1, 1]
    assert stalled_page.partition("<body>")[0].count("<title>") == 1  # those below are of shapes
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    pointed = [attrs[name] for _, attrs in page.elements for name in ("aria-labelledby", "for") if name in attrs]
    pointed += [attrs["href"][1:] for attrs in page.all("a") if attrs["href"].startswith("#")]
    assert set(pointed) <= set(ids)
    assert all("scope" in attrs for attrs in page.all("th"))
    ours, _, _ = shown(stalled_page).partition('<section id="playbook"')
    assert all("<caption" in table for table in re.findall(r"<table.*?</table>", ours, flags=re.DOTALL))


def test_the_verdict_stands_first(stalled_page):
    words = shown(stalled_page).partition("<main>")[2]
    order = (
        "Rank 2 on node0",
        "Fix",
        "Timeline",
        "Ranks",
        "Checks</h2>",
        "Playbook</h2>",
    )
    assert [words.index(word) for word in order] == sorted(words.index(word) for word in order)
    assert "very high (0.9)" in words
    assert 'id="playbook-RUN001"' in words
    assert "py-spy dump" in words


def test_headings_leave_out_no_level(stalled_page):
    levels = [int(tag[1]) for tag, _ in Page(stalled_page).elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_chart_has_a_table_that_says_the_same(stalled_page):
    words = shown(stalled_page)
    for chart in ("timeline", "memory", "pairs"):
        section = re.search(rf'<section id="{chart}".*?</section>', words, flags=re.DOTALL)[0]
        assert 'role="img" aria-label=' in section
        assert "<svg" in section
        assert "<table" in section
    assert "stalled for 12 s: training, step" in words


def test_the_page_may_run_its_own_scripts_and_reach_nothing(stalled_page):
    page = Page(stalled_page)
    (policy,) = [attrs["content"] for attrs in page.all("meta") if "Content-Security-Policy" in attrs.values()]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    bodies = re.findall(r"<script>(.*?)</script>", stalled_page, flags=re.DOTALL)
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies}
    assert digests == set(rules["script-src"].split())
    assert not [
        attrs for tag, attrs in page.elements if "src" in attrs or (tag == "link" and attrs["href"] != "data:,")
    ]
    assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]


def test_a_healthy_page_says_what_was_checked():
    page = page_of(healthy(2, 2).job())
    assert len(page) < 100_000
    assert re.search(r"No problems found \(\d+ of \d+ checks applied\)\.", page)


def test_the_navigation_has_every_section(stalled_page):
    nav = re.search(r'<nav class="sections".*?</nav>', stalled_page, flags=re.DOTALL)[0]
    linked = re.findall(r'href="#([\w-]+)">([^<]+)<', nav)
    sections = re.findall(r'<section id="([\w-]+)"', stalled_page)
    assert [target for target, _ in linked] == sections
    assert ("timeline", "Timeline") in linked
    assert all(title.strip() for _, title in linked)


def test_a_page_on_code_shows_the_line_and_marks_the_part(tmp_path):
    script = "import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
    (tmp_path / "train.py").write_text(f"{script}if dist.get_rank() == 0:\n    dist.barrier()  # <b>&amp;\n")
    done = run_doctor("lint", "train.py", "--select", "CODE005", "--format", "html", cwd=tmp_path)
    assert done.returncode == 1
    excerpt = re.search(r'<pre class="excerpt"[^>]*>(.*?)</pre>', done.stdout, flags=re.DOTALL)[1]
    code, marked = html.unescape(re.sub(r"</?(?:span|strong)\b[^>]*>", "", excerpt)).splitlines()
    assert code == "     5 |     dist.barrier()  # <b>&amp;"
    assert code[marked.index("^") : marked.rindex("^") + 1] == "dist.barrier()"
    assert "end column" not in done.stdout


def test_a_notebook_shows_a_report_without_scripts_of_its_own():
    nasty = Finding(HOSTILE, hosts=(HOSTILE,), evidence={"said": [HOSTILE]}, effect=HOSTILE, fix=HOSTILE)
    text = report_of(nasty)._repr_html_()
    frame = Page(text)
    assert [tag for tag, _ in frame.elements] == ["iframe"]
    (attributes,) = frame.all("iframe")
    assert attributes["sandbox"] == "allow-scripts"
    inner = Page(attributes["srcdoc"])
    assert inner.open == []
    assert inner.all("img") == []
    assert "Content-Security-Policy" in attributes["srcdoc"]


def test_a_report_alone_is_told_as_far_as_it_goes():
    page = render_html(report_of(Finding("eth9 is not there", ranks=(2, 3))))
    assert "Ranks 2-3 (node1): eth9 is not there." in page
    assert Page(page).open == []


@pytest.mark.parametrize(
    "job", [logged_job(), healthy(2, 2).alter(HostFacts, hostname=HOSTILE).job()], ids=["log", "host"]
)
def test_nothing_that_was_read_is_rendered(job):
    text = page_of(job, inputs=(ReportInput(HOSTILE, "unknown", HOSTILE),))
    page = Page(text)
    assert page.open == []
    assert page.all("img") == []
    assert not [body for body in page.texts["script"] if "owned" in body and not body.lstrip().startswith("{")]
    assert "&lt;script&gt;" in text
    assert "{{7*7}}" in text
    assert not [sign for sign in text if (sign < " " and sign != "\n") or "\x7f" <= sign <= "\x9f" or sign == "\u202e"]


def test_findings_of_a_plugin_are_text():
    nasty = Finding(
        HOSTILE, hosts=(HOSTILE,), evidence={"said": [HOSTILE], HOSTILE: HOSTILE}, effect=HOSTILE, fix=HOSTILE
    )
    page = Page(render_html(report_of(nasty)))
    assert page.open == []
    assert page.all("img") == []
    assert page.all("b") == []


def test_names_of_hosts_in_charts_are_text():
    job = stalled_job(2, 2)
    job.ranks[0].host.name = HOSTILE
    page = Page(page_of(job))
    assert page.open == []
    assert page.all("img") == []
    assert len(page.all("script")) == 1


@pytest.mark.parametrize("hosts", [1, 8, 16, 128])
def test_a_page_with_charts_is_small_for_any_number_of_ranks(hosts):
    page = page_of(stalled_job(hosts, 8))
    assert Page(page).open == []
    assert {"timeline", "ranks", "memory"} | ({"pairs"} if hosts > 1 else set()) <= set(
        re.findall(r'<section id="([\w-]+)"', page)
    )
    assert len(page.encode()) < 200_000


def test_ranks_in_the_same_state_share_a_row():
    page = page_of(stalled_job(8, 8))
    table = re.search(r'<table id="rank-table">.*?</table>', page, flags=re.DOTALL)[0]
    assert re.findall(r'<th scope="row" data-order="\d+">([^<]+)<', table) == ["0-20,22-63", "21"]
    assert "node0, node1, node2, node3 and 4 more" in table
    assert 'data-hosts="node0 node1 node2 node3 node4 node5 node6 node7"' in table
    assert "Ranks in the same state share a row." in page
    assert "Ranks in the same state share a row." not in page_of(stalled_job(2, 8))


def test_of_many_different_ranks_those_of_findings_have_rows():
    sketch = running(16, 8)
    for rank in range(128):
        sketch = sketch.alter(ProgressFacts, ranks=(rank,), step=1000 + rank)
    job = sketch.job()
    rows = rank_rows(examine(job), job)
    rows[100] = rows[100]._replace(findings=("RUN001",))
    groups = rank_groups(rows, used_columns(rows))
    assert (len(groups.rows), groups.left_out, groups.ranks) == (64, 64, 128)
    assert [group.name for group in groups.rows if group.findings] == ["100"]


def test_inputs_are_listed_those_passed_over_first():
    page = shown(
        page_of(running().job(), inputs=(ReportInput("a.log", "log"), ReportInput("core.1", "unknown", "it is no log")))
    )
    assert "1 of 2 files read, 1 skipped." in page
    assert page.index("core.1") < page.index("a.log")
    assert "it is no log" in page


def test_what_is_ignored_is_shown_with_its_reason():
    page = page_of(stalled_job(), settings=Settings(ignore=(IgnoreEntry("MEM004", "known", by="doctor.toml:3"),)))
    assert "known (doctor.toml:3)" in page


def test_each_state_of_a_check_has_a_color_of_its_own():
    def broken_thing(job):
        raise ValueError("oops")
        yield

    broken = check(id="NET903", severity=Severity.ERROR, needs=(SoftwareFacts,))(broken_thing)
    page = render_html(judge(healthy(1, 1).job(), CheckRegistry([broken]), Settings()))
    assert set(re.findall(r'<span class="chip (\w+)">(\w+)</span>', page)) == {("crashed", "crashed")}
    rules = re.findall(r"([^{}]+){([^{}]*)}", re.sub(r"@media[^{]*{", "", page.partition("</style>")[0]))
    colored = {one.strip() for selectors, body in rules for one in selectors.split(",") if "background:" in body}
    assert {f".chip.{state}" for state in ("error", "warning", "crashed", "info", "unknown", "pass")} <= colored


def test_absent_ranks_have_a_row():

    job = msgspec.structs.replace(running(), world_size=3, absent=(2,)).job()
    rows = re.findall(r'<th scope="row" data-order="(\d+)"', page_of(job))
    assert rows == ["0", "1", "2"]
    assert "did not join" in page_of(job)


def test_playbooks_stand_below_the_headings_of_the_page(stalled_page):
    body = re.search(r'<details class="playbook" id="playbook-RUN001">.*?</details>', stalled_page, flags=re.DOTALL)[0]
    assert "<h4>Confirm it</h4>" in body
    assert "<h1>" not in body
    assert "made from the check" not in body
