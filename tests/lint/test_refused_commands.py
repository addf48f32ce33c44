"""CODE045: a command gives a program arguments that its parser refuses."""

import time

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE045"))
PARSER = """import argparse

def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("-bs", "--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--model", choices=["vit-b", "vit-l"])
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume")
    group.add_argument("--restart", action="store_true")
    parser.add_argument("--shift", type=float)
    return parser
"""
MAIN = """
if __name__ == "__main__":
    args = get_parser().parse_args()
"""
TRAIN = PARSER + MAIN


def found(folder, command, program=TRAIN, **files):
    texts = {"job.sh": f"#!/bin/bash\n{command}\n", "train.py": program}
    texts |= {f"{name}.py": text for name, text in files.items()}
    return [(one.severity.value, one.summary) for _, one in findings_in(folder, texts, BOOK)]


def summary(folder, command, program=TRAIN, **files):
    return [words for _, words in found(folder, command, program, **files)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("d --nproc 4", "`--nproc` is not declared by train.py"),
        ("d --batch_size 4 --worker 3", "`--batch_size` and 1 more are not declared by train.py"),
        ("d --lr high", "`high`, given for --lr of train.py, is not a number"),
        ("d -bs 4.5", "`4.5`, given for --batch-size of train.py, is not an integer"),
        ("d --layers 3 4 x", "`x`, given for --layers of train.py, is not an integer"),
        ("d --model vit-x", "--model of train.py does not accept `vit-x`"),
        ("d --amp=True", "--amp of train.py is a switch and takes no value: `True`"),
        ("d --amp True", "train.py takes no argument `True` in this place"),
        ("--lr 0.1", "train.py requires data, which the command does not give"),
        ("d --lr --amp", "--lr of train.py has too few or too many values (expected one argument)"),
        ("d --resume a.pt --restart", "--restart and --resume of train.py exclude each other"),
        ("d --re a.pt", "`--re` is an ambiguous option of train.py: --resume, --restart"),
        ("d $EXTRA --nproc=4", "`--nproc` is not declared by train.py"),
        ("d --lr $LR --nproc=$N", "`--nproc` is not declared by train.py"),
        ('"$@" --model vit-x', "--model of train.py does not accept `vit-x`"),
        ("--lr $LR --batch-size $BS", "train.py requires data, which the command does not give"),
    ],
)
def test_words_that_argparse_refuses(tmp_path, words, said):
    assert found(tmp_path, f"torchrun train.py {words}") == [("error", said)]


@pytest.mark.parametrize(
    "words",
    [
        "d --lr=0.1 -bs 3 --layers 1 2 --amp --no-ema",
        "d -bs 3 --shift -0.5 --shift=-1e-3",
        "d --batch 8 --mod vit-b",
        "--amp -- d",
        "d --lr $LR --layers $LAYERS --model $MODEL",
        'd --lr "$1" --batch-size "${BS:-8}"',
        "$DATA $FLAGS vit-b",
        "--lr $LR $MORE",
        "d --layers {1..4} --model vit-*",
        "d --batch-size BATCH_SIZE --lr <lr>",
        "d --help",
        "d ... --lr 0.1",
        "d --lr $UNSET_BY_USER",
        "d --$NAME 3",
    ],
)
def test_words_that_it_accepts_or_may_accept(tmp_path, words):
    assert found(tmp_path, f"UNSET_BY_USER=\ntorchrun train.py {words}") == []


def declared(text):
    return f'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--lr", type=float)\n{text}\n'


PARSE = "args = parser.parse_args()"
FOLLOWED = {
    "at the top": declared(PARSE),
    "in a function": declared("def main():\n    args = parser.parse_args()\nmain()"),
    "the whole command": declared("import sys\nargs = parser.parse_args(sys.argv[1:])"),
    "as a parameter": declared("def main(given=None):\n    parser.parse_args(given)\nmain()"),
    "inside another call": declared("args = vars(parser.parse_args())"),
    "of a parent": declared(
        "def made():\n    own = argparse.ArgumentParser(add_help=False)\n    own.add_argument('--s')\n    return own\n"
        "both = argparse.ArgumentParser('x', parents=[made()])\nargs = both.parse_args()"
    ),
    "with more options in a branch": declared(f"if parser:\n    parser.add_argument('--seed')\n{PARSE}"),
    "with the options of a function": declared(
        f"def add(one):\n    one.add_argument('--seed')\n    return one\nparser = add(parser)\n{PARSE}"
    ),
    "with a type that is unknown": declared(f"parser.add_argument('--x', type=eval, default=f())\n{PARSE}"),
    "in a decorated function": declared(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    parser.parse_args()\nmain()"
    ),
    "by another name of the method": declared(f"add = parser.add_argument\nadd('--seed')\n{PARSE}"),
    "unless a function is given words": declared(
        "def main(given=None):\n    if given is not None:\n        parser.parse_args(given)\n    else:\n"
        "        parser.parse_args()\nmain()"
    ),
    "with computed names": declared(
        f"def switch(group, name):\n    group.add_argument(f'--{{name}}')\n    group.add_argument('--no-' + name)\n"
        f"switch(parser, 'seed')\n{PARSE}"
    ),
    "caught": declared("try:\n    args = parser.parse_args()\nexcept KeyboardInterrupt:\n    pass"),
}
SILENT = {
    "unknown arguments": declared("args, rest = parser.parse_known_args()"),
    "other words": declared("args = parser.parse_args(['--lr', '3'])"),
    "options of a library": declared(f"add_options(parser)\n{PARSE}"),
    "options in a loop": declared(f"for name in NAMES:\n    parser.add_argument(name)\n{PARSE}"),
    "unknown names": declared(f"parser.add_argument(*NAMES)\n{PARSE}"),
    "a subcommand": declared(f"commands = parser.add_subparsers()\n{PARSE}"),
    "kept in an object": declared(f"self.parser = parser\n{PARSE}"),
    "in a branch": declared("if x:\n    args = parser.parse_args()"),
    "after a return in a branch": declared("def main():\n    if x:\n        return\n    parser.parse_args()\nmain()"),
    "changed words": declared(f"import sys\nsys.argv.remove('--x')\n{PARSE}"),
    "other words before": declared(f"import sys\nsys.argv = sys.argv[:1]\n{PARSE}"),
    "a class of its own": declared("class Own(argparse.ArgumentParser):\n    pass\nargs = Own().parse_args()"),
    "another library": "import configargparse\nparser = configargparse.ArgumentParser()\nparser.parse_args()\n",
    "a file of options": declared("").replace("Parser()", "Parser(fromfile_prefix_chars='@')").replace("@", "-")
    + PARSE,
    "an end that is caught": declared("try:\n    args = parser.parse_args()\nexcept SystemExit:\n    pass"),
    "another parser in a branch": declared(f"if x:\n    parser = argparse.ArgumentParser()\n{PARSE}"),
    "a global parser that a function extends": declared(
        f"def add():\n    parser.add_argument('--seed', nargs=N)\nif x:\n    add()\n{PARSE}"
    ).replace("--seed", "--foo"),
    "a method that is passed on": declared(f"read(parser.add_argument)\n{PARSE}"),
    "words that a function is given": declared(
        "def main(given=None):\n    if given is not None:\n        parser.parse_args(given)\nmain(['--lr', '3'])"
    ),
    "an own action": declared(f"parser.add_argument('--foo', action=Own)\n{PARSE}"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_parsers_that_are_followed(tmp_path, name):
    assert summary(tmp_path, "torchrun train.py --foo 3", FOLLOWED[name]) == ["`--foo` is not declared by train.py"]


@pytest.mark.parametrize("name", SILENT)
def test_parsers_that_may_accept_more(tmp_path, name):
    assert summary(tmp_path, "torchrun train.py --foo 3", SILENT[name]) == []


def test_parsers_of_other_modules(tmp_path):
    for at, line in enumerate(("from utils.options import get_parser", "from utils import get_parser")):
        program = f"import torch\n{line}\n{MAIN}"
        files = {"utils/options": PARSER, "utils/__init__": "from .options import get_parser\n"}
        said = summary(tmp_path / str(at), "torchrun train.py d --foo 3", program, **files)
        assert said == ["`--foo` is not declared by train.py"]
    imported = {"options": PARSER + "args = get_parser().parse_args()\n"}
    said = summary(tmp_path / "at_import", "torchrun train.py d --foo 3", "from options import args\n", **imported)
    assert said == ["`--foo` is not declared by train.py"]


LAUNCH = "python -m torch.distributed.launch --nproc_per_node=4 train.py"
REQUIRED = declared("parser.add_argument('--local_rank', type=int, required=True)\nargs, _ = parser.parse_known_args()")
RANK = declared(f'parser.add_argument("--local_rank", type=int)\n{PARSE}')


@pytest.mark.parametrize(
    ("command", "program", "torch", "severities"),
    [
        (LAUNCH, RANK, "", ["warning"]),
        (LAUNCH, RANK, "torch>=2.1", ["error"]),
        (LAUNCH, RANK, "torch==1.13.1", []),
        (LAUNCH, RANK.replace("--local_rank", "--local-rank"), "torch==1.13.1", ["error"]),
        (LAUNCH, RANK.replace("--local_rank", "--local-rank"), "", []),
        (LAUNCH, RANK.replace('"--local_rank"', '"--local-rank", "--local_rank"'), "", []),
        (LAUNCH, RANK.replace("type=int", "type=int, required=True"), "torch==1.13.1", []),
        (LAUNCH, REQUIRED, "", ["warning"]),
        (LAUNCH, REQUIRED, "torch==1.13.1", []),
        (f"{LAUNCH} --local_rank 0", REQUIRED, "", []),
        (LAUNCH, declared(PARSE), "", ["error"]),
        (LAUNCH, declared("parser.parse_known_args()"), "", []),
        (LAUNCH.replace("train", "--use_env train"), declared(PARSE), "", []),
        (LAUNCH.replace("train", "$MORE train"), declared(PARSE), "", []),
        (LAUNCH.replace("launch", "run"), declared(PARSE), "", []),
        ("torchrun train.py", declared(PARSE), "", []),
        ("deepspeed train.py", declared(PARSE), "", ["error"]),
        ("deepspeed train.py", RANK, "", []),
        (
            "deepspeed train.py --deepspeed",
            RANK.replace(PARSE, f"import deepspeed\nparser = deepspeed.add_config_arguments(parser)\n{PARSE}"),
            "",
            [],
        ),
        ("deepspeed --no_local_rank train.py", declared(PARSE), "", []),
        ("deepspeed --hostfile hosts --launcher openmpi train.py", declared(PARSE), "", []),
    ],
)
def test_what_the_launcher_adds(tmp_path, command, program, torch, severities):
    (tmp_path / "requirements.txt").write_text(f"{torch}\n")
    assert [one for one, _ in found(tmp_path, command, program)] == severities


@pytest.mark.parametrize(
    ("command", "severities"),
    [
        ("python train.py d --foo", ["warning"]),
        ("srun python train.py d --foo", ["error"]),
        ("cd /opt/other\ntorchrun train.py d --foo", []),
        ("git clone https://host/other\ncd other\ntorchrun train.py d --foo", []),
        ('cd "$(dirname "$0")"\ntorchrun train.py d --foo', ["error"]),
        ("torchrun /opt/train.py d --foo", []),
        ("torchrun $FOLDER/train.py d --foo", []),
        ("torchrun other.py d --foo", []),
        ("torchrun train.py d --foo\ntorchrun train.py d --lr 1 --foo", ["error"]),
    ],
)
def test_which_program_is_meant(tmp_path, command, severities):
    assert [one for one, _ in found(tmp_path, command)] == severities


def test_programs_of_the_same_name_must_all_refuse(tmp_path):
    job = "torchrun train.py d --foo 1"
    texts = {"first/train.py": TRAIN, "second/train.py": TRAIN.replace("--lr", "--foo")}
    for text, count in ((texts["second/train.py"], 0), (TRAIN, 1)):
        texts |= {"second/train.py": text, "job/job.sh": f"#!/bin/bash\n{job}\n"}
        assert len(findings_in(tmp_path, texts, BOOK)) == count


def test_hostile_parsers_and_many_commands_are_cheap(tmp_path):
    many = "".join(f'parser.add_argument("--x{one}", nargs="*")\n' for one in range(1_000))
    several = "".join(f'parser.add_argument("y{one}", nargs="*")\n' for one in range(40))
    loops = "def f():\n    return g()\ndef g():\n    return f()\nf()\n"
    programs = {
        "many": declared(f"{many}{PARSE}"),
        "several": declared(f"{several}{PARSE}"),
        "nargs": declared(
            f"parser.add_argument('--x', nargs=10**9)\nparser.add_argument('--y', nargs=1000000000)\n{PARSE}"
        ),
        "range": declared(f"parser.add_argument('--x', choices=range(10**9))\n{PARSE}"),
        "loops": declared(f"{loops}{PARSE}"),
        "cycle": f"import cycle\n{declared(PARSE)}",
    }
    lines = [f"torchrun {name}.py --lr {at} --foo 1 2 3 4 5" for name in programs for at in range(80)]
    began = time.process_time()
    found(tmp_path, "\n".join(lines), **programs)
    assert time.process_time() - began < 20


GPU = declared(
    f"parser.add_argument('--local_rank', type=int, default=0)\n{PARSE}\nimport torch\n"
    "torch.cuda.set_device(args.local_rank)\ntorch.distributed.init_process_group('nccl')"
)


@pytest.mark.parametrize(
    ("command", "program", "severities"),
    [
        ("torchrun --nproc_per_node=4 train.py", GPU, ["error"]),
        ("torchrun --nproc_per_node=$N train.py", GPU.replace("=0", "=-1"), ["error"]),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=4 train.py", GPU, ["error"]),
        ("torchrun --nproc_per_node=4 train.py --local_rank $R", GPU, []),
        ("torchrun --nproc_per_node=4 train.py $ARGS", GPU, []),
        ("torchrun --nproc_per_node=1 train.py", GPU, []),
        ("torchrun train.py", GPU, []),
        ("deepspeed train.py", GPU, []),
        ("torchrun --nproc_per_node=4 train.py", GPU.replace("default=0", "default=int(os.environ['LOCAL_RANK'])"), []),
        ("torchrun --nproc_per_node=4 train.py", GPU.replace("import torch\n", "args.local_rank = rank()\n"), []),
        ("torchrun --nproc_per_node=4 train.py", GPU.replace("set_device(args.local_rank)", "set_device(rank)"), []),
    ],
)
def test_a_local_rank_that_nothing_gives(tmp_path, command, program, severities):
    assert [one for one, _ in found(tmp_path, command, program)] == severities
