"""Variables that a script exports when it starts no more programs are read by none."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("NCCL004", "NCCL011")))
WORKER = """\
#!/bin/bash
keep() { while :; do sleep 3600 || sleep 60; done; }
debug() {
    export NCCL_ASYNC_ERROR_HANDLING=0
    keep
}
if [ "$LOCAL_RANK" = 0 ]; then
    exec cuda-gdb --args python train.py
else
    python train.py
    rc=$?
    if (( rc != 0 )); then
        echo "failed: $rc"
        debug
    fi
    exit 0
fi
"""
PROJECT = {
    "train.py": "import torch\nfrom lightning import Trainer\n",
    "other.py": "import train\n",
    "README.md": "Run `bash worker.sh`.\n",
}


def rules_in(folder, text, **others):
    found = findings_in(folder, {**PROJECT, **others, "worker.sh": text}, BOOK, preview=True)
    return {rule for rule, _ in found}


def test_an_export_after_which_only_sleep_runs_is_left_out(tmp_path):
    assert rules_in(tmp_path, WORKER) == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("exit 0", "python evaluate.py"),
        ("while :; do sleep 3600", "while :; do python train.py"),
        ("    keep\n", '    $CMD "$@"\n'),
        ("    keep\n", "    echo $(python train.py)\n"),
        ("if [", "trap 'python evaluate.py' EXIT\nif ["),
        ('        echo "failed', '        debug\n        python retry.py\n        echo "failed'),
        ("    if ((", "    while read line; do debug; python x.py; done\n    if (("),
        ("        debug\n", "        timeout 9 debug\n        source restart.sh\n"),
        ("#!/bin/bash\n", ""),
    ],
)
def test_one_that_a_program_may_read_is_kept(tmp_path, old, new):
    assert old in WORKER
    assert rules_in(tmp_path, WORKER.replace(old, new)) == {"NCCL004", "NCCL011"}


def test_a_script_that_others_source_sets_variables_for_them(tmp_path):
    sourced = {"run.sh": "#!/bin/bash\nsource ./worker.sh\ntorchrun train.py\n"}
    assert rules_in(tmp_path, WORKER, **sourced) == {"NCCL004", "NCCL011"}


def test_a_script_that_starts_nothing_before_is_one_of_settings(tmp_path):
    text = "#!/bin/bash\nexport NCCL_ASYNC_ERROR_HANDLING=0\necho ready\n"
    assert rules_in(tmp_path, text) == {"NCCL004", "NCCL011"}


REMOTE = """\
export NCCL_ASYNC_ERROR_HANDLING=0
THE-HOME="not set"
hosts=`cat $1 | cut -d " " -f1`
for host in $hosts; do
    echo "on $host"
    ssh $host \\
        "cd $PWD && export WANDB_MODE=offline && \\
        torchrun --nproc-per-node=8 train.py" &
done
"""


def test_ssh_passes_no_variables_on(tmp_path):
    assert rules_in(tmp_path, REMOTE) == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ssh $host", "ssh -o SendEnv=NCCL_ASYNC_ERROR_HANDLING $host"),
        ("cd $PWD &&", "cd $PWD && export NCCL_ASYNC_ERROR_HANDLING=$NCCL_ASYNC_ERROR_HANDLING &&"),
        ("ssh $host", "env > vars && scp vars $host: ; ssh $host"),
        ("ssh $host", "pdsh -w $host"),
        ("ssh $host", "bash -c"),
        ("done\n", "done\ntorchrun --nproc-per-node=8 evaluate.py\n"),
        ("done\n", "done\n$COMMAND\n"),
        ("`cat", "`python hosts.py"),
    ],
)
def test_variables_that_may_get_to_programs_are_kept(tmp_path, old, new):
    assert old in REMOTE
    assert rules_in(tmp_path, REMOTE.replace(old, new)) == {"NCCL004", "NCCL011"}
