"""A shell script is read as what it sets and what it starts."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.lint.launch.partial_text import is_known, names_in, shown
from doctor.lint.launch.shell.lexer import tokens
from doctor.lint.launch.shell.reader import MOST_COMMANDS, MOST_SCRIPTS, read_shell
from doctor.lint.launch.shell.statements import split_script
from doctor.lint.launch.shell.tokens import Operator
from tests.lab.cases import each_case
from tests.lab.speed import times_of_reference

EXAMPLES = Path(__file__).parents[2] / "examples"


def read(*lines):
    return read_shell("job.sh", "\n".join(lines) + "\n")


def chain(*lines):
    """The programs of the only command."""
    (launch,) = read(*lines).launches
    return list(launch.chain())


def last(*lines):
    return chain(*lines)[-1]


def test_words_know_their_lines_and_operators_end_commands():
    found = list(tokens("a 'b\nc' \\\n d; e # f\n"))
    words = [(word.line, word.end_line) for word in found if not isinstance(word, Operator)]
    assert words == [(1, 1), (1, 2), (3, 3), (3, 3)]
    assert [one.text for one in found if isinstance(one, Operator)] == [";", "\n"]


@pytest.mark.parametrize("opening", ["A=$(cmd", "A=(one", 'A="$(cmd', "A=$((1 +", "A=${B:-one", "cat <(cmd"])
def test_lines_continued_within_brackets_count(opening):
    closing = {"A=$((1 +": "2))", "A=${B:-one": "}", 'A="$(cmd': ')"'}.get(opening, ")")
    found = list(tokens(f"{opening} \\\n --a \\\n --b {closing}\nlast\n"))
    assert found[-2].line == 4


def test_variables_are_filled_in_as_far_as_the_file_sets_them():
    launch = last(
        "GPUS=8",
        'export OPTIONS="--nproc_per_node=$GPUS --nnodes ${NODES}"',
        "PORT=$((29500 + GPUS * 2))",
        "torchrun $OPTIONS --master_port ${PORT} '--rdzv_id=$GPUS' train.py",
    )
    assert launch.number("nproc-per-node") == 8
    assert launch.known_option("nnodes") is None
    assert names_in(launch.option("nnodes")) == ("NODES",)
    assert launch.known_option("master-port") == "29516"
    assert launch.known_option("rdzv-id") == "$GPUS"
    assert launch.script == "train.py"
    assert not launch.is_open


def test_a_default_counts_only_where_the_file_empties_the_variable():
    launch = last("A=", "B=2", "torchrun --nnodes=${A:-3} --node_rank=${B:-7} --max_restarts=${C:-1} x.py")
    assert (launch.number("nnodes"), launch.number("node-rank"), launch.number("max-restarts")) == (3, 2, None)


def test_arrays_give_their_words():
    launch = last("ARGS=(", "  --nproc_per_node 4 # don't", '  --rdzv_id "a b"', ")", 'torchrun "${ARGS[@]}" train.py')
    assert (launch.number("nproc-per-node"), launch.known_option("rdzv-id")) == (4, "a b")


@each_case(
    "lines",
    [
        ("N=4", "if [ -n $X ]; then", "N=8", "fi"),
        ("N=4", "[ -n $X ] && N=8"),
        ("N=4", "for N in 1 2; do :; done"),
        ("N=4", "case $X in a) N=8;; esac"),
        ("N=4", "f() {", "N=8", "}"),
        ("N=4", "read N"),
        ("N=4", "source other.sh"),
        ("N=4", "unset N"),
        ("N=$(nvidia-smi -L | wc -l)",),
        ("N=`nproc`",),
        ("N=$1",),
        ("N=${1:-8}",),
        ("N=${OTHER%x}",),
        ("N=$((X * 2))",),
        ("N=$[X * 2]",),
        ("N=$'\\x38'",),
        ("N=4", "let N=N+4"),
        ("N=4", "((N++))"),
        ("N=4", "((--N))"),
        ("N=4", "(( N *= 2 ))"),
        ("N='number of your GPUs'",),
        ("N='<gpus>'",),
        ("N=xxx",),
    ],
)
def test_what_may_hold_something_else_is_not_known(lines):
    launch = last(*lines, "torchrun --nproc_per_node=$N train.py")
    assert launch.option("nproc-per-node") is not None
    assert launch.known_option("nproc-per-node") is None


@pytest.mark.parametrize("value", ["$[2 + 2 * 3]", '"$[4 * 2]"', "$'8'", '$"8"'])
def test_old_arithmetic_and_quotes_behind_a_dollar_sign(value):
    assert last(f"N={value}", "torchrun --nproc_per_node=$N train.py").known_option("nproc-per-node") == "8"


@pytest.mark.parametrize("value", ["AWS Libfabric", "eth0 eth1", "xxl", "yours-1", "a<b", "node-x1", "master"])
def test_values_that_are_no_placeholders(value):
    launch = last(f"export NCCL_NET='{value}' MASTER_ADDR=master", "torchrun train.py")
    assert launch.setting("NCCL_NET") == value
    assert launch.setting("MASTER_ADDR") == "master"


def test_sourcing_an_environment_changes_nothing_of_interest():
    assert last("N=4", "source ~/.bashrc", "source env/bin/activate", "torchrun --nproc_per_node=$N x.py").number(
        "nproc-per-node"
    )


def test_a_word_that_can_not_be_told_may_hold_options():
    assert last("torchrun $ARGS train.py").is_open
    assert last('torchrun "$@"').is_open
    assert not last("torchrun --nnodes $N train.py").is_open


def test_here_documents_and_comments_start_nothing():
    file = read("cat <<'EOF' > x.sh", "torchrun a.py", "EOF", "# torchrun b.py", "cat <<-END", "\tsrun c", "\tEND")
    assert not file.launches


@each_case(
    ("line", "programs"),
    [
        ("nohup torchrun train.py > log 2>&1 &", ["torchrun"]),
        ("time env A=1 python3.11 -u -m torch.distributed.run train.py", ["torchrun"]),
        ("python -m torch.distributed.launch --use_env train.py", ["torchrun"]),
        ("python -m accelerate.commands.launch train.py", ["accelerate"]),
        ("srun -N2 --ntasks 4 -l singularity exec --nv image.sif python train.py", ["srun", "python"]),
        ("srun bash -c 'cd x && torchrun --nnodes=2 train.py'", ["srun", "torchrun"]),
        ("srun bash -c 'python prepare.py; torchrun --nnodes=2 train.py'", ["srun", "torchrun"]),
        ("srun bash -c 'if $A; then torchrun a.py; else torchrun b.py; fi'", ["srun", "other"]),
        ("mpirun -np 4 --mca btl self,tcp -x NCCL_DEBUG=INFO python train.py", ["mpirun", "python"]),
        ("conda run -n env accelerate launch --multi_gpu train.py", ["accelerate"]),
        ("uv run torchrun train.py", ["torchrun"]),
        ("lightning run model --devices=2 train.py", ["fabric"]),
        ("eval 'torchrun train.py'", ["torchrun"]),
        ("CUDA_VISIBLE_DEVICES=0 ./train.py", ["python"]),
        ("(cd x; torchrun train.py)", ["torchrun"]),
        ("if true; then torchrun train.py; fi", ["torchrun"]),
        ("bash run.sh", ["other"]),
        ("$LAUNCHER train.py", ["other"]),
    ],
)
def test_programs_are_found_behind_wrappers(line, programs):
    assert [one.program for one in chain(line)] == programs


@pytest.mark.parametrize(
    "line",
    [
        "echo torchrun train.py",
        "cd src",
        "pip install torch",
        "python -c 'import torch'",
        "lightning --help",
        "ls -l *.py",
    ],
)
def test_other_commands_are_nothing(line):
    assert not read(line).launches


def test_options_of_every_spelling():
    srun = chain("srun -N2 -n 16 -c4 --gpus-per-task=1 --exclusive --label python t.py")[0]
    assert dict(srun.options) == {
        "nodes": "2",
        "ntasks": "16",
        "cpus-per-task": "4",
        "gpus-per-task": "1",
        "exclusive": "true",
        "label": "true",
    }
    torchrun = last("torchrun --nproc-per-node 2 --standalone --nproc_per_node=4 -m pkg.train --nnodes 9")
    assert dict(torchrun.options) == {"nproc-per-node": "4", "standalone": "true", "module": "true"}
    assert (torchrun.script, torchrun.arguments) == ("pkg.train", ("--nnodes", "9"))


def test_the_environment_of_a_program():
    file = read(
        "A=1",
        "export B=2 C=$A",
        "export A",
        "D=4",
        "B=3 E=5 python train.py",
        "srun --export=ALL,F=6 bash -c 'G=7 python train.py'",
    )
    first, second = file.launches
    assert {name: one.value for name, one in first.settings.items()} == {"A": "1", "B": "3", "C": "1", "E": "5"}
    inner = list(second.chain())[-1]
    assert {name: one.value for name, one in inner.settings.items()} == {
        "A": "1",
        "B": "2",
        "C": "1",
        "F": "6",
        "G": "7",
    }
    exported = {one.name for one in file.settings if one.is_exported}
    assert exported == {"A", "B", "C", "E", "F", "G"}


def test_a_task_fills_in_its_own_numbers():
    outside = last("#SBATCH -N2", "srun torchrun --node_rank=$SLURM_NODEID t.py").option("node-rank")
    inside = last("#SBATCH -N2", "srun bash -c 'torchrun --node_rank=$SLURM_NODEID t.py'").option("node-rank")
    escaped = last("#SBATCH -N2", 'srun bash -c "torchrun --node_rank=\\$SLURM_NODEID t.py"').option("node-rank")
    assert names_in(outside) == ("SLURM_NODEID",)
    assert names_in(inside) == names_in(escaped) == ("step.SLURM_NODEID",)
    assert shown(inside) == shown(outside) == "$SLURM_NODEID"


def test_commands_know_where_they_stand():
    file = read(
        "torchrun \\", "  --nnodes=1 \\", "  train.py", "for i in 1 2; do", "  torchrun $i.py &", "  wait", "done"
    )
    first, second = file.launches
    assert (first.place.line, first.place.end_line, first.in_loop) == (1, 3, False)
    assert (second.place.line, second.in_loop, second.in_background) == (5, True, True)
    assert file.waits == file.waits_in_loops == (6,)


def test_headers_of_other_schedulers_are_said_not_to_be_read():
    assert "#PBS" in read("#!/bin/bash", "#PBS -l select=2", "python train.py").notes[0]


def test_doubling_again_and_again_ends():
    lines = [
        "A=xxxxxxxxxxxxxxxx",
        *["A=$A$A"] * 60,
        "B=(1 2)",
        *['B=("${B[@]}" "${B[@]}")'] * 60,
        "torchrun $A ${B[@]} x.py",
    ]
    assert last(*lines).is_open


def test_scripts_in_scripts_end():
    text = 'A=\'eval "$A"; eval "$A"\'\neval "$A"\n' + "bash -c 'torchrun x.py'\n" * (2 * MOST_SCRIPTS)
    assert len(read_shell("x.sh", text).launches) <= MOST_SCRIPTS


def test_very_long_scripts_are_read_in_part_and_it_is_said():
    file = read_shell("x.sh", "export A=1\n" * (MOST_COMMANDS + 10))
    assert len(file.settings) == MOST_COMMANDS
    assert str(MOST_COMMANDS) in file.notes[-1]


@pytest.mark.parametrize("piece", ["(", "${", '"$(', "`", "A=(", "$((", "<<E\n", "${A:-", "'\n", "bash -c '"])
def test_brackets_without_end_do_not_hang(piece):
    assert times_of_reference(lambda: read_shell("x.sh", piece * 5001)) < 500


PIECES = [
    *(
        "torchrun ",
        "srun ",
        "bash -c ",
        "export ",
        "if ",
        "fi ",
        "for ",
        "do ",
        "done ",
        "case ",
        "esac ",
        "<<E\n",
        "E\n",
    ),
    *(
        "A=",
        "$A",
        "${A:-",
        "}",
        '"',
        "'",
        "\\",
        "\n",
        "(",
        ")",
        "$(",
        "`",
        "#",
        "&",
        "|",
        ";",
        "$((",
        "))",
        " ",
        "-n",
        "1",
    ),
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | st.text(max_size=200))
def test_nothing_breaks_the_reader(text):
    file = read_shell("x.sh", text)
    for setting in file.settings:
        assert setting.place.line >= 1
        assert is_known(setting.value) or names_in(setting.value) is not None
    assert split_script(text).doubtful is not None
