"""Who started a process, by variables as real launchers set them."""

import pytest

from doctor.analysis.launch_origin import (
    absent_by_host,
    direct_launch,
    expand_hosts,
    inner_launcher,
    is_left_alone,
    most_tasks,
    slurm_step,
    starts_tasks_unlaunched,
    whole_number,
)
from doctor.core.facts import Claim, LaunchFacts, SlurmFacts, Variable
from doctor.core.text import ranks_in_words
from doctor.testing.cases import healthy

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}


def launch(environ, **fields):
    return LaunchFacts(variables=tuple(Variable(*item) for item in sorted(environ.items())), **fields)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), (" 8 ", 8), ("-1", -1), ("+3", 3), ("", None), ("8.0", None), ("0x10", None), (None, None)],
)
def test_numbers_are_read_as_torch_reads_them(text, number):
    assert whole_number(text) == number


def test_an_endless_number_is_none():
    assert whole_number("9" * 10_000) is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ("n0",)),
        ("n[0-2],login", ("n0", "n1", "n2", "login")),
        ("gpu[08-10,2].cluster", ("gpu08.cluster", "gpu09.cluster", "gpu10.cluster", "gpu2.cluster")),
        ("r[1-2]c[1-2]", ("r1c1", "r1c2", "r2c1", "r2c2")),
        ("n[0-999999999]", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(("text", "most"), [("8(x2),4", 8), ("1", 1), ("2,8(x3)", 8), ("", None), ("8(x", None)])
def test_tasks_per_node(text, most):
    assert most_tasks(text) == most


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "batch", "", "-1"])
def test_special_steps_are_no_tasks(step):
    assert slurm_step(launch(STEP | {"SLURM_STEP_ID": step})) is None


def test_the_task_of_a_step():
    step = slurm_step(launch(STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}))
    assert (step.task, step.size, step.most_per_node) == (3, 4, 2)


@pytest.mark.parametrize(
    ("environ", "fields", "expected"),
    [
        (STEP, {}, None),
        (STEP | {"TORCHELASTIC_RUN_ID": "x"}, {}, "torchrun"),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, {}, None),
        (STEP | {"PMI_RANK": "9", "PMI_SIZE": "16"}, {}, "mpirun"),
        (STEP | {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8"}, {}, "mpirun"),
        (STEP, {"launcher": "ray"}, "ray"),
        (STEP, {"claims": (Claim("accelerate"),)}, "accelerate"),
        (STEP, {"ancestors": ("bash", "deepspeed", "slurmstepd")}, "deepspeed"),
        ({}, {}, None),
    ],
)
def test_the_launcher_inside(environ, fields, expected):
    assert inner_launcher(launch(environ, **fields)) == expected


def test_srun_starts_a_rank_itself():
    direct = direct_launch(launch(STEP))
    assert (direct.program, direct.rank, direct.size, direct.rank_name) == ("srun", 3, 4, "SLURM_PROCID")


def test_mpirun_starts_a_rank_itself():
    direct = direct_launch(launch({"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8"}))
    assert (direct.program, direct.rank, direct.size) == ("mpirun", 7, 8)


def test_torchrun_starts_it_otherwise():
    assert direct_launch(launch(STEP | {"TORCHELASTIC_RUN_ID": "x"})) is None


@pytest.mark.parametrize(
    ("environ", "alone"),
    [({}, True), ({"LOCAL_RANK": "0"}, True), ({"RANK": "0"}, False), (STEP, False), ({"WORLD_SIZE": "2"}, False)],
)
def test_left_alone(environ, alone):
    assert is_left_alone(launch(environ)) is alone


def test_several_processes_have_been_started_by_somebody():
    one = healthy(hosts=1, per_host=1)
    batch = launch({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"})
    assert starts_tasks_unlaunched(one.job(), batch)
    assert not starts_tasks_unlaunched(healthy().job(), batch)


def test_an_absent_rank_lives_with_its_siblings():
    job = healthy(hosts=2, per_host=4).only((0, 1, 2, 3, 4, 6, 7), absent=(5,)).job()
    assert absent_by_host(job) == {"node1": (5,)}


def test_a_block_of_tasks_lies_on_its_place_in_the_node_list():
    job = healthy(hosts=4, per_host=2).by_srun().only((0, 1, 6, 7), absent=(2, 3, 4, 5)).job()
    assert absent_by_host(job) == {"node1": (2, 3), "node2": (4, 5)}


def test_several_silent_hosts_without_an_order_are_named_together():
    sketch = healthy(hosts=4, per_host=2).put(SlurmFacts(job_id="7", node_list="node[0-3]"))
    job = sketch.only((0, 1, 6, 7), absent=(2, 3, 4, 5)).job()
    assert absent_by_host(job) == {"node1, node2": (2, 3, 4, 5)}


def test_a_host_is_not_guessed():
    assert absent_by_host(healthy(hosts=2, per_host=2).only((0, 1), absent=(2, 3)).job()) == {"": (2, 3)}


def test_ranks_that_go_round_the_hosts_have_no_blocks():
    sketch = healthy(hosts=2, per_host=2).renumbered(1, 9).renumbered(2, 1).renumbered(9, 2)
    assert absent_by_host(sketch.only((0, 1, 2), absent=(3,)).job()) == {"": (3,)}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "rank 3"),
        ((0, 1, 2, 5), "ranks 0-2 and 5"),
        ((2, 1, 1), "ranks 1 and 2"),
        ((0, 2, 4), "ranks 0, 2 and 4"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(ranks) == words
