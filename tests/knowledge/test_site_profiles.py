"""Site profiles are complete, hold valid values, and compare as NCCL reads them."""

import re

import pytest

from doctor.collectors.software.environment import is_setting
from doctor.knowledge.environment_variables import known
from doctor.knowledge.sites.profiles import Recommendation, site_profiles
from doctor.knowledge.variable_values import fault

PROFILES = site_profiles()
VALUES = [
    (f"{profile}: {name}", name, value)
    for profile, site in PROFILES.items()
    for name, one in site.recommendations()
    for value in (one.value, *one.alternatives)
]


def test_there_are_enough_and_each_names_its_system_and_address():
    assert len(PROFILES) >= 30
    for name, profile in PROFILES.items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name), name
        assert name != "list"
        assert profile.title, name
        assert profile.source.startswith("https://"), name
        assert profile.variables, name
    assert len({profile.title for profile in PROFILES.values()}) == len(PROFILES)


def test_every_variable_is_collected():
    assert [where for where, name, _ in VALUES if not is_setting(name)] == []


def test_no_recommended_value_is_at_fault():
    assert [(where, value, problem) for where, name, value in VALUES if (problem := fault(name, value))] == []


def test_no_variable_was_removed():
    """A profile that recommends what a release no longer reads is out of date, or meant for older releases alone."""
    removed = {where for where, name, _ in VALUES if (info := known(name)) and info.superseded and not info.still_read}
    assert removed == {"aws-efa: NCCL_SHM_USE_CUDA_MEMCPY"}


@pytest.mark.parametrize(
    ("name", "recommended", "value", "is_met"),
    [
        ("NCCL_PROTO", Recommendation("Simple"), "simple", True),
        ("NCCL_BUFFSIZE", Recommendation("8388608"), "0x800000", True),
        ("NCCL_NET_GDR_LEVEL", Recommendation("3", ("PHB",)), "PHB", True),
        ("NCCL_NET_GDR_LEVEL", Recommendation("3", ("PHB",)), "PIX", False),
        ("FI_CXI_RX_MATCH_MODE", Recommendation("software"), "Software", False),
        ("LD_LIBRARY_PATH", Recommendation("/opt/a/lib"), "/usr/lib:/opt/a/lib/", True),
        ("LD_LIBRARY_PATH", Recommendation("/opt/a/lib:/opt/b"), "/opt/a/lib:/opt/b2", False),
    ],
)
def test_values_are_compared_as_they_are_read(name, recommended, value, is_met):
    assert recommended.is_met_by(name, value) is is_met
