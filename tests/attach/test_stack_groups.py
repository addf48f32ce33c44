"""Groups of ranks by where they are, and the merged stacks."""

from __future__ import annotations

import io
import json

import msgspec

from doctor.analysis.attach_outcome import outcome_of_attach, rank_stacks
from doctor.analysis.attached_job import attached_job
from doctor.analysis.hang.stack_groups import call_tree, stack_groups
from doctor.core.report_document import CallNode, Report, StackGroup
from doctor.core.settings import Settings
from doctor.report.html.document import render_html
from doctor.report.machine_formats import MACHINE_FORMATS
from doctor.report.markdown import render_markdown
from doctor.report.terminal import draw_report, make_console
from doctor.session import judge, load_checks
from tests.attach.attached import MAIN, at, inside, members, process


def _job() -> object:
    waiting = [process(rank, inside("all_reduce")) for rank in range(3)]
    asleep = process(3, (at(12, "load", "/home/me/data.py"), MAIN))
    return members(*waiting, asleep)


def test_groups_are_the_largest_first() -> None:
    assert stack_groups(attached_job(_job())) == (  # type: ignore[arg-type]
        StackGroup((0, 1, 2), "waiting", "all_reduce at train.py:41 (train)", seconds=3.0),
        StackGroup((3,), "standing", "data.py:12 (load)", seconds=3.0),
    )


def test_moving_ranks_are_one_group_whatever_line_they_are_on() -> None:
    found = members(process(0, (at(1),), (at(2),)), process(1, (at(2),), (at(1),)))
    assert stack_groups(attached_job(found)) == (StackGroup((0, 1), "moving", "train.py (train)"),)


def test_the_tree_parts_where_ranks_do_and_counts_frames_of_libraries() -> None:
    (root,) = call_tree(attached_job(_job()))  # type: ignore[arg-type]
    assert root == CallNode(
        "train.py:90 (main)",
        (0, 1, 2, 3),
        user=True,
        calls=(
            CallNode(
                "train.py:41 (train)",
                (0, 1, 2),
                user=True,
                calls=(CallNode("distributed_c10d.py:3007 (all_reduce)", (0, 1, 2), skipped=1),),
            ),
            CallNode("data.py:12 (load)", (3,), user=True),
        ),
    )


HOSTILE = at(7, "x<script>alert(1)</script>", "/home/me/[x](http://e).py")


def _report() -> Report:
    found = members(*(process(rank, inside("all_reduce")) for rank in range(3)), process(3, (HOSTILE, MAIN)))
    job = attached_job(found)
    report = judge(job, load_checks(Settings()), Settings(), outcome_of=outcome_of_attach(found))
    return msgspec.structs.replace(report, stacks=rank_stacks(found, job))


def test_the_page_and_the_ticket_show_groups_and_stacks_as_text() -> None:
    report = _report()
    page = render_html(report)
    assert '<th scope="row">0-2</th><td>in all_reduce at train.py:41 (train), for at least 3 s</td>' in page
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    ticket = render_markdown(report)
    assert "2 groups of ranks" in ticket
    assert "ranks 0-2: in all_reduce at train.py:41 (train), for at least 3 s" in ticket


def test_the_document_holds_groups_and_the_tree() -> None:
    document = json.loads(MACHINE_FORMATS["json"](_report()))
    assert document["stacks"]["job"] == "train.py · launched by torchrun · 4 ranks · 1 host attached"
    assert document["stacks"]["groups"][0] == {
        "ranks": [0, 1, 2],
        "state": "waiting",
        "place": "all_reduce at train.py:41 (train)",
        "seconds": 3.0,
    }
    assert [call["ranks"] for call in document["stacks"]["calls"][0]["calls"]] == [[0, 1, 2], [3]]


def test_a_report_of_many_calls_is_cut_and_says_so() -> None:
    ranks = [process(rank, (at(rank, "step"), at(90 + rank, "main")), cpu=0.9, world=80) for rank in range(80)]
    found = members(*ranks)
    job = attached_job(found)
    report = judge(job, load_checks(Settings()), Settings(), outcome_of=outcome_of_attach(found))
    report = msgspec.structs.replace(report, stacks=rank_stacks(found, job))
    text = draw_report(report, make_console(io.StringIO()))
    assert "and 100 more calls (--verbose shows all)" in text
    assert "more calls" not in draw_report(report, make_console(io.StringIO()), verbose=True)
