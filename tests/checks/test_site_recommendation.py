"""``doctor check --profile``: what differs from a profile is found variable by variable, and changes no exit code."""

import json

import pytest
from click.testing import CliRunner

from doctor import session
from doctor.cli.main import app
from doctor.core.check_registry import builtin_checks
from doctor.core.errors import UnusableError
from doctor.facts import Gpu, GpuFacts, SiteProfileFacts
from doctor.knowledge.sites.profiles import site_profiles
from doctor.testing import healthy

CHECK = next(check for check in builtin_checks() if check.id == "NCCL016")
TWO_HOSTS = healthy(2, 1).alter(GpuFacts, gpus=(Gpu(0, name="NVIDIA A10G"),))
"""Both conditions that recommendations have hold here."""
JUWELS = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}


def found(profile, **variables):
    job = TWO_HOSTS.environ(**variables).put(SiteProfileFacts(name=profile)).job()
    return list(CHECK.judge(job))


@pytest.mark.parametrize("profile", site_profiles())
def test_each_missing_variable_is_the_only_finding(profile):
    site = site_profiles()[profile]
    values = {name: one.value for name, one in site.recommendations()}
    assert found(profile, **values) == []
    for name in values:
        (finding,) = found(profile, **{other: value for other, value in values.items() if other != name})
        assert finding.summary.startswith(f"{name} is not set; ")
        assert len(finding.summary) <= 100
        assert finding.ranks == (0, 1)
        assert finding.evidence["source"] == site.source
        assert finding.fix.splitlines()[-1].startswith(f"export {name}=")


def run(monkeypatch, sketch, *arguments):
    monkeypatch.setattr(session, "collect", lambda *_, **__: sketch.job())
    return CliRunner().invoke(app, ["check", "--isolated", "--gather", "none", "--select", "NCCL016", *arguments])


def test_a_difference_is_reported_with_its_source_and_exit_code_0(monkeypatch):
    sketch = healthy(1, 1).environ(NCCL_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="ib0")
    result = run(monkeypatch, sketch, "--profile", "jsc-juwels-booster", "--format", "json", "--strict")
    (found,) = json.loads(result.stdout)["results"][0]["findings"]
    assert (result.exit_code, found["severity"]) == (0, "info")
    assert found["summary"] == "NCCL_SOCKET_IFNAME=eth0; the profile jsc-juwels-booster recommends ib0"
    assert found["evidence"]["source"] in result.stderr


def test_redaction_keeps_the_profile(monkeypatch):
    result = run(monkeypatch, healthy(1, 1), "--profile", "lumi", "--redact", "--format", "json")
    assert len(json.loads(result.stdout)["results"][0]["findings"]) == len(site_profiles()["lumi"].variables)


def test_without_a_profile_nothing_is_compared(monkeypatch):
    result = run(monkeypatch, healthy(1, 1), "--format", "json")
    (compared,) = json.loads(result.stdout)["results"]
    assert (compared["status"], compared["reason"]) == ("skip", "no site profile was chosen")


def test_a_name_that_is_not_known_ends_with_2_and_near_names():
    result = CliRunner().invoke(app, ["check", "--profile", "azure-ndv55"])
    assert isinstance(result.exception, UnusableError)  # exit code 2
    assert "did you mean azure-ndv5 or azure-ndv4" in str(result.exception)


def test_the_names_are_listed():
    text = CliRunner().invoke(app, ["check", "--profile", "list"])
    assert [line.split()[0] for line in text.stdout.splitlines()] == list(site_profiles())
    listed = json.loads(CliRunner().invoke(app, ["check", "--profile", "list", "--format", "json"]).stdout)
    assert listed["profiles"]["cscs-alps"]["source"].startswith("https://")
