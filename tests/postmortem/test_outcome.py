"""What no check understood is not healthy: logs that show neither a known fault nor an orderly end."""

import datetime
import io
import json
import time

import msgspec
import pytest
from click.testing import CliRunner

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
    "an end of one epoch": "\n".join(f"{n}0%|##| {n}/10 [00:01<00:00, 9it/s]" for n in (1, 10, 1, 10)),
}
FAILED = {
    "a shell": "line 4: 1234 Segmentation fault (core dumped) python train.py",
    "an abort": "Aborted (core dumped)",
    "glibc": "*** Error in `python': double free or corruption (!prev): 0x000056383cda7e40 ***",
    "behind a bar": "Epoch 3:  20%|##| 11/56 [00:02<00:08,  5.02it/s]Segmentation fault (core dumped)",
    "a worker": "ERROR: Unexpected segmentation fault encountered in worker.",
    "no file": "python: cannot open file train.py: [Errno 2] No such file or directory",
    "no command": "bash: line 1: torchrun: command not found",
    "no module": "/usr/bin/python: No module named torch",
    "C++": "terminate called after throwing an instance of 'std::runtime_error'\n  what():  bad",
    "C": "python: ../src/pool.c:12: take: Assertion `count > 0' failed.",
    "an exception alone": "Epoch 0, step 3\nException: no more data",
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
