"""What is published: metadata, dependency groups, and files that other programs read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import lowest_versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout")


@pytest.fixture(scope="module")
def declared():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements):
    return {Requirement(one).name for one in requirements if isinstance(one, str)}


def test_the_metadata_names_nobody_and_no_place_that_does_not_exist(declared):
    project = declared["project"]
    assert project["authors"] == [{"name": "rankdoctor contributors"}]
    assert "urls" not in project
    assert project["license"] == "Apache-2.0"
    assert not [one for one in project["classifiers"] if one.startswith("License ::")], "PEP 639"


def test_the_page_of_an_index_has_no_link_to_a_file_that_it_lacks():
    core = pytest.importorskip("hatchling.metadata.core")
    manager = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    published = core.ProjectMetadata(str(ROOT), manager).core.readme
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.compile(r"\]\((?!https?:|#)[^)]+\)")
    assert links.search(text)
    assert not links.search(published)
    assert "My job hangs now (`docs/how-to/my-job-hangs-now.md`)" in published
    assert "`PLUGINS.md`" in published
    assert published.count("\n## ") == text.count("\n## ")


def test_what_development_needs_is_not_published(declared):
    assert set(declared["project"]["optional-dependencies"]) == {
        "torch",
        "lightning",
        "ray",
        "transformers",
        "prometheus",
        "fix",
        "attach",
        "otel",
    }
    groups = declared["dependency-groups"]
    assert {"include-group": "release"} in groups["dev"]
    pins = {Requirement(line).name for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"}
    assert names(groups["dev"]) | names(groups["release"]) | names(declared["project"]["dependencies"]) <= pins | {
        "libcst",
        "tomli",
    }


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.14"])
def test_each_python_has_one_release_of_each_package(python):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    pins = [Requirement(line) for line in lines]
    chosen = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert sorted(chosen) == sorted({pin.name for pin in pins})
    assert all(str(pin.specifier).startswith("==") for pin in pins)


def test_every_dependency_has_a_lower_bound_that_is_tried():
    found = lowest_versions.lines(lowest_versions.dependencies()).splitlines()
    assert len(found) == len(lowest_versions.dependencies()) > 10
    assert "rich==14" in found
    assert 'tomli==2; python_version < "3.11"' in found
    with pytest.raises(ValueError, match="rich<15: one lower bound"):
        lowest_versions.lowest("rich<15")


def test_the_scripts_of_tests_name_no_extra_that_is_gone():
    texts = [
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "run", ROOT / ".ci" / "run", ROOT / "README.md")
    ]
    extras = {one for text in texts for found in re.findall(r"\.\[([a-z,]+)\]", text) for one in found.split(",")}
    assert extras <= {"attach", "lightning"}
