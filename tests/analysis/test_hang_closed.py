"""Ranks that all wait for one another before the first batch, where no limit is exceeded yet."""

import pytest

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.rank_state import JobState
from doctor.analysis.hang.wait_graph import wait_for_one_another
from doctor.core.facts import Frame
from doctor.core.job import Member, build_job
from doctor.facts import Collective, ProcessGroup, ProgressFacts, RecorderFacts

_C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
_LIGHTNING = "/venv/lib/python3.11/site-packages/lightning"
WORLD = (0, 1, 2)
RUN = Frame("/home/me/train.py", 90, "<module>", user=True)
BARRIER = (Frame(_C10D, 5356, "barrier"), Frame("/home/me/train.py", 60, "data", user=True), RUN)
GATHER = (Frame(_C10D, 4100, "all_gather"), Frame("/home/me/train.py", 70, "model", user=True), RUN)
NEW_GROUP = (
    Frame(_C10D, 2169, "_new_process_group_helper"),
    Frame(_C10D, 5863, "new_group"),
    Frame("/home/me/train.py", 50, "groups", user=True),
    RUN,
)
FIT = (Frame(f"{_LIGHTNING}/pytorch/trainer/trainer.py", 1037, "_run"), RUN)
CONNECTOR = f"{_LIGHTNING}/pytorch/trainer/connectors/data_connector.py"
INFINITE = (
    Frame(f"{_LIGHTNING}/fabric/utilities/distributed.py", 428, "__exit__"),
    Frame(CONNECTOR, 100, "prepare_data"),
    *FIT,
)
IN_HOOK = (
    Frame(_C10D, 5356, "barrier"),
    Frame("/home/me/module.py", 40, "prepare_data", user=True),
    Frame(CONNECTOR, 102, "prepare_data"),
    *FIT,
)
ALONE = (Frame("/home/me/train.py", 55, "loads", user=True), RUN)


def rank(stack, operation="", sequence=1, *, group="0", groups=(("0", WORLD),), still=10.0, idle=20.0, backend="gloo"):
    """A rank before the first batch, and the call that its recorder shows."""
    call = Collective(group, sequence, operation, backend, state="scheduled", at=1.0, frames=stack)
    calls = (call,) if operation else ()
    known = tuple(ProcessGroup(name, "", members) for name, members in groups)
    progress = ProgressFacts(idle=idle, at=21.0, still=still, limit=86_400.0, patience=86_400.0, stack=stack)
    return {"progress": progress, "flight-recorder": RecorderFacts(groups=known, collectives=calls)}


def job(*ranks, world=None):
    members = [Member(number, sections) for number, sections in enumerate(ranks)]
    return build_job(members, world_size=world or len(members))


def named(*ranks):
    found = diagnose_stall(job(*ranks))
    return None if found is None or found.within_limit else (found.kind, found.ranks)


def test_a_rank_in_another_call_under_the_same_number():
    assert named(rank(GATHER, "all_gather"), rank(BARRIER, "barrier"), rank(BARRIER, "barrier")) == ("differ", (0,))


@pytest.mark.parametrize(
    "other",
    [
        rank(GATHER, "all_gather", still=2.0),
        rank(GATHER, "all_gather", idle=2.0),
        rank(GATHER),
        rank(ALONE),
        rank(BARRIER, "barrier"),
    ],
    ids=["moves", "has just come", "not recorded", "busy", "same call"],
)
def test_ranks_of_which_one_may_go_on(other):
    """A large first call, or a rank that loads while the others wait."""
    ranks = (other, rank(BARRIER, "barrier"), rank(BARRIER, "barrier"))
    assert not wait_for_one_another(JobState(job(*ranks)))
    assert named(*ranks) is None


@pytest.mark.parametrize(("stack", "kind"), [(GATHER, "differ"), (ALONE, None)])
def test_a_device_may_compute_before_its_call(stack, kind):
    """Where a rank is in the call itself, its device has nothing else to do."""
    device = {"backend": "nccl"}
    found = named(rank(stack, "all_gather", **device), *[rank(BARRIER, "barrier", **device)] * 2)
    assert found == (None if kind is None else (kind, (0,)))


def test_a_rank_that_is_not_known():
    ranks = (rank(GATHER, "all_gather"), rank(BARRIER, "barrier"))
    assert not wait_for_one_another(JobState(job(*ranks, world=3)))


def test_ranks_that_wait_in_groups_of_their_own():
    """Both are complete: communicators are made, or a first call is large."""
    groups = (("a", (0, 1)), ("b", (2, 3)))
    ranks = [rank(GATHER, "all_gather", group=name, groups=groups) for name in "aabb"]
    assert named(*ranks) is None


def test_groups_that_wait_for_each_other():
    groups = (("a", (0, 1)), ("b", (0, 1)))
    ranks = [rank(GATHER, "all_gather", group="a", groups=groups), rank(BARRIER, "barrier", group="b", groups=groups)]
    assert named(*ranks) is not None


def test_a_group_that_one_rank_makes():
    ranks = (rank(BARRIER, "barrier"), rank(NEW_GROUP), rank(BARRIER, "barrier"))
    assert named(*ranks) == ("elsewhere", (1,))


def test_a_group_that_some_ranks_make():
    """Its members may connect for long (``use_local_synchronization``)."""
    assert named(rank(BARRIER, "barrier"), rank(NEW_GROUP), rank(NEW_GROUP)) is None


@pytest.mark.parametrize("world", [2, 3])
def test_a_call_in_a_hook_that_one_rank_has(world):
    """The barrier of Lightning behind the hook is not in the recorder."""
    groups = (("0", tuple(range(world))), ("1", tuple(range(world))))
    others = [rank(INFINITE, groups=groups)] * (world - 1)
    found = diagnose_stall(job(rank(IN_HOOK, "barrier", 3, groups=groups), *others))
    assert (found.kind, found.ranks) == ("one-sided", (0,))
    assert found.one_sided.call.site.text == "barrier at module.py:40 (prepare_data)"


def test_a_hook_that_takes_long():
    """The others wait behind it, as long as it takes."""
    groups = (("0", WORLD), ("1", WORLD))
    assert named(rank(ALONE, groups=groups), *[rank(INFINITE, groups=groups)] * 2) is None
