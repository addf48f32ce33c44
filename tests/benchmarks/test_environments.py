"""The data of the environments has the form that the benchmark reads, and a finding is found by id and words."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import environments
from environments import SETS, read, read_entries, read_rows

from doctor.knowledge.sites.profiles import site_profiles
from tests.faults.stage import Outcome

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CAUSED = {"real", "setting", "recorded tree", "driver library"}
PLAYBOOKS = {path.stem.split("-")[0] for path in (Path(__file__).parents[2] / "playbooks").rglob("*.md")}


def test_sizes_and_unique_names():
    sizes = {file: len(read(file)) for files in SETS.values() for file in files}
    names = [entry["name"] for file in sizes for entry in read(file)]
    assert sizes == {
        "recommended": 151,
        "faults": 111,
        "recommended_2": 71,
        "faults_2": 65,
        "recommended_3": 82,
        "faults_3": 54,
        "recommended_4": 87,
        "faults_4": 61,
        "recommended_5": 86,
        "faults_5": 60,
    }
    assert len(names) == len(set(names))


def test_no_set_has_a_source_of_an_earlier_one():
    sources = [{entry["source"] for file in files for entry in read_entries(file)} for files in SETS.values()]
    assert sum(map(len, sources)) == len(set().union(*sources))


@pytest.mark.parametrize("file", [file for files in SETS.values() for file in files])
def test_every_entry_has_a_source_a_machine_and_variables(file: str):
    machines = read("machines")
    for entry in read_entries(file):
        assert entry["source"], entry["name"]
        assert entry["machine"] in machines, entry["name"]
        assert all(VARIABLE.fullmatch(name) for name in entry["variables"]), entry["name"]
        assert all(isinstance(value, str) for value in entry["variables"].values()), entry["name"]
        assert file.startswith("faults") or entry["variables"], entry["name"]


def test_every_site_profile_is_a_healthy_environment():
    assert {entry.get("profile") for entry in read("recommended")} - {None} == set(site_profiles())


def test_an_entry_of_a_profile_adds_to_its_variables():
    row = next(entry for entry in read_entries("recommended") if entry["name"] == "gcp-a3high-slurm-nemo")
    variables = {name: one.value for name, one in site_profiles()["gcp-tcpx-slurm"].recommendations()}
    assert row["variables"] == {**variables, "LD_LIBRARY_PATH": "/usr/local/tcpx/lib64"}


@pytest.mark.parametrize("file", [faults for _, faults in SETS.values()])
def test_every_fault_names_ids_and_how_it_is_caused(file: str):
    for entry in read(file):
        assert entry["ids"], entry["name"]
        assert PLAYBOOKS.issuperset(entry["ids"]), entry["name"]
        assert entry["caused"] in CAUSED, entry["name"]
        assert entry["variables"] or entry.keys() & {"shell", "setup", "changes"}, entry["name"]


def test_a_fault_is_found_by_id_and_words():
    row = next(row for row in environments.read_rows("faults") if row.name == "kmp-affinity")
    finding = {"severity": "warning", "summary": "KMP_AFFINITY binds all ranks to the same CPUs"}
    found = environments.found_in(row, Outcome(0, {"results": [{"id": "ENV012", "findings": [finding]}]}))
    other = environments.found_in(row, Outcome(0, {"results": [{"id": "NET007", "findings": [finding]}]}))
    silent = environments.found_in(
        row, Outcome(0, {"results": [{"id": "ENV012", "findings": [{**finding, "summary": ""}]}]})
    )
    assert (found, other, silent) == (["ENV012 (warning)"], [], [])


def test_paths_of_the_machine_move_to_the_home_of_the_process():
    row = next(row for row in read_rows("recommended") if row.name == "azure-ndv4-nccl")
    assert 'export NCCL_TOPO_FILE="$HOME"/root/opt/microsoft/ndv4-topo.xml' in row.play.hosts[0].processes[0].shell
