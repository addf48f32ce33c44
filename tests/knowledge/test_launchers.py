"""A launcher is one row of the table: identification, rendezvous, exclude lists, redaction and logs follow from it."""

import itertools
import json
import subprocess
import sys
from collections import Counter

from doctor.knowledge.launcher_index import BY_PRECEDENCE, function_of
from doctor.knowledge.launchers import LAUNCHERS

# The table is extended before anything else reads it, as an edit of the file would.
ADD_A_ROW = """
from doctor.knowledge import launchers

launchers.LAUNCHERS += (
    launchers.Launcher(
        "quokka",
        precedence=45,
        detected_by=("QUOKKA_TASK",),
        marks=("QUOKKA_TASK",),
        rank=("QUOKKA_TASK",),
        world_size=("QUOKKA_TASKS",),
        local_rank=("QUOKKA_LOCAL_TASK",),
        local_world_size=("QUOKKA_LOCAL_TASKS",),
        counts=launchers.ProcessCount("QUOKKA_TASKS", "QUOKKA_TASK", ("QUOKKA_TASKS",)),
        recognized_by="counts",
        script_variables=("QUOKKA_TASK", "QUOKKA_TASKS"),
        exports=("TORCH_NCCL_ASYNC_ERROR_HANDLING=1",),
        program="quokka run",
        prefixes=("QUOKKA_",),
        job_variables=("QUOKKA_JOB",),
        job_names=("QUOKKA_TITLE",),
        node_list=("QUOKKA_HOSTS",),
        node_list_source="the host list of quokka",
        folds_hosts=False,
        status_command="quokka status",
        daemon_log="/var/log/quokkad.log",
        processes=("quokkad",),
        log_prefixes=(r"\\[quokka task (?P<rank>\\d{1,7})@(?P<host>[\\w.-]+)\\] ?",),
    ),
)
"""

FOLLOW = """
import json
import sys
from doctor.analysis.launch_origin import direct_launch, inner_launcher
from doctor.knowledge.launcher_index import LOCAL_RANKS
from doctor.cluster.hostlist import as_hostlist
from doctor.cluster.gather.plan import store_endpoint
from doctor.cluster.rendezvous.process_identity import process_identity
from doctor.collectors.launch.launcher import launch_facts
from doctor.knowledge.launcher_index import JOB_NAMES, PROCESSES, SCRIPT_VARIABLES
from doctor.postmortem.logs.prefixes import parse_line
from doctor.postmortem.logs.timestamps import Calendar
from doctor_checks.launch.rank_absent import _fix as advice_on_absent_host

environ = json.loads(sys.argv[1])
launch = launch_facts(environ)
identity = process_identity(environ)
endpoint = store_endpoint(environ, launch.launcher, identity)
other_job = process_identity({**environ, "QUOKKA_JOB": "other"})
line = parse_line("[quokka task 5@node2] loss 3.1", Calendar())
print(json.dumps({
    "launcher": launch.launcher,
    "ranks": [launch.rank, launch.world_size, launch.local_rank, launch.local_world_size],
    "running_together": launch.running_together,
    "variables": [variable.name for variable in launch.variables],
    "identity": [identity.number, identity.world_size, identity.spans_hosts],
    "key_names_the_job": identity.key != other_job.key,
    "endpoint": [endpoint.names, endpoint.hosted, endpoint.source],
    "inner": inner_launcher(launch),
    "direct": direct_launch(launch),
    "local_rank_name": "QUOKKA_LOCAL_TASK" in LOCAL_RANKS,
    "job_name": "QUOKKA_TITLE" in JOB_NAMES,
    "process": "quokkad" in PROCESSES,
    "script_variables": ["QUOKKA_TASK" in SCRIPT_VARIABLES[0], "QUOKKA_TASKS" in SCRIPT_VARIABLES[1]],
    "excluded": as_hostlist(["node2", "node1"], launch.launcher),
    "absent_host": "`quokka status`" in advice_on_absent_host("node2", False, launch.launcher),
    "line": [line.origin.rank, line.origin.host, line.text],
}))
"""

ENVIRON = {
    "QUOKKA_TASK": "5",
    "QUOKKA_TASKS": "8",
    "QUOKKA_LOCAL_TASK": "1",
    "QUOKKA_LOCAL_TASKS": "4",
    "QUOKKA_JOB": "77",
    "QUOKKA_HOSTS": "node[1-2]",
}


def followed(*scripts: str) -> dict[str, object]:
    command = [sys.executable, "-c", "".join(scripts), json.dumps(ENVIRON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_launcher_is_one_row() -> None:
    assert followed(ADD_A_ROW, FOLLOW) == {
        "launcher": "quokka",
        "ranks": [5, 8, 1, 4],
        "running_together": "QUOKKA_TASKS",
        "variables": sorted(ENVIRON),
        "identity": [5, 8, True],
        "key_names_the_job": True,
        "endpoint": [["node1"], "there", "the host list of quokka"],
        "inner": "quokka run",
        "direct": ["quokka run", 5, 8, "QUOKKA_TASK", "QUOKKA_TASKS", 4],
        "local_rank_name": True,
        "job_name": True,
        "process": True,
        "script_variables": [True, True],
        "excluded": "node1,node2",
        "absent_host": True,
        "line": [5, "node2", "loss 3.1"],
    }


def test_without_its_row_the_launcher_is_unknown() -> None:
    identified = """
import json, sys
from doctor.cluster.rendezvous.process_identity import process_identity
from doctor.collectors.launch.launcher import launch_facts

environ = json.loads(sys.argv[1])
print(json.dumps([launch_facts(environ).launcher, process_identity(environ)]))
"""
    assert followed(identified) == ["none", None]


def test_functions_that_rows_name_exist() -> None:
    references = [name for row in LAUNCHERS for name in (row.detector, row.claim_reader, row.endpoint) if name]
    assert references
    assert all(callable(function_of(reference)) for reference in references)


def test_names_and_precedences_are_unique() -> None:
    names = Counter(name for row in LAUNCHERS for name in {row.name, row.claim})
    assert max(names.values()) == 1
    for row, following in itertools.pairwise(BY_PRECEDENCE):
        assert row.precedence != following.precedence, f"{row.name} and {following.name} have one precedence"
