"""A launcher is one row of the table: its command line, numbers, endpoint and findings in launch files follow."""

import json
import subprocess
import sys

# The table is extended before anything else reads it, as an edit of the file would.
READ = """
import json
import sys
from doctor.knowledge import launchers as table

table.LAUNCHERS += (
    table.Launcher(
        "quokka",
        command=table.LaunchCommand(
            "quokka",
            calls=("quokka start",),
            modules=("quokka.start",),
            options=table.OptionSyntax(("verbose",), {"H": "hosts"}),
            processes=("per_host",),
            hosts="hosts",
            node_rank="host_rank",
            master="leader",
            port="leader_port",
        ),
    ),
    table.Launcher(
        "wombat",
        command=table.LaunchCommand(
            "wombat", calls=("wombat",), options=table.OptionSyntax(()), starts="tasks", variables=("--set", ",")
        ),
    ),
)

from doctor.lint.engine.registry import builtin_rules
from doctor.lint.launch import process_launches as numbers
from doctor.lint.launch.file_type import read_launch_file

file = read_launch_file("job.sh", sys.argv[1])
starts = list(numbers.starts_of(file))
rules = [rule for rule in builtin_rules() if isinstance(file, rule.reads)]
print(json.dumps({
    "programs": [[one.program for one in launch.chain()] for launch in file.launches],
    "hosts": [numbers.hosts_of(start.launch) for start in starts],
    "processes": [numbers.processes_of(start.launch) for start in starts],
    "endpoints": [[numbers.endpoint_of(start.launch), numbers.port_of(start.launch)] for start in starts],
    "outer": [start.outer.program if start.outer else None for start in starts],
    "colors": [start.launch.setting("COLOR") for start in starts],
    "findings": [[rule.id, found.place.line, found.summary] for rule in rules for found in rule.judge(file)],
}))
"""

SCRIPT = """\
quokka start --verbose -H 4 --per-host=8 --leader 10.0.0.1 --leader_port 29500 train
wombat --nodes 2 --set COLOR=red,A=b quokka start --hosts 2 --host_rank=2 train
python -m quokka.start --leader=localhost --hosts=2 train
quokka stop
"""


def test_a_new_launcher_is_one_row() -> None:
    command = [sys.executable, "-c", READ, SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(done.stdout) == {
        "programs": [["quokka"], ["wombat", "quokka"], ["quokka"]],
        "hosts": [4, 2, 2],
        "processes": [8, None, None],
        "endpoints": [["10.0.0.1", "29500"], [None, None], ["localhost", None]],
        "outer": [None, "wombat", None],
        "colors": [None, "red", None],
        "findings": [
            ["ENV002", 2, "The node rank is 2, but the 2 hosts are numbered 0-1"],
            ["NET005", 3, "quokka starts on 2 hosts with --leader=localhost: each uses itself as the master"],
        ],
    }
