"""Which way a job is gathered: what the user asks for, and what the launcher says."""

from pathlib import Path

import pytest

from doctor.cluster.gather.plan import GatherOptions, GatherPlan, NoRendezvous, gather_plan
from doctor.collectors.launch.launcher import launch_facts
from doctor.core.errors import UnusableError
from tests.cluster.launches import OPEN_MPI, STEP, TORCHRUN
from tests.recorded_launches import PLAIN, recorded

SHARE = Path("/mnt/shared")


def way(environ, *wish, **more):
    return gather_plan(GatherOptions(*wish, **more), environ, launch_facts(environ))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {**PLAIN, "RANK": "8"},
        {**PLAIN, "WORLD_SIZE": "99999999999"},
        recorded("slurm_batch.env"),
        recorded("slurm_salloc.env"),
    ],
)
def test_a_lone_process_goes_alone(environ):
    assert way(environ) == way(environ, "none") == GatherPlan()


@pytest.mark.parametrize(("environ", "number"), [(PLAIN, 3), (TORCHRUN, 3), (STEP, 1), (OPEN_MPI, 1)])
def test_one_of_several_meets_in_the_store(environ, number):
    found = way(environ)
    assert found.identity.number == number
    assert found.endpoint is not None
    assert found.share is None


def test_no_gather_if_the_user_disables_it():
    assert way(PLAIN, "none", SHARE) == GatherPlan()


@pytest.mark.parametrize("gather", ["auto", "share"])
def test_a_folder_takes_the_place_of_the_store(gather):
    found = way(PLAIN, gather, SHARE)
    assert (found.endpoint, found.share) == (None, SHARE)


def test_the_store_with_a_folder_for_those_who_do_not_reach_it():
    found = way(PLAIN, "store", SHARE)
    assert found.endpoint.names == ("node0",)
    assert found.share == SHARE


def test_the_folder_alone_where_nothing_tells_of_a_store():
    found = way(recorded("openmpi.env"), "store", SHARE)
    assert (found.endpoint, found.share) == (None, SHARE)


def test_a_master_where_the_launcher_tells_none():
    assert way(recorded("openmpi.env"), master="10.0.0.1:4000").endpoint.names == ("10.0.0.1",)


def test_no_rendezvous():
    with pytest.raises(NoRendezvous):
        way(recorded("openmpi.env"))


@pytest.mark.parametrize(
    "wish", [GatherOptions("share"), GatherOptions(master="node0"), GatherOptions("none", master=":1")]
)
def test_contradictions_are_refused_in_every_surrounding(wish):
    for environ in ({}, PLAIN):
        with pytest.raises(UnusableError):
            gather_plan(wish, environ, launch_facts(environ))


@pytest.mark.parametrize("gather", ["store", "share"])
@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "9", "WORLD_SIZE": "4"}])
def test_a_gathering_of_a_lone_process_is_refused(gather, environ):
    with pytest.raises(UnusableError, match="needs RANK and WORLD_SIZE"):
        way(environ, gather, SHARE)


def test_marks_are_not_needed_where_the_user_asks_for_it():
    assert way({"RANK": "1", "WORLD_SIZE": "2"}, "share", SHARE).identity.number == 1
