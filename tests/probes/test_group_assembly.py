"""Who joins a group, on which back end, and along which axes."""

import msgspec
import pytest

from doctor.facts import TrainerFacts
from doctor.probes.base import ProbeParticipant
from doctor.probes.collectives.backend_errors import MOST, error_text, informative_line
from doctor.probes.collectives.group_assembly import MOST_BY_GLOO, addresses_of, assemble
from doctor.probes.collectives.group_steps import GroupsNotRun, TorchCapabilities
from doctor.probes.collectives.mesh import Axis, parse_mesh
from doctor.probes.collectives.mesh_layout import ACTIVATION, BUCKET, FLAG, axis_groups, launcher_mesh, misfit
from doctor.testing import healthy

ACCELERATE = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
}
MEGATRON = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_PP_DEGREE": "2"}


def posts(sketch, *, devices=0, nccl=False, without=(), mesh=()):
    """Of a job whose ranks have loaded torch; those in ``without`` have none."""
    job = sketch.job()
    ready = msgspec.msgpack.encode(TorchCapabilities(devices, nccl, ("gloo", "mpi", "of_a_plugin"), mesh))
    made = [
        ProbeParticipant(
            f"{place:016x}",
            rank,
            rank.host.index,
            False,
            note=b"" if rank.number in without else ready,
        )
        for place, rank in enumerate(job.ranks)
    ]
    return job, made


def on(backend, **size):
    return healthy(**size).put(TrainerFacts(source="fabric run", backend=backend))


@pytest.mark.parametrize(
    ("sketch", "seen", "expected"),
    [
        (healthy(2, 2), {"devices": 2, "nccl": True}, ("nccl", "cuda")),
        (healthy(2, 2), {"devices": 2}, ("gloo", "cpu")),
        (healthy(2, 2, gpus=0), {}, ("gloo", "cpu")),
        (healthy(2, 2).environ(ACCELERATE_USE_CPU="true"), {"devices": 2, "nccl": True}, ("gloo", "cpu")),
        (on("gloo", hosts=2), {"devices": 2, "nccl": True}, ("gloo", "cpu")),
        (on("cpu:gloo,cuda:nccl", hosts=2), {"devices": 2, "nccl": True}, ("nccl", "cuda")),
        (on("cpu:gloo,cuda:nccl", hosts=2), {}, ("gloo", "cpu")),
        (on("of_a_plugin", hosts=2), {}, ("of_a_plugin", "cpu")),
    ],
)
def test_the_back_end_is_that_of_the_job(sketch, seen, expected):
    job, made = posts(sketch, **seen)
    found = assemble(job, made, ())
    assert (found.backend, found.device) == expected


@pytest.mark.parametrize(
    ("sketch", "words"),
    [
        (on("nccl", hosts=2), "nccl is not available"),
        (on("smddp", hosts=2), "does not know it"),
        (on("mpi", hosts=2), "mpirun"),
        (healthy(MOST_BY_GLOO // 2 + 1, 2, gpus=0), "at most 512 ranks"),
    ],
)
def test_what_can_not_be_run_is_said_and_not_replaced(sketch, words):
    job, made = posts(sketch)
    told = assemble(job, made, ())
    assert isinstance(told, GroupsNotRun)
    assert words in told.reason
    assert told.error == ""


def test_all_that_have_torch_join():
    job, made = posts(healthy(2, 2, gpus=0), without=(1,))
    found = assemble(job, made, ())
    assert [post.number for post in found.processes] == [0, 2, 3]
    orders = found.join(job, 4000, 15.0, 8.0)
    assert [(one.place, one.count, one.numbers) for one in orders.values()] == [
        (0, 3, (0, 2, 3)),
        (1, 3, (0, 2, 3)),
        (2, 3, (0, 2, 3)),
    ]
    shares = {rank.place: [(share.axis, share.members) for share in rank.shares] for rank in orders.values()}
    assert shares[0] == shares[1] == [("world", (0, 2, 3))], "the hosts are of different size now"


def test_one_alone_joins_where_it_has_a_gpu():
    job, made = posts(healthy(2, 1, gpus=0), without=(1,))
    assert "rank 1 cannot load torch" in assemble(job, made, ()).reason
    job, made = posts(healthy(1, 1, gpus=0))
    assert assemble(job, made, ()) is None
    job, made = posts(healthy(1, 1), devices=1, nccl=True)
    assert [course.groups for course in assemble(job, made, ()).courses] == [((0,),)]


def test_two_processes_that_claim_one_rank_are_one_member():
    job, made = posts(healthy(1, 3, gpus=0).renumbered(2, 1))
    assert [post.number for post in assemble(job, made, ()).processes] == [0, 1]


def test_the_store_is_dialled_as_the_job_would():
    job, made = posts(healthy(2, 2, gpus=0))
    assert [*addresses_of(job, made[0])] == ["10.0.0.1", "node0"]
    orders = assemble(job, made, ()).join(job, 4000, 15.0, 8.0)
    assert [order.addresses[0] for order in orders.values()] == ["127.0.0.1", "127.0.0.1", "10.0.0.1", "10.0.0.1"]
    assert [order.local_rank for order in orders.values()] == [0, 1, 0, 1]


def test_without_a_mesh_hosts_and_local():
    _, made = posts(healthy(3, 2, gpus=0))
    found = axis_groups((), made)
    assert [(one.axis, one.bytes, one.groups) for one in found] == [
        ("world", BUCKET, ((0, 1, 2, 3, 4, 5),)),
        ("hosts", BUCKET, ((0, 2, 4), (1, 3, 5))),
        ("local", BUCKET, ((0, 1), (2, 3), (4, 5))),
    ]


@pytest.mark.parametrize(
    "sketch", [healthy(4, 1, gpus=0), healthy(1, 4, gpus=0), healthy(2, 2, gpus=0).only((0, 1, 2))]
)
def test_hosts_that_make_no_axes(sketch):
    _, made = posts(sketch)
    assert [one.axis for one in axis_groups((), made)] == ["world"]


def test_a_mesh_as_it_was_asked_for():
    _, made = posts(healthy(1, 8, gpus=0))
    found = axis_groups(parse_mesh("dp=2,pp=2,tp=2:1MiB"), made)
    assert [(one.axis, one.bytes) for one in found] == [
        ("world", FLAG),
        ("dp", BUCKET),
        ("pp", ACTIVATION),
        ("tp", 1 << 20),
    ]
    assert found[1].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found[3].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert "4 of 2, messages up to 1 MiB" in found[3].words


def test_an_axis_of_all_is_the_world():
    _, made = posts(healthy(1, 4, gpus=0))
    assert [one.axis for one in axis_groups(parse_mesh("dp=4,tp=1"), made)] == ["dp"]


def test_groups_of_a_mesh_without_those_who_are_missing():
    _, made = posts(healthy(1, 4, gpus=0).only((0, 1, 2)))
    found = axis_groups(parse_mesh("dp=2,tp=2"), made)
    assert [one.groups for one in found] == [((0, 1, 2),), ((0, 2), (1,)), ((0, 1), (2,))]


@pytest.mark.parametrize(
    ("environ", "world", "expected"),
    [
        ({}, 8, ()),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, 8, ()),
        (ACCELERATE, 8, (Axis("dp_shard", 4), Axis("tp", 2))),
        ({**ACCELERATE, "PARALLELISM_CONFIG_CP_SIZE": "2"}, 16, (Axis("dp_shard", 4), Axis("cp", 2), Axis("tp", 2))),
        ({**ACCELERATE, "PARALLELISM_CONFIG_SP_SIZE": "2"}, 8, ()),
        ({**ACCELERATE, "PARALLELISM_CONFIG_TP_SIZE": "two"}, 8, (Axis("dp_shard", 4),)),
        (MEGATRON, 16, (Axis("pp", 2), Axis("dp", 4), Axis("tp", 2))),
        (MEGATRON, 4, (Axis("pp", 2), Axis("tp", 2))),
    ],
)
def test_what_launchers_tell(environ, world, expected):
    assert launcher_mesh(environ, world) == expected


def test_the_mesh_of_the_launcher_is_used_where_all_tell_the_same():
    told = (Axis("dp", 2), Axis("tp", 2))
    job, made = posts(healthy(1, 4, gpus=0), mesh=told)
    assert [one.axis for one in assemble(job, made, ()).courses] == ["world", "dp", "tp"]
    assert [one.axis for one in assemble(job, made, parse_mesh("ep=4")).courses] == ["ep"]
    made[3] = made[3]._replace(note=msgspec.msgpack.encode(TorchCapabilities(backends=("gloo",))))
    assert [one.axis for one in assemble(job, made, ()).courses] == ["world"]


def test_a_mesh_that_does_not_fit():
    assert misfit(parse_mesh("dp=4,tp=2"), 6) == "the mesh dp=4,tp=2 has 8 ranks, the job 6"
    assert misfit(parse_mesh("dp=4,tp=2"), 8) == misfit((), 6) == ""


def test_the_words_of_nccl_are_those_that_tell():
    error = RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage, NCCL version 2.19.3\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000"
    )
    assert error_text(error) == "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000"
    gloo = RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation")
    assert error_text(gloo) == "Timed out waiting 8000ms for recv operation"
    advice = "This is typically caused by a remote worker crashing. Check the logs of the remote worker"
    closed = RuntimeError(f"[../gloo/transport/tcp/pair.cc:552] Connection closed by peer [10.0.0.2]:30127. {advice}")
    assert error_text(closed) == "Connection closed by peer [10.0.0.2]:30127"
    assert error_text(ValueError()) == "ValueError"
    warned = "node1:77:80 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000"
    lines = ("NCCL INFO Bootstrap", warned, "NCCL INFO init.cc:867 -> 5")
    assert informative_line("the process exited with -6", lines).startswith("Duplicate GPU detected : rank 2")
    assert informative_line(error_text(error), ()) == error_text(error)
    assert len(informative_line("long " * 200, lines)) == MOST
