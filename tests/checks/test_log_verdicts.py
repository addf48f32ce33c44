"""What whole logs lead to: the root cause that all checks together report, and harmless logs without one."""

import functools
import json
import re
from pathlib import Path

import pytest

from doctor.analysis.logs.log_component import _REPORTS, report_of
from doctor.api import Severity, Status
from doctor.core.check_registry import CheckRegistry, playbook_directory
from doctor.core.check_runner import examine_job
from doctor.core.report_summary import primary_of
from doctor.core.settings import Settings
from doctor.knowledge.log_patterns import known_patterns
from doctor.knowledge.software_messages import components
from doctor.session import load_checks
from doctor.testing import logged
from tests.lab.cases import assert_each, each_case

CHECKS = load_checks(Settings())
DATA = Path(__file__).parents[1] / "data"
LOGS = [json.loads(line) for line in (DATA / "log_verdicts.jsonl").read_text().splitlines()]
"""Texts are made from what libraries and launchers print, in the wordings of many releases; hosts and numbers are
invented. ``causes``: the checks of which any may be the root cause, none for a harmless log."""
PATTERNS = known_patterns()


@functools.cache
def examined(text):
    return examine_job(logged(*text.splitlines()).job(), CHECKS)


def findings_of(text, check_id):
    return next(result.findings for result in examined(text) if result.id == check_id)


CAUSES = [one for one in PATTERNS if one.check and not (one.finding and one.finding.severity == "info")]


@each_case(("text", "cause"), [(line, one.check) for one in CAUSES for line in one.examples])
def test_an_example_alone_leads_to_the_check_of_its_entry(text, cause):
    assert primary_of(examined(text)) == cause


def test_a_spot_notice_is_not_reported_as_a_cancellation():
    (finding,) = findings_of("INFO: EC2 Spot interruption notice received; instance will be terminated", "ENV017")
    assert finding.summary == "The cloud provider reclaims a host of the job (spot interruption)"


@each_case(
    ("text", "named"),
    [
        ("Normal  TaintManagerEviction  2m  controller  Marking for deletion Pod default/job-0", "job-0 -n default`"),
        ("train-worker-0   0/1   Evicted   0   18h", "train-worker-0`"),
    ],
)
def test_the_fix_of_an_eviction_names_the_pod(text, named):
    (finding,) = findings_of(text, "ENV017")
    assert f"kubectl describe pod {named}" in finding.fix


@each_case(
    ("text", "check_id", "named"),
    [
        (
            'Warning  FailedMount  5s  kubelet  MountVolume.SetUp failed for volume "pvc-1" : mount failed',
            "RUN018",
            "FailedMount of volume pvc-1 (mount failed) | Find the reason in the events of `kubectl describe pod POD`, "
            "and correct the claim or the file server of the volume pvc-1.",
        ),
        (
            "Warning  FailedMount  5s  kubelet  Unable to attach or mount volumes: unmounted volumes=[data], timed out",
            "RUN018",
            "FailedMount of volume data | ",
        ),
        ('Failed  3s  kubelet  Failed to pull image "repo/train:1": rpc error', "RUN018", "pull image repo/train:1 | "),
        ("      Reason:       ImagePullBackOff", "RUN018", "could not start a pod: ImagePullBackOff | "),
        (
            "Work WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=600000) timed out in "
            "blocking wait.",
            "RUN001",
            "unset TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT",
        ),
        ("Bus error (core dumped)", "MEM010", "often because /dev/shm is full | Check with `df -h /dev/shm`"),
        (
            "node01:1:5 [0] graph/xml.cc:20 NCCL WARN XML Parse error : unterminated XML.",
            "NCCL014",
            "or if they are not set, replace /var/run/nvidia-topologyd/virtualTopology.xml",
        ),
        (
            "AssertionError: req MetadataIndex(fqn='a.weight', offset=torch.Size([0, 0]), index=0) mismatch sizes "
            "torch.Size([8]) vs torch.Size([8, 4])",
            "RUN017",
            "a.weight in the checkpoint has a different shape than in this job | Load with the wrapping",
        ),
    ],
)
def test_a_declared_fix_names_what_the_line_shows(text, check_id, named):
    (finding,) = findings_of(text, check_id)
    assert named in f"{finding.summary} | {finding.fix}"


def test_a_process_started_during_an_import_gives_one_finding():
    (finding,) = findings_of("An attempt has been made to start a new process before the current process", "ENV013")
    assert "``" not in finding.summary + finding.fix


DECLARED = [one for one in PATTERNS if one.finding]


@each_case("pattern", DECLARED, ids=lambda one: one.kind)
def test_a_declared_finding_uses_groups_of_its_pattern(pattern):
    declared = pattern.finding
    assert pattern.check in CHECKS.ids()
    assert set(declared.explains) <= set(CHECKS.ids())
    same = [one.pattern for one in PATTERNS if one.kind == pattern.kind]
    groups = {name for text in same for name in re.findall(r"\(\?P<(\w+)>", text)}
    places = re.findall(r"\{([\w|]+)(?:\?[^{}]+)?\}", declared.summary + declared.fix)
    known = groups | {"on_hosts"} | ({"blamed"} if declared.blames else set())
    assert {name for names in (*places, *declared.evidence.values()) for name in names.split("|")} <= known
    assert {*declared.by, *declared.blames} <= groups
    assert set(declared.unless) <= {one.kind for one in PATTERNS}


@each_case("pattern", DECLARED, ids=lambda one: one.kind)
def test_a_declared_finding_shows_the_message_and_names_the_rank_that_logged_it(pattern):
    ranks = (3,) if pattern.finding.names_ranks else ()
    for line in pattern.examples:
        if not line.startswith("[rank") and not pattern.finding.blames:
            found = [one for one in findings_of(f"[rank3]: {line}", pattern.check) if one.ranks == ranks]
            assert any(one.source and one.evidence["said"] for one in found), line


@pytest.mark.parametrize(("words", "ranks"), [("1", (1,)), ("3, 1", (1, 3)), ("9999999999", ())])
def test_ranks_that_a_message_blames_are_at_fault(words, ranks):
    (found,) = findings_of(f"[rank0]: HorovodAllreduce_grads_1 [missing ranks: {words}]", "RUN001")
    assert found.ranks == ranks


@pytest.mark.parametrize("part", range(4))
def test_a_log_leads_to_its_cause(part):
    assert_each(_leads_to_its_cause, [(log["log"], (log,)) for log in LOGS[part::4]])


def _leads_to_its_cause(log):
    results = examined(log["text"])
    loud = [(one.id, f.summary) for one in results for f in one.findings if f.severity is not Severity.INFO]
    assert primary_of(results) in (log["causes"] or [None]), loud
    assert log["causes"] or not loud, loud
    if "ranks" in log:
        assert {rank for f in findings_of(log["text"], log["causes"][0]) for rank in f.ranks} == set(log["ranks"])


OF_HOSTS = [one for one in CHECKS.checks if one.family in ("devices", "memory", "host", "software")]


@each_case("check", [check for check in OF_HOSTS if "M" in check.when], ids=lambda check: check.id)
def test_a_check_reports_the_texts_of_its_page(check):
    """The texts that people paste into a search box."""
    page = (playbook_directory() / f"{check.id}.md").read_text()
    see = page.partition("## What you see")[2].partition("## Confirm it")[0]
    shown = re.findall(r"```\w*\n(.*?)```", see, flags=re.DOTALL)
    (result,) = examine_job(logged(*"\n".join(shown).splitlines()).job(), CheckRegistry((check,)))
    assert result.findings


REPORTED = [json.loads(line) for line in (DATA / "reported_failures.jsonl").read_text().splitlines()]
OTHERWISE = {"308", "319", "348", "420", "530", "564", "596", "615"}
"""Failures of which another cause is found, or none."""


@each_case("case", REPORTED, ids=lambda case: case["id"])
def test_a_reported_failure_leads_to_an_accepted_cause(case):
    doubtful = case["text_states_cause"] or case["under_determined"] or case["text_source"] != "excerpt"
    if not doubtful:
        is_found = primary_of(examined(case["text"])) in (case["accepted_ids"] or [None])
        assert is_found == (case["id"] not in OTHERWISE)


def test_a_failure_of_the_program_comes_before_the_master_that_ended_with_it():
    text = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/w/train.py", line 3, in <module>
[rank0]:     import einops
[rank0]: ModuleNotFoundError: No module named 'einops'
[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (h, 29500).
"""  # noqa: E501 - a line of a log
    assert primary_of(examined(text)) != "NET006"
    (finding,) = findings_of(text, "NET006")
    assert finding.severity is Severity.WARNING
    assert finding.confidence < 0.5


def test_a_task_that_failed_comes_before_the_step_that_srun_cancelled():
    text = """
n3: ValueError: bad sample 17
srun: error: n3: task 3: Exited with exit code 1
slurmstepd: error: *** STEP 77121.0 ON n1 CANCELLED AT 2026-02-12T03:11:09 ***
"""
    assert all(finding.severity is Severity.INFO for finding in findings_of(text, "ENV017"))


def test_an_unexplained_failure_of_nccl_says_what_to_collect():
    text = "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:825, unhandled cuda error, NCCL version {}"
    (finding,) = findings_of(text.format("2.19.3"), "NCCL013")
    assert "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP" in finding.fix
    assert "TORCH_FR_BUFFER_SIZE=2000" in finding.fix
    assert finding.confidence < 0.5
    # PyTorch with this NCCL has no flight recorder.
    (finding,) = findings_of(text.format("2.7.8"), "NCCL013")
    assert "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV" in finding.fix
    assert "TORCH_" not in finding.fix


def test_the_failing_line_of_the_program_is_quoted():
    text = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 8, in step
[rank1]:     loss = criterion(model(batch["text"]), batch["label"])
[rank1]:                                            ~~~~~^^^^^^^^^
[rank1]:   File "/opt/env/lib/python3.11/site-packages/torch/nn/functional.py", line 99, in linear
[rank1]:     return torch.addmm(bias, x, weight)
[rank1]: KeyError: 'label'"""
    (finding,) = findings_of(text, "RUN004")
    assert 'at train.py:8 (step), in `loss = criterion(model(batch["text"]), batch["label"])`' in finding.fix


def test_the_place_of_an_exhaustion_is_named():
    (log,) = (log for log in LOGS if log["log"] == "a rank without memory, and ranks that waited for it")
    (finding,) = findings_of(log["text"], "MEM011")
    assert finding.evidence["place"] == "train.py:57 (training_step)"
    assert finding.evidence["cause"] == "demand"


def test_checks_of_the_post_mortem_stage_read_logs():
    declared = {one.check for one in DECLARED}
    for check in CHECKS.checks:
        if check.family in ("launch", "network", "nccl"):
            assert ("M" in check.when) == bool(check.from_logs or check.reads_logs or check.id in declared), check.id


HUGE = "9" * 400
GARBLED = f"""\
Bootstrap Root : rank {HUGE} of {HUGE} ranks has already checked in
Timed out after 6 seconds waiting for clients. 1/{HUGE} clients joined.
RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: k (world_size={HUGE}, \
worker_count=1, timeout=0:30:00)
Initializing distributed: GLOBAL_RANK: {HUGE}, MEMBER: 1/{HUGE}
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/{HUGE}
Mismatched NCCL version detected : rank {HUGE} version {HUGE} rank 1 version 2
The client socket has timed out after 5ms while trying to connect to (h, {HUGE}).
The server socket has failed to bind to [::]:{HUGE} (errno: 98 - Address already in use).
Ping failed, invalid value returned from server. Expected: {HUGE}, Got: {HUGE}
  max_nodes        : {HUGE}
torchrun --nnodes={HUGE} --node-rank={HUGE} --master-addr=x train.py
You requested gpu: [{HUGE}, 1]
But your machine only has: [0]
But your machine only has: []
comm 0x1 rank 0 nRanks {HUGE} nNodes {HUGE} localRanks 8
Bootstrap : Using lo:999.999.999.999<0>
connect [::::]:1: Connection refused
NVRM: Xid (PCI:0000:3b:00): 000, foo
Duplicate GPU detected : rank 99999999999999999999 and rank 1 both on CUDA device ffffffffffffffffffffffffffffffff
srun: error: node7: tasks 0-99999999999999,5,,-: Out Of Memory
RuntimeError: The NVIDIA driver on your system is too old (found version 99999999999999999999999)
CPU Virtual Memory:  used = 1.1 GB, percent = 9.9.9%
exits with return code = -9
|    0     99999999999      C   x   9999999MiB |
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: []
LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [,,,]
Still waiting to acquire lock on x (elapsed: 1.2.3 seconds)
Out of memory: Killed process 1 (x) total-vm:1kB, anon-rss:{HUGE}kB
node7:41:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
node7:41:77 [0] NCCL INFO comm 0x55 rank 0 nranks 3000000000 cudaDev 0 busId 7000 commId 0x9 - Init COMPLETE
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000)
CUDA out of memory. Tried to allocate {HUGE} GiB. GPU 99999 has a total capacity of 9.9.9 GiB of which 0 bytes is free.
DefaultCPUAllocator: can't allocate memory: you tried to allocate {HUGE} bytes
"""


@each_case("text", [*GARBLED.splitlines(), GARBLED], ids=lambda text: text[:30])
def test_no_check_fails_on_garbled_numbers(text):
    assert not [result.id for result in examined(text) if result.crash or result.status is Status.ERROR]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("[rank1]: torch.AcceleratorError: CUDA error: out of memory", "`nvidia-smi`"),
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 79.15 GiB of which 1.02 GiB is free. Process 4242 has 60.00 GiB memory in use. Including "
            "non-PyTorch memory, this process has 18.10 GiB memory in use. Of the allocated memory 17.50 GiB is "
            "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.",
            "`ps -o user,lstart,cmd -p 4242`",
        ),
    ],
)
def test_who_holds_the_gpu_can_be_found_out(text, command):
    (finding,) = findings_of(text, "MEM011")
    assert command in finding.fix


OOM = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 57, in <module>
[rank0]:     main()
[rank0]:   File "{path}", line 812, in {function}
[rank0]:     loss = step(batch)
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of \
79.15 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the \
allocated memory 74.00 GiB is allocated by PyTorch, {pools}and {unused} is reserved by PyTorch but unallocated.
"""
PACKAGES = "/opt/env/lib/python3.11/site-packages"
SETTINGS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "accumulate_grad_batches",
    "evaluation DataLoader",
    "train_micro_batch_size_per_gpu",
    "smaller batch per rank",
)


@each_case(
    ("path", "function", "setting"),
    [
        ("transformers/trainer.py", "training_step", "per_device_train_batch_size"),
        ("trl/trainer/sft_trainer.py", "compute_loss", "per_device_train_batch_size"),
        ("transformers/trainer.py", "evaluation_loop", "per_device_eval_batch_size"),
        ("lightning/pytorch/loops/training_epoch_loop.py", "advance", "accumulate_grad_batches"),
        ("pytorch_lightning/loops/fit_loop.py", "advance", "accumulate_grad_batches"),
        ("lightning/pytorch/loops/evaluation_loop.py", "run", "evaluation DataLoader"),
        ("deepspeed/runtime/engine.py", "backward", "train_micro_batch_size_per_gpu"),
        ("transformers/models/llama/modeling_llama.py", "forward", "smaller batch per rank"),
    ],
)
def test_an_exhaustion_names_the_settings_of_its_framework(path, function, setting):
    text = OOM.format(path=f"{PACKAGES}/{path}", function=function, unused="100.00 MiB", pools="")
    (finding,) = findings_of(text, "MEM011")
    assert [word for word in SETTINGS if word in finding.fix] == [setting]
    assert "\n" not in finding.fix


@each_case(
    ("unused", "pools", "is_large"),
    [
        ("2.60 GiB", "", True),
        ("1.90 GiB", "", False),
        ("2.60 GiB", "with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), ", False),
    ],
)
def test_much_unallocated_memory_asks_for_expandable_segments(unused, pools, is_large):
    text = OOM.format(path=f"{PACKAGES}/timm/models/vit.py", function="forward", unused=unused, pools=pools)
    (finding,) = findings_of(text, "MEM011")
    assert finding.evidence["cause"] == "demand"
    assert (finding.fix.split("\n")[1:] == ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]) == is_large


@pytest.mark.parametrize(
    ("line", "asked_for"),
    [
        ("node1:41:77 [0] scheduler/list.cc:212 NCCL WARN Active list loop at element 12", ("nccl", "NCCL_DEBUG=INFO")),
        (
            "[1699999999.123456] [node1:4127 :0] ib_mlx5.c:123  UCX  ERROR Cannot allocate flush mem entries",
            ("ucx_info -v", "UCX_LOG_LEVEL=info"),
        ),
    ],
)
def test_a_library_error_asks_for_the_release_and_the_logs(line, asked_for):
    (finding,) = findings_of(line, "RUN018")
    assert all(word in finding.fix for word in asked_for)


def test_every_component_has_a_report():
    for component in components():
        release, _ = report_of(component.name)
        assert release
    names = {component.name for component in components()}
    assert report_of("UCX")[1] == "`export UCX_LOG_LEVEL=info`"
    assert {*_REPORTS} <= names


@each_case(
    ("text", "check", "ranks"),
    [
        ("  rank      : 3 (local_rank: 1)\n  exitcode  : -11 (pid: 621)\n  error_file: <N/A>", "RUN004", (3,)),
        (
            "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
            "the job to be terminated. The first process to do so was:\n\n"
            "  Process name: [[29973,1],2]\n  Exit code:    1",
            "RUN004",
            (2,),
        ),
        ("ValueError: Unexpected result nan on rank 3 at iteration #3 invocation #2", "RUN008", (3,)),
    ],
)
def test_the_rank_that_a_text_names(text, check, ranks):
    assert [finding.ranks for finding in findings_of(text, check)] == [ranks]


@pytest.mark.parametrize(
    "why", ["Invalid account or account/partition combination specified", "Invalid wckey specification"]
)
def test_a_refused_submission_is_one_finding(why):
    (finding,) = findings_of(f"sbatch: error: Batch job submission failed: {why}", "RUN018")
    assert finding.summary == f"SLURM refused the job: {why}"


def test_the_local_rank_that_deepspeed_names():
    text = "[ERROR] [launch.py:324:sigkill_handler] ['python', '--local_rank=1', '-x'] exits with return code = -11"
    (finding,) = findings_of(text, "RUN004")
    assert "local rank 1" in finding.summary
    assert finding.ranks == ()


def test_the_local_rank_of_a_killed_process():
    text = (
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 7727) of binary:"
    )
    (finding,) = findings_of(text, "MEM012")
    assert finding.summary.startswith("The process of local rank 3 (PID 7727) was killed")
    assert finding.ranks == ()


_IB = "NET/IB : req 0/1 tag ff peer 10.0.0.2<51234> collective mismatch error, local size {} remote size {}"
_DCP = (
    "AssertionError: req MetadataIndex(fqn='a.weight', index=0) mismatch sizes{} torch.Size([{}]) vs torch.Size([{}])"
)


@pytest.mark.parametrize(
    ("text", "check", "summary"),
    [
        (_IB.format(8192, 4096), "RUN002", "NCCL sends 8,192 bytes to a rank whose collective expects 4,096"),
        (
            _IB.format(512, 2048),
            "RUN002",
            "NCCL found a send of 512 bytes and a receive of 2,048 bytes that do not match",
        ),
        (
            "RuntimeError: Caught RuntimeError in pin memory thread for device 0.",
            "DATA012",
            "The pin-memory thread of a DataLoader raised RuntimeError",
        ),
        ("KeyError: Caught KeyError in DataLoader worker process 3.", "DATA012", "DataLoader worker 3 raised KeyError"),
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running inconsistent collective: "
            "CollectiveFingerPrint(OpType=BROADCAST)",
            "RUN002",
            "Rank 1 called BROADCAST, but another rank made a different call",
        ),
        (
            "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: node1",
            "RUN008",
            "The program ended because the loss was NaN on rank 3",
        ),
    ],
)
def test_a_summary_says_what_the_text_shows(text, check, summary):
    (finding,) = findings_of(text, check)
    assert finding.summary == summary


@pytest.mark.parametrize("comma", ["", ","])
def test_the_tensor_of_the_job_comes_first_in_a_mismatch_of_sizes(comma):
    # target_tensor.size() vs tensor.size(): torch/distributed/checkpoint/filesystem.py
    (finding,) = findings_of(_DCP.format(comma, "1571", "1571, 3072"), "RUN017")
    sizes = {name: finding.evidence[name] for name in ("in_this_job", "written")}
    assert sizes == {"in_this_job": "[1571]", "written": "[1571, 3072]"}


def test_the_launcher_terminates_the_ranks_that_did_not_fail():
    table = "Failures:\n" + "\n".join(
        f"[{place}]:\n  time      : 2026-01-02_03:04:0{time}\n  host      : node1\n  rank      : {rank} (local_rank: "
        f"{rank})\n  exitcode  : {code} (pid: 432{rank})"
        for place, time, rank, code in ((1, 9, 0, -15), (0, 5, 3, -11))
    )
    (finding,) = findings_of(table, "RUN004")
    assert finding.effect == "The launcher then terminates rank 0."
    assert any("exitcode -11" in line for line in finding.evidence["said"])


@pytest.mark.parametrize(
    ("thrown", "has_stacks"), [("c10::Error", True), ("std::bad_alloc", False), ("torch::jit::JITException", True)]
)
def test_stacks_of_cpp_are_asked_for_where_pytorch_threw(thrown, has_stacks):
    (finding,) = findings_of(f"terminate called after throwing an instance of '{thrown}'\nAborted", "RUN004")
    assert ("TORCH_SHOW_CPP_STACKTRACES" in finding.fix) is has_stacks


@pytest.mark.parametrize(
    ("text", "check", "named"),
    [
        (
            "srun: error: Task launch for StepId=1.0 failed on node node07: Invalid job credential",
            "RUN018",
            "`munge -n | ssh node07 unmunge`",
        ),
        ("sbatch: error: invalid partition specified: gpu2", "RUN018", "`sinfo -s`"),
        (
            "CalledProcessError: Command 'ssh -o PasswordAuthentication=no node2 hostname' returned non-zero exit "
            "status 255.",
            "RUN018",
            "first for node2",
        ),
        (
            "pipeline_model_parallel_size value from arguments (2) is not equal to checkpoint value (1)",
            "RUN017",
            "Set `--pipeline-model-parallel-size` to 1",
        ),
    ],
)
def test_the_fix_of_a_launch_names_host_and_option(text, check, named):
    (finding,) = findings_of(text, check)
    assert named in finding.fix


@pytest.mark.parametrize(
    ("text", "check", "summary"),
    [
        (
            "mpirun noticed that process rank 3 with PID 4711 on node node01 exited on signal 9 (Killed).",
            "MEM012",
            "Rank 3 (PID 4711) on node01 was killed by SIGKILL, possibly by the OOM killer",
        ),
        (
            'earlyoom[700]: sending SIGTERM to process 4321 uid 1000 "python": badness 900',
            "MEM012",
            "earlyoom ended python (PID 4321) because the host was low on memory",
        ),
        (
            "systemd[1]: train.service: Failed with result 'oom-kill'.",
            "MEM012",
            "The OOM killer ended a process of train.service",
        ),
        (
            "[12345.6] Killed process 4321 (python) total-vm:1kB, anon-rss:1kB",
            "MEM012",
            "python (PID 4321) was killed by the OOM killer",
        ),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update",
            "VER002",
            "The driver, which supports CUDA 11.4, is too old for the CUDA runtime in use",
        ),
    ],
)
def test_a_summary_says_what_the_line_does(text, check, summary):
    assert [finding.summary for finding in findings_of(text, check)] == [summary]


def test_a_removed_name_has_its_replacement():
    text = "ImportError: cannot import name 'DDPPlugin' from 'pytorch_lightning.plugins' (/opt/lib/x.py)"
    (finding,) = findings_of(text, "VER006")
    assert finding.fix == "Instead of `DDPPlugin`, use pytorch_lightning.strategies.DDPStrategy."
