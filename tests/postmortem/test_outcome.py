"""What no check understood is not healthy: logs that show neither a known fault nor an orderly end."""

import datetime
import io
import json
import time

import msgspec
import pytest
from click.testing import CliRunner

from doctor.analysis.logs.error_lines import unexplained_lines
from doctor.cli.main import app
from doctor.core.report_document import Report
from doctor.monitor.sinks.console import ConsoleSink
from doctor.monitor.sinks.finding_sink import FindingEvent
from doctor.postmortem.logs.outcome_marks.marks import Marks, _mark_of
from doctor.postmortem.logs.prefixes import parse_line
from doctor.postmortem.logs.rank_attribution import LogProcesses
from doctor.postmortem.logs.timestamps import Calendar
from doctor.postmortem.run_outcome import outcome_of
from doctor.testing import logged
from doctor.testing.cases import healthy

FRAME = 'Traceback (most recent call last):\n  File "/app/train.py", line 3, in <module>\n    run()\n'
UNKNOWN = {
    "prose": "hello",
    "a bar that stops": "Epoch 0:  10%|#         | 37/370 [00:10<01:31",
    "an error line": "ERROR: could not load dataset",
    "a loss": "loss: nan\nloss: nan\nloss: nan",
    "interrupted": f"{FRAME}KeyboardInterrupt",
    "a store": "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0/1",
    "an old store": "RuntimeError: Socket Timeout",
    "an end, and an error after it": "Training finished.\n[rank0]: ERROR: saving failed",
    "an end, and a loss of NaN before it": "Epoch 0/1 4/4 12.1it/s val_loss: nan\nexit status 0",
    "an end of one epoch": "\n".join(f"{n}0%|##| {n}/10 [00:01<00:00, 9it/s]" for n in (1, 10, 1, 10)),
}
FAILED = {
    "a shell": "line 4: 1234 Segmentation fault (core dumped) python train.py",
    "an abort": "Aborted (core dumped)",
    "glibc": "*** Error in `python': double free or corruption (!prev): 0x000056383cda7e40 ***",
    "behind a bar": "Epoch 3:  20%|##| 11/56 [00:02<00:08,  5.02it/s]Segmentation fault (core dumped)",
    "no file": "python: cannot open file train.py: [Errno 2] No such file or directory",
    "no command": "bash: line 1: torchrun: command not found",
    "no module": "/usr/bin/python: No module named torch",
    "C++": "terminate called after throwing an instance of 'std::runtime_error'\n  what():  bad",
    "C": "python: ../src/pool.c:12: take: Assertion `count > 0' failed.",
    "an exception alone": "Epoch 0, step 3\nException: no more data",
    "a name in capitals": "Epoch 0, step 3\nEOFError: Ran out of input",
    "an error in capitals": "OSError: [Errno 7] Argument list too long",
    "a class called Findings": f"{FRAME}mypkg.Findings: bad thing",
    "a dotted class": f"{FRAME}mypkg.errors.DataNotFound: bad thing",
    "a class without a message": f"{FRAME}StopTraining",
    "a plain class": f"{FRAME}Boom: x",
    "a class in small letters": f"{FRAME}boom",
}
HEALTHY = {
    "Lightning": "Epoch 1: 100%|##| 10/10 [00:10<00:00, 3it/s]\n`Trainer.fit` stopped: `max_epochs=2` reached.",
    "a bar": "{'loss': 0.5, 'epoch': 1.0}\n100%|###| 100/100 [00:10<00:00, 3.6it/s]",
    "Transformers": "{'train_runtime': 12.3, 'train_samples_per_second': 81.2, 'epoch': 1.0}",
    "a shell": "step 1: loss 0.5\nexit status 0",
    "words": "step 1: loss 0.5\nTraining finished.",
    "kubectl": "    State:          Terminated\n      Reason:       Completed\n      Exit Code:    0",
    "Detectron2": "iter: 99  total_loss: 1.19\nTotal training time: 1:40:12 (0:00:27 on hooks)",
    "DeepSpeed": "step=10, skipped=1\n[INFO] [launch.py:347:main] Process 4711 exits successfully.",
    "torchvision": "Epoch: [89]  [1250/1251]  loss: 1.2\nTraining time 15:10:22",
    "Megatron": "iteration 500/ 500 | lm loss: 2.3 |\n[after training is done] datetime: 2024-01-01 10:00:00",
    "seff": "State: COMPLETED (exit code 0)",
    "an error that was handled": "ERROR: retrying the download\nstep 1: loss 0.5\nTraining complete.",
}


def diagnose(tmp_path, text, *options):
    (tmp_path / "job.log").write_text(text)
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "job.log"), *options])
    return done.exit_code, done.stdout


def report_of(tmp_path, text, *options):
    code, out = diagnose(tmp_path, text, "--format", "json", *options)
    assert code == json.loads(out)["exit_code"]
    return json.loads(out)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_was_not_understood_is_inconclusive(tmp_path, name):
    report = report_of(tmp_path, UNKNOWN[name])
    assert (report["verdict"], report["exit_code"]) == ("inconclusive", 3)
    assert report["outcome"]["lines"] == len(UNKNOWN[name].splitlines())
    assert report["outcome"]["collect"]


@pytest.mark.parametrize(
    "line",
    [
        "Checkpoint will be saved when training is complete",
        "Waiting until the training is complete...",
        "Logs are uploaded after the run is finished",
        "Will retry unless exit code 0",
        "is the training done? no",
        "Training complete: False",
        "Job finished: FAILED",
        "run finished, status=failed",
        "training finished (interrupted)",
        "Training ended prematurely",
        "Training done in 0 of 3 stages",
        "training is complete for 10% of the data",
        "Job completed with 3 failures",
        "worker 3 exited with exit code 0 but 7 others run",
    ],
)
def test_an_end_that_is_announced_or_denied_is_none(tmp_path, line):
    log = tmp_path / "job.log"
    log.write_text(f"step 1 loss 0.5\nstep 2 loss 0.4\n{line}\n")
    assert CliRunner().invoke(app, ["diagnose", str(log)]).exit_code == 3


@pytest.mark.parametrize("name", FAILED)
def test_how_a_process_ended_is_a_failure(tmp_path, name):
    report = report_of(tmp_path, FAILED[name])
    assert (report["primary"], report["exit_code"]) == ("RUN004", 1)


@pytest.mark.parametrize(
    "text",
    [
        "Training finished.\ncp: error writing '/ckpt/out.pt': No space left on device",
        "[Errno 122] Disk quota exceeded",
    ],
)
def test_a_full_disk_is_a_failure_of_storage(tmp_path, text):
    report = report_of(tmp_path, text)
    assert (report["primary"], report["exit_code"]) == ("HOST004", 1)


@pytest.mark.parametrize("name", HEALTHY)
def test_an_orderly_end_is_healthy(tmp_path, name):
    report = report_of(tmp_path, HEALTHY[name])
    assert (report["verdict"], report["outcome"]["kind"]) == ("pass", "ended")


def test_a_run_whose_steps_advance_now_is_healthy(tmp_path):
    def log(end):
        stamps = [datetime.datetime.fromtimestamp(end - 10 * back, datetime.timezone.utc) for back in (3, 2, 1, 0)]
        return "\n".join(f"{at:%Y-%m-%dT%H:%M:%SZ} step {number}: loss 0.3" for number, at in enumerate(stamps))

    assert report_of(tmp_path, log(time.time()))["outcome"]["kind"] == "running"
    stopped = report_of(tmp_path, log(time.time() - 7200))
    assert (stopped["verdict"], stopped["outcome"]["kind"]) == ("inconclusive", "unknown")


def test_it_says_what_was_read_and_the_first_errors_of_each_rank(tmp_path):
    lines = [f"[rank{rank}]: ERROR: shard {shard} is broken" for shard in range(40) for rank in (0, 1)]
    outcome = report_of(tmp_path, "\n".join(["[rank0]: epoch 2, step 7: loss 0.1", *lines]))["outcome"]
    assert [(one["rank"], one["line"]) for one in outcome["unexplained"]] == [(n % 2, n + 2) for n in range(10)]
    assert outcome["unexplained_lines"] == 40  # MOST_OF_ONE of each rank are kept
    assert [(one["step"], one["line"], one["rank"]) for one in outcome["last_steps"]] == [("epoch 2, step 7", 1, 0)]


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_every_form_for_people_shows_it(tmp_path, form):
    text = "[rank3]: epoch 2, step 7: loss 0.1\n[rank3]: ERROR: shard 5 is broken"
    code, page = diagnose(tmp_path, text, "--format", form)
    assert code == 3
    for words in ("2 lines read, 2 recognized", "shard 5 is broken", "epoch 2, step 7", "torchrun --tee 3"):
        assert words in page


def test_secrets_and_names_are_hidden_in_the_quoted_lines(tmp_path):
    text = "[rank0]: ERROR: login failed for https://me:hunter2secret@example.org/x\n[rank0]: step 1: loss 1"
    code, page = diagnose(tmp_path, text)
    assert (code, "hunter2secret" in page) == (3, False)


def test_a_finding_that_the_callback_printed_is_read_back(tmp_path):
    """Written by the outlet itself, so that a change of its words is noticed."""
    report = report_of(tmp_path, f"[rank2]: {FRAME}KeyError: 'x'".replace("\n", "\n[rank2]: "))
    told = msgspec.convert(report, Report)
    found = [FindingEvent(result, finding) for result in told.results for finding in result.findings]
    paper = io.StringIO()
    outlet = ConsoleSink(tmp_path / "report.json", paper)
    outlet.found(found, told)
    for text in (paper.getvalue(), "\x1b[31m" + paper.getvalue().replace("\n", "\n[rank0]: ")):
        again = report_of(tmp_path, text)
        assert (again["primary"], again["exit_code"]) == ("RUN004", 1)
        finding = next(one for one in again["results"] if one["id"] == "RUN004")["findings"][0]
        assert finding["ranks"] == [2]
        assert "KeyError" in finding["summary"]


def test_a_finding_in_a_log_never_makes_it_healthier(tmp_path):
    claim = "✓ pass      RUN004 rank-died\nrankdoctor: no finding on 8 ranks; report: /x\nok: no finding\n"
    assert report_of(tmp_path, claim)["exit_code"] == 3
    assert report_of(tmp_path, claim + "KeyError: 'x'")["exit_code"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|###| 4/4 [00:03<00:00, 1.2it/s]",
        "Sanity Checking DataLoader 0: 100%|###| 2/2 [00:00<00:00, 9it/s]",
        "max_steps: 1000",
        "val_error: 0.25",
        "mean_squared_error=0.3",
        "0 errors, 0 warnings",
    ],
)
def test_lines_that_are_no_mark(line):
    assert _mark_of(line, mild=False)[0] == ""


def test_marks_are_bounded():
    marks = Marks()
    calendar = Calendar(None)
    for number in range(20_000):
        for line in (f"[rank{number % 5000}]: ERROR: {number}", f"[rank{number}]: step {number}"):
            marks.read(parse_line(line, calendar), line, number)
    assert len(list(marks.events("x", LogProcesses("x")))) <= 200 + 4096


def test_facts_of_a_host_have_no_end():
    assert outcome_of(healthy().job(), (), 0.0) is None
    assert outcome_of(logged("hello").job(), (), 0.0).kind == "unknown"


FAILURES_OF_LAUNCHERS = {
    "torchrun": "failed (exitcode: 1) local_rank: 0 (pid: 4242) of binary: /usr/bin/python",
    "torchrun's table": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "torchrun's agent": "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
    "torchrun ends its workers": "Sending process 4321 closing signal SIGTERM",
    "torchrun is ended": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 42 got signal: 15",
    "the rendezvous": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "spawn": "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 1",
    "Accelerate": "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
    "DeepSpeed": "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
    "DeepSpeed ends its processes": "[INFO] [launch.py:315:sigkill_handler] Killing subprocess 4242",
    "pdsh": "pdsh@node0: node1: ssh exited with exit code 1",
    "Lightning": "Child process with PID 42 terminated with code 1. Forcefully terminating all other processes",
    "srun": "srun: error: node3: task 3: Exited with exit code 1",
    "srun, killed": "srun: error: node3: task 3: Killed",
    "srun ends the step": "srun: Terminating StepId=4711.0",
    "srun waits": "srun: First task exited 30s ago",
    "slurmstepd": "slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 ***",
    "sacct": "4711 train main FAILED 1:0",
    "seff": "State: FAILED (exit code 1)",
    "mpirun": "Primary job  terminated normally, but 1 process returned a non-zero exit code.",
    "mpirun's first process": "mpirun detected that one or more processes exited with non-zero status, thus causing",
    "mpirun, a signal": "mpirun noticed that process rank 3 with PID 42 on node n1 exited on signal 11 (Killed).",
    "prterun": "prterun detected that one or more processes exited with non-zero status, thus causing the job to end.",
    "MPI_Abort": "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD",
    "a lost daemon": "ORTE has lost communication with a remote daemon.",
    "Hydra": "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    "MPICH": "Abort(1) on node 3 (rank 3): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 3",
    "kubectl": "    Reason:       Error\n    Exit Code:    1",
    "kubectl exec": "command terminated with exit code 1",
    "a pod": "Warning  BackOff  3m (x5 over 4m)  kubelet  Back-off restarting failed container pytorch in pod worker-0",
    "a Kubernetes job": "Job has reached the specified backoff limit",
    "the training operator": "PyTorchJob train is failed because 1 Worker replica(s) failed.",
    "Ray, an actor": "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.",
    "Ray, a worker": "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task.",
    "Ray, a job": "Status message: Job entrypoint command failed with exit code 1, last available logs:",
    "SageMaker": "AlgorithmError: ExecuteUserScriptError:\nExitCode 1",
    "LSF": "Exited with exit code 1.",
    "PBS": "=>> PBS: job killed: walltime 3600 exceeded limit 3600",
    "Docker": "container exited with code 137",
    "Horovod": "Terminating remaining workers after failure of Process 3.",
    "systemd": "train.service: Main process exited, code=exited, status=1/FAILURE",
    "make": "make: *** [Makefile:12: train] Error 1",
    "a shell, killed": "train.sh: line 3:  4242 Killed                  python train.py",
    "a shell, terminated": "train.sh: line 3:  4242 Terminated              python train.py",
    "a notebook": "Kernel died, restarting",
}


@pytest.mark.parametrize("name", FAILURES_OF_LAUNCHERS)
def test_a_failure_that_only_a_launcher_reports_has_a_primary_finding(tmp_path, name):
    report = report_of(tmp_path, FAILURES_OF_LAUNCHERS[name])
    assert report["verdict"] in ("fail", "inconclusive")
    assert report["exit_code"] in (1, 3)
    assert report["primary"] is not None


_API = "torch.distributed.elastic.multiprocessing.api: "
TAKEDOWNS = {
    "a closing signal": f"[2024-05-08 08:47:31,261] {_API}[WARNING] Sending process 41 closing signal SIGTERM",
    "a forced exit": f"[2024-05-08 08:47:31,261] {_API}[WARNING] Unable to shutdown process 41 via Signals.SIGTERM, "
    "forcefully exiting via Signals.SIGKILL",
    "the exit barrier": "ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed: "
    "300.0 seconds",
}


@pytest.mark.parametrize("name", TAKEDOWNS)
def test_what_torchrun_prints_about_an_exit_is_no_error_of_its_own(tmp_path, name):
    exit_line = (
        f"[2024-05-08 08:47:31,877] {_API}[ERROR] failed (exitcode: 1) local_rank: 2 (pid: 42) of binary: /bin/py"
    )
    report = report_of(tmp_path, f"{TAKEDOWNS[name]}\n{exit_line}\n{TAKEDOWNS[name]}")
    found = {one["id"]: one["findings"] for one in report["results"] if one["findings"]}
    assert report["primary"] == "RUN004"
    assert "RUN019" not in found
    assert "local rank 2" in found["RUN004"][0]["summary"]


def test_an_error_beside_the_report_of_an_exit_is_the_primary_finding(tmp_path):
    exit_line = f"{_API}[ERROR] failed (exitcode: 1) local_rank: 2 (pid: 42) of binary: /bin/py"
    error = "2026-01-02 03:04:05,678 - mypkg.engine - ERROR - the state is inconsistent"
    report = report_of(tmp_path, f"{error}\n{TAKEDOWNS['a closing signal']}\n{exit_line}")
    assert report["primary"] == "RUN019"


WAITS = {
    "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0": [0],
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0": [0],
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /3//cuda//0": [],
    "torch.distributed.DistStoreError: Socket Timeout": [],
    "Timeout waiting for key: default_pg/0/0 after 1800000 ms": [0],
}


@pytest.mark.parametrize("text", WAITS)
def test_a_timeout_of_the_store_names_the_rank_that_sets_the_key(tmp_path, text):
    report = report_of(tmp_path, text)
    check = "RUN001" if WAITS[text] else "RUN012"
    assert (report["primary"], report["exit_code"]) == (check, 3)
    (result,) = [one for one in report["results"] if one["id"] == check]
    assert not WAITS[text] or result["findings"][0]["ranks"] == WAITS[text]
    searched = "what ended or delayed the process" if WAITS[text] else "which of them ended or was delayed"
    assert searched in result["findings"][0]["fix"]


@pytest.mark.parametrize("key", ["/default_pg/0//cpu//0/3", "/default_pg/0//cpu//0/rank_3"])
def test_a_rank_without_an_address_in_the_store_did_not_join(tmp_path, key):
    text = f"[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: {key}"
    report = report_of(tmp_path, text)
    assert report["primary"] == "ENV005"
    (result,) = [one for one in report["results"] if one["id"] == "ENV005"]
    assert result["findings"][0]["ranks"] == [3]


def test_an_unexplained_error_comes_before_an_exit_code(tmp_path):
    text = "node1:41:77 [3] transport/x.cc:12 NCCL WARN Net : no release said this\nexits with return code = 1"
    report = report_of(tmp_path, text)
    assert report["primary"] == "RUN019"


def test_the_first_error_by_time_names_component_rank_and_host(tmp_path):
    text = (
        "2026-01-02 03:04:09 [rank1] mypkg.engine - ERROR - lost it\n"
        "2026-01-02 03:04:05 [rank3] node7:41:77 [3] NCCL WARN Net : no release said this\n"
    )
    report = report_of(tmp_path, text)
    (finding,) = next(one for one in report["results"] if one["id"] == "RUN019")["findings"]
    assert "the first error from NCCL on rank 3: " in finding["summary"]
    assert finding["ranks"] == [3]
    assert report["verdict"] == "inconclusive"


def test_a_list_of_possible_causes_is_no_evidence(tmp_path):
    text = "ValueError: bad\nThis may be caused by one of the following issues:\n1. CUDA out of memory\n"
    assert report_of(tmp_path, text)["primary"] == "RUN004"


def test_a_quoted_message_explains_no_other_message_of_its_kind():
    nccl = "node1:41:77 [0] NCCL WARN Active list loop at element 12"
    evidence = logged(nccl, "[rank2]: [Rank:2] Habana exception raised from compile at graph.cpp:599").job().evidence
    places = [(one.file, one.line) for one in evidence.of("software.cause")]
    assert len(places) == 2
    assert [(one.file, one.line) for one in unexplained_lines(evidence, places[:1])] == places[1:]
    twice = logged(nccl, nccl.replace("12", "13")).job().evidence
    assert unexplained_lines(twice, [(twice.events[0].file, 1)]) == []


@pytest.mark.parametrize(
    ("lines", "words", "at_least"),
    [
        (("[rank4]: ValueError: a", "[rank1]: ValueError: b"), "2 of at least 5 ranks seen", True),
        (("srun: error: node7: task 5: Killed",), "1 of at least 6 ranks seen", True),
        (("[rank4]: ValueError: a", "[rank1]: world_size: 8"), "2 of 8 ranks seen", False),
    ],
)
def test_a_number_of_ranks_that_no_log_states_is_a_lower_bound(tmp_path, lines, words, at_least):
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path / "job.log")]).stdout
    assert words in " ".join(shown.split())
    assert report_of(tmp_path, "\n".join(lines))["job"].get("at_least", False) is at_least
