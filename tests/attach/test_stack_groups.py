"""Groups of ranks by where they are, and the merged stacks."""

from __future__ import annotations

from doctor.analysis.attached_job import attached_job
from doctor.analysis.hang.stack_groups import call_tree, stack_groups
from doctor.core.report_document import CallNode, StackGroup
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
