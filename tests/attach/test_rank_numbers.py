"""Numbers of ranks by their variables, by each other, and by their order."""

import random

import pytest

from doctor.attach.processes import Process
from doctor.attach.rank_numbers import MOST_RANKS, RankNumbers, claimed_numbers, number_ranks
from doctor.collectors.launch.rank_variables import RANK_VARIABLES
from doctor.knowledge.launcher_index import VARIABLES


def _process(pid, started=None):
    return Process(pid, 1, float(pid if started is None else started), 0)


def _ranks(members, **known):
    numbers = number_ranks(members, **known)
    return {pid: (number.rank, number.guessed) for pid, number in numbers.items()}


def _claim(rank, size=8, local=None, local_size=None):
    return RankNumbers("torchrun", rank, "RANK", world_size=size, local_rank=local, local_world_size=local_size)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, [("", 3, "RANK")]),
        ({"RANK": "3"}, []),
        ({"RANK": "4", "WORLD_SIZE": "4"}, []),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, [("mpich", 1, "PMI_RANK")]),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, [("mpich", 1, "MV2_COMM_WORLD_RANK")]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "2"},
            [("slurm", 0, "RANK"), ("slurm", 1, "SLURM_PROCID")],
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, []),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "x"}, []),
        ({"RANK": "1" + "0" * 30, "WORLD_SIZE": "4"}, []),
        ({}, []),
    ],
)
def test_claims_by_variables(environ, expected):
    assert [(claim.launcher, claim.rank, claim.rank_from) for claim in claimed_numbers(environ)] == expected


def test_any_variables_give_plausible_numbers():
    chance = random.Random(7)
    names = sorted({*VARIABLES, *RANK_VARIABLES})
    values = ["0", "1", "3", "-1", "10" * 20, "x", "", " 2 ", "٣", "4(x2),3", "\x1b[0m", "1e3", "0x10", "[1"]
    for _ in range(3000):
        environ = {name: chance.choice(values) for name in chance.sample(names, 9)}
        for claim in claimed_numbers(environ):
            numbers = (claim.rank, claim.world_size, claim.local_rank, claim.local_world_size, claim.node)
            assert all(number is None or 0 <= number <= MOST_RANKS for number in numbers)
            assert claim.rank is None or claim.world_size is None or claim.rank < claim.world_size


def test_ranks_without_claims_take_the_free_numbers_of_their_host():
    members = [(_process(1), [_claim(5, local=1, local_size=4)]), (_process(2), ()), (_process(3), ())]
    assert _ranks(members) == {1: (5, False), 2: (4, True), 3: (6, True)}


def test_the_order_is_that_of_the_start_even_if_pids_were_reused():
    members = [(_process(9, started=1), ()), (_process(3, started=2), ()), (_process(7, started=2), ())]
    assert _ranks(members) == {9: (0, True), 3: (1, True), 7: (2, True)}
    assert _ranks(members, first=7) == {7: (0, True), 9: (1, True), 3: (2, True)}
    assert _ranks(members, node=2, nodes=3) == {9: (6, True), 3: (7, True), 7: (8, True)}
    assert {number.world_size for number in number_ranks(members, node=2, nodes=3).values()} == {9}
    assert {number.world_size for number in number_ranks(members, node=2).values()} == {None}


def test_of_two_claims_the_one_without_duplicates_counts():
    other = RankNumbers("slurm", 1, "SLURM_PROCID", world_size=8)
    members = [(_process(1), [_claim(0)]), (_process(2), [_claim(0), other])]
    assert _ranks(members) == {1: (0, False), 2: (1, False)}
    assert _ranks([(_process(1), [_claim(3)]), (_process(2), [_claim(3)])]) == {1: (0, True), 2: (1, True)}
