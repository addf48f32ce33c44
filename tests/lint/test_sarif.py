"""SARIF 2.1.0, as its schema and the services that read it want it."""

import json
import time
from pathlib import Path

import pytest

from doctor.core.settings import IgnoreEntry, Settings
from doctor.lint.engine.registry import load_rules
from doctor.lint.engine.request import lint_request
from doctor.lint.engine.runner import build_report, lint_paths
from doctor.lint.fix.fixer import replacements_for
from doctor.report.lint.sarif import render_sarif

SCHEMA = json.loads((Path(__file__).parent.parent / "data" / "sarif-schema-2.1.0.json").read_text())

TEXT = """\
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(net)
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    for batch in loader:
        model(batch).sum().backward()
if dist.get_rank() == 0:
    dist.barrier()
"""


def sarif(folder, text=TEXT, name="train.py", settings=None):
    from jsonschema import validate  # here: it takes a second, in every worker that only collects this module

    path = folder / name
    path.write_text(text)
    asked = lint_request(settings or Settings())
    verdicts = lint_paths([folder], asked)
    report = build_report(verdicts, asked, started=time.time())
    document = json.loads(render_sarif(report, asked.book.rules, replacements_for(verdicts, asked)))
    validate(document, SCHEMA)
    return document["runs"][0]


def of_rule(run, rule_id):
    (found,) = [one for one in run["results"] if one["ruleId"] == rule_id]
    return found


def test_a_result_says_where_and_which_rule(tmp_path):
    run = sarif(tmp_path)
    found = of_rule(run, "CODE005")
    assert run["tool"]["driver"]["rules"][found["ruleIndex"]]["id"] == "CODE005"
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == (tmp_path / "train.py").as_uri()
    assert place["region"]["startLine"] == TEXT[: TEXT.index("dist.barrier")].count("\n") + 1
    assert place["region"]["startColumn"] == 5
    assert place["region"]["snippet"]["text"].strip() == "dist.barrier()"
    assert found["level"] == "error"


def test_the_flow_of_a_finding(tmp_path):
    (flow,) = of_rule(sarif(tmp_path), "CODE005")["codeFlows"]
    steps = [one["location"] for one in flow["threadFlows"][0]["locations"]]
    lines = [one["physicalLocation"]["region"]["startLine"] for one in steps]
    assert lines == [TEXT[: TEXT.index(code)].count("\n") + 1 for code in ("if dist.get_rank", "dist.barrier")]
    assert steps[1]["message"]["text"] == "barrier: waits for all ranks"


def test_every_rule_is_described(tmp_path):
    rules = sarif(tmp_path)["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} == set(load_rules().ids())
    assert all(rule["help"]["markdown"] and rule["shortDescription"]["text"] for rule in rules)


def test_a_fix_replaces_lines(tmp_path):
    (fix,) = of_rule(sarif(tmp_path), "CODE011")["fixes"]
    (replacement,) = fix["artifactChanges"][0]["replacements"]
    region = replacement["deletedRegion"]
    lines = TEXT.splitlines(keepends=True)
    mended = [
        *lines[: region["startLine"] - 1],
        replacement["insertedContent"]["text"],
        *lines[region["endLine"] - 1 :],
    ]
    assert "    sampler.set_epoch(epoch)\n" in "".join(mended)


def test_fingerprints_stay_when_lines_move(tmp_path):
    first, moved = sarif(tmp_path), sarif(tmp_path, "\n\n" + TEXT)
    assert [one["partialFingerprints"] for one in first["results"]] == [
        one["partialFingerprints"] for one in moved["results"]
    ]
    twice = sarif(tmp_path, TEXT + TEXT[TEXT.index("if dist") :])
    prints = [one["partialFingerprints"]["rankdoctorLine/v1"] for one in twice["results"]]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(("where", "kind"), [("comment", "inSource"), ("settings", "external")])
def test_what_is_ignored_is_suppressed(tmp_path, where, kind):
    text = (
        TEXT.replace("dist.barrier()", "dist.barrier()  # doctor: ignore[CODE005] known")
        if where == "comment"
        else TEXT
    )
    entries = (IgnoreEntry("CODE005", "known", by="doctor.toml:3"),) if where == "settings" else ()
    (suppression,) = of_rule(sarif(tmp_path, text, settings=Settings(ignore=entries)), "CODE005")["suppressions"]
    assert (suppression["kind"], suppression["justification"]) == (kind, "known")


def test_what_was_passed_over_is_told(tmp_path):
    (tmp_path / "old.py").write_text("print 'DistributedSampler'\n")
    (notification,) = sarif(tmp_path, name="ä b.py")["invocations"][0]["toolExecutionNotifications"]
    assert "skipped" in notification["message"]["text"]
    assert notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("/old.py")
