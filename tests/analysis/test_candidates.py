"""Candidate causes where the evidence does not carry one verdict."""

import json
import re

import pytest
from click.testing import CliRunner

from benchmarks.cause_counts import count
from doctor.analysis.differential.candidates import FEW, MOST, candidates_of
from doctor.analysis.differential.observed import _STRUCTURES
from doctor.cli.main import app
from doctor.core.check_registry import builtin_checks, load_registry
from doctor.core.settings import Settings
from doctor.knowledge.candidate_causes import case_counts, known_causes, known_observations, known_symptoms
from doctor.knowledge.log_patterns import known_patterns
from doctor.session import judge
from doctor.testing import logged

WATCHDOG = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={nin}, NumelOut={nin}, Timeout(ms)=1800000) ran for 1800020 "
    "milliseconds before timing out."
)
RECV = (
    "[rank1]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87, addr=[node1]:40242, "
    "remote=[node0]:48749): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
    "or crash?"
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1333, unhandled {what} error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3"
)
STUCK = (
    "[rank1]:[E ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives."
)
EXIT = (
    "E0102 03:04:05.000000 140 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) "
    "local_rank: 1 (pid: 4242) of binary: /usr/bin/python"
)
CASES = {
    "a timeout of a barrier": (WATCHDOG.format(rank=1, seq=808, op="ALLREDUCE", nin=1), "RUN010"),
    "a timeout during training": (WATCHDOG.format(rank=1, seq=80811, op="ALLREDUCE", nin=5000), "DATA001"),
    "a lost store": (RECV, "RUN004"),
    "a CUDA error in NCCL": (NCCL.format(what="cuda"), "VER002"),
    "a system error in NCCL": (NCCL.format(what="system"), "NET009"),
    "a watchdog that is stuck": (STUCK, "RUN016"),
    "an exit code": (EXIT.format(code=1), "RUN004"),
    "a segmentation fault": (EXIT.format(code=-11), "RUN004"),
    "a key that did not arrive": (
        "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//1",
        "RUN004",
    ),
    "an error code of cuBLAS": (
        "[rank0]: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "VER002",
    ),
    "an illegal access": ("[rank0]: RuntimeError: CUDA error: an illegal memory access was encountered", "GPU022"),
}
CERTAIN = {
    "an exception": "[rank2]: ValueError: the labels are wrong\n[rank0]: RuntimeError: Connection closed by peer",
    "an interface": "node1:41:77 [0] NCCL WARN Bootstrap : no socket interface found",
    "an assertion": (
        "[rank2]: /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: block: [193,0,0], "
        "thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        "[rank2]: torch.AcceleratorError: CUDA error: device-side assert triggered"
    ),
    "a healthy end": "Epoch 1: 100%|##| 10/10 [00:10<00:00, 3it/s]\n`Trainer.fit` stopped: `max_epochs=2` reached.",
}


def report_on(text):
    job = logged(*text.splitlines()).job()
    return judge(job, load_registry(()), Settings(), must_be_complete=False)


@pytest.mark.parametrize("name", CASES)
def test_an_open_symptom_has_candidates(name):
    text, expected = CASES[name]
    found = report_on(text).candidates
    assert expected in [one.id for one in found[:3]], found
    assert len(found) <= MOST
    assert all(one.supports and one.next_command and one.confirmed_by for one in found)
    assert [one.confidence for one in found] == sorted((one.confidence for one in found), reverse=True)
    assert sum(one.confidence for one in found) < 1


@pytest.mark.parametrize("name", CERTAIN)
def test_a_verdict_has_only_counted_alternatives(name):
    report = report_on(CERTAIN[name])
    verdict = max((one.confidence for result in report.results for one in result.findings), default=1.0)
    assert len(report.candidates) <= FEW
    assert all("public log" in support for one in report.candidates for support in one.supports)
    assert sum(one.confidence for one in report.candidates) <= 1 - verdict + 0.01


def test_an_observation_moves_a_cause():
    before = {one.cause: one.confidence for one in report_on(NCCL.format(what="system")).candidates}
    line = "node1:41:77 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    after = {one.cause: one for one in report_on(f"{line}\n{NCCL.format(what='system')}").candidates}
    assert after["rdma"].confidence > before["rdma"]
    assert any("RDMA" in text for text in after["rdma"].supports)
    assert after["interface"].confidence < before["interface"]
    assert any("RDMA" in text for text in after["interface"].against)


def test_a_part_of_a_word_is_no_observation():
    found = report_on(CASES["a timeout of a barrier"][0]).candidates  # it contains "ProcessGroup", and so "roce"
    assert not [text for one in found for text in (*one.supports, *one.against) if "RDMA" in text]


def test_an_unknown_error_has_only_candidates_with_support():
    line = "node1:41:77 [0] transport/x.cc:12 NCCL WARN Net : the state is inconsistent"
    assert report_on(line).primary == "RUN019"
    counted = report_on(line).candidates
    assert counted[0].cause == "program-error"
    assert all("public cases" in text for one in counted for text in one.supports)
    found = report_on(f"{line}: No space left on device").candidates
    assert {"HOST004", "MEM010"} <= {one.id for one in found}
    assert all(one.supports for one in found)


def test_counts_move_a_cause():
    job = logged(RECV).job()
    results = judge(job, load_registry(()), Settings(), must_be_complete=False).results
    found = candidates_of(job, results, "RUN012", {"lost-peer": {"scheduler": 100}})
    assert found[0].id == "ENV017"


def test_cases_are_counted_by_their_cause():
    text = {"lines": [RECV, "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-01-02T03:04:05 ***"]}
    cases = [
        {**text, "expected": ["ENV017"]},
        {**text, "expected": ["RUN012"], "also": ["ENV017"]},
        {**text, "expected": ["RUN004"], "cause": "unknown: nobody found out"},
        {**text, "expected": [], "healthy": True},
    ]
    assert count(cases)["lost-peer"] == {"scheduler": 2}


def test_the_order_does_not_depend_on_anything_else():
    job = logged(RECV, NCCL.format(what="system")).job()
    results = judge(job, load_registry(()), Settings(), must_be_complete=False).results
    assert len({candidates_of(job, results, "RUN012") for _ in range(3)}) == 1
    assert candidates_of(job, results, "RUN012") == candidates_of(job, tuple(reversed(results)), "RUN012")


def test_alternatives_to_a_verdict_share_what_it_leaves():
    found = report_on(EXIT.format(code=-9))
    confidence = found.result("MEM012").findings[0].confidence
    assert found.primary == "MEM012"
    assert "MEM012" not in [one.id for one in found.candidates]
    assert sum(one.confidence for one in found.candidates) <= 1 - confidence + 0.01


def test_nothing_of_a_log_enters_a_command():
    hostile = "`id`;$(id)'|sh"
    text = f"{RECV}\nsrun: error: {hostile}: task 1: Exited with exit code 1\nslurmstepd: error: {hostile}"
    found = report_on(text).candidates
    assert found
    assert {one.next_command for one in found} <= {one.command for one in known_causes().values()}


def test_every_format_shows_them(tmp_path):
    (tmp_path / "job.log").write_text(RECV + "\n")
    for form in ("text", "markdown", "html", "json"):
        result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "job.log"), "--format", form])
        assert "Error:|terminate called" in result.stdout, form
        assert "Another rank failed first" in re.sub(r"\s+", " ", result.stdout), form
    candidates = json.loads(result.stdout)["candidates"]
    assert {"id", "title", "confidence", "next_command"} <= candidates[0].keys()


def test_the_data_fit_together():
    ids = {check.id for check in builtin_checks()}
    kinds = {pattern.kind for pattern in known_patterns()} | {"mark.error", "software.cause"}
    assert {one.check for one in known_causes().values()} <= ids
    assert {name for one in known_causes().values() for name in one.checks} <= ids
    for symptom in known_symptoms():
        assert set(symptom.causes) <= known_causes().keys()
        assert set(case_counts().get(symptom.name, {})) <= set(symptom.causes)
    for one in known_observations():
        assert one.factors.keys() <= known_causes().keys(), one
        assert bool(one.kinds) + bool(one.absent) + bool(one.structure) == 1, one
        assert {*one.kinds, *one.absent} <= kinds, one
        assert not one.structure or one.structure in _STRUCTURES
        assert all(text == text.lower() for text in one.contains)
