"""The alert rules for Prometheus: their form, promtool's opinion, and what a real run exports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from doctor.core.check_registry import load_registry
from doctor.monitor.sinks.grafana import alert_rules
from tests.lab.needs import ROOT
from tests.lab.ports import free_port
from tests.lab.speed import patience

RULES = [rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
UNIT_TESTS = Path(__file__).with_name("alerts_unit.yml")
NEEDED = {"Hang", "Straggler", "NonFiniteLoss", "InputBound", "LostTime"}
PROMTOOL = shutil.which("promtool")

PROGRAM = """
import sys, time, urllib.request
import torch, doctor

class Batches:
    def __iter__(self):
        ends = time.monotonic() + 19.0  # longer than one round of evaluation
        while time.monotonic() < ends:
            time.sleep(0.03)
            yield torch.ones(2, 2)

model = torch.nn.Linear(2, 2)
with doctor.watch(dirpath=sys.argv[1], prometheus_port=int(sys.argv[2])) as watch:
    watch.model(model)
    for batch in watch.loader(Batches()):
        model(batch).sum().backward()
        watch.step()
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/metrics", timeout=30) as answer:
        sys.stdout.write(answer.read().decode())
"""
"""A loop whose loader is slow: the wait is a finding, and lost time."""


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"\brankdoctor_\w+", expression))


def test_rules_have_the_documented_fields_alone() -> None:
    """https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/"""
    document = yaml.safe_load(alert_rules())
    assert set(document) == {"groups"}
    assert {f"Rankdoctor{name}" for name in NEEDED} <= {rule["alert"] for rule in RULES}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert _metrics(rule["expr"])


def test_every_check_that_they_name_exists() -> None:
    known = {check.id for check in load_registry().checks}
    named = set(re.findall(r"\b[A-Z]{3,4}\d{3}\b", alert_rules()))
    assert named
    assert named <= known


def test_every_metric_that_they_name_is_exported_by_a_real_run(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(free_port())],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    samples = [sample for family in parser.text_string_to_metric_families(done.stdout) for sample in family.samples]
    exported = {sample.name for sample in samples}
    assert set().union(*(_metrics(rule["expr"]) for rule in RULES)) <= exported
    (share,) = (sample.value for sample in samples if sample.name == "rankdoctor_lost_time_share")
    assert share > 0.5
    assert "RUN005" in {sample.labels["id"] for sample in samples if sample.name == "rankdoctor_findings"}
    assert {sample.labels["cause"] for sample in samples if sample.name == "rankdoctor_lost_seconds"} >= {"data"}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (of Prometheus)")
@pytest.mark.parametrize("action", ["check", "test"])
def test_promtool_accepts_them_and_they_fire_when_they_should(action: str, tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(alert_rules())
    (tmp_path / "unit.yml").write_text(UNIT_TESTS.read_text())
    file = {"check": "alerts.yml", "test": "unit.yml"}[action]
    done = subprocess.run(
        [str(PROMTOOL), action, "rules", str(tmp_path / file)], capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_are_printed_by_a_command() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "doctor.monitor.sinks.grafana", "alerts"],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
    )
    assert printed.stdout == alert_rules()
