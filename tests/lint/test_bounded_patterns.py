"""Patterns that take linear time find what they are for; tests/hostile/test_patterns.py measures their time."""

import re

import pytest

from doctor.lint.engine import project_files, project_requirements
from doctor.lint.launch import stale_commands
from doctor.lint.python import cuda, lightning_version, notebooks
from doctor.lint.python.project import absent_values, left_over, random_data, unreached, wrapped_model
from doctor.lint.python.project.settings import options, yacs_entries
from doctor.lint.python.project.starts import console_starts, other_starts
from doctor_checks.code.configuration import lightning_call_outdated
from doctor_checks.code.data import evaluation_tail_dropped
from doctor_checks.code.memory import checkpoint_loaded_to_saved_device

SAVED = checkpoint_loaded_to_saved_device._SAVED_FROM_CPU
SEARCHED = [
    (project_files._IN_TURN, "gpu = int(environ['SLURM_LOCALID']) % torch.cuda.device_count()", "rank = gpu % 8"),
    (project_files._IN_TURN, "set_device(local_rank % args.num_gpus)", "if rank % 2: gpu = 0"),
    (project_files._SPAWNS, "from torch.multiprocessing import Queue, spawn", "import multiprocessing  # spawn"),
    (project_files._FIRST_GPU, "args.device_id = device = 0", "device_id = 01"),
    (project_files._FIRST_GPU, "gpu = torch.device('cuda:0')", "name = 'cuda:0'"),
    (project_files._FIRST_GPU, "torch.cuda.set_device(0)", "torch.cuda.set_device(0, x)"),
    (project_requirements._PAGES, "install_conda.sh", "reinstall.sh"),
    (project_requirements._PAGES, "00-setup.v2.sh", "setup_3.bash"),
    (project_requirements._PAGES, "create.envs.sh", "setup.sh.bak"),
    (project_requirements._LISTS_COMMANDS, "how_to_train.txt", "train_requirements.txt"),
    (project_requirements._NAME, 'setup(\n    name = "nets",  # ours\n', "setup(\n    name=NAMES[0],\n"),
    (project_requirements._NAME, "[metadata]\nname =\n    nets\n", "username = nets\n"),
    (stale_commands._BRINGS_FILES, "  cp -r data /scratch\n", "# cp -r data /scratch\n"),
    (stale_commands._BRINGS_FILES, "mkdir a && cd a && mv ../b .\n", "mkdir cp; echo mv.\n"),
    (cuda._FIRST, "dist.get_rank() == 0 and verbose", "dist.get_rank() == 01"),
    (cuda._FIRST, "self.rank == 0", "rank % size == 0"),
    (left_over.STARTS_PROGRAM, "python3.10 -u a/train.py", "python\ntrain.py"),
    (unreached._FINDS_BY_NAME, "getattr(sys.modules[__name__], name)", "getattr(sys.modules, name)"),
    (
        unreached._OF_ITS_PACKAGE,
        'import_module(f".{name}", package=__package__)',
        "import_module(name, package=__package__)",
    ),
    (wrapped_model._LEAVES_OPEN, "environ['CUDA_VISIBLE_DEVICES'] = environ['LOCAL_RANK']", "CUDA_VISIBLE_DEVICES=0"),
    (options._MAKES_ATTRIBUTES, "add_all_model_args(parser)", "add_arguments(args)"),
    (console_starts._MADE_FOR_SEVERAL, "relaunch_workers(main)", "launch = main"),
    (console_starts._MADE_FOR_SEVERAL, "mp.spawn(main)", "respawn(main)"),
    (unreached._MAKES_TRAINER, "from lightning.pytorch import Callback, Trainer", "import net  # for a Trainer"),
    (wrapped_model._MAY_JOIN, "setup_my_ddp()", "setup_my_data()"),
    (wrapped_model._MAY_JOIN, "distributed_init()", "distance(); unit()"),
    (evaluation_tail_dropped._WHOLE_BATCHES, "ScheduleInterleaved1F1B(stage)", "Schedule(1)"),
    (SAVED, "dict([[k, v.cpu()] for k, v in state.items()])", "dict([[k, v.cuda()] for k, v in state.items()])"),
    (
        SAVED,
        "for k, v in model.state_dict().items():\n    # small\n    kept[k] = v.cpu()\n",
        "for k, v in images.items():\n    kept[k] = v.cpu()\n",
    ),
    (lightning_call_outdated._IS_KNOWN, "def a(self):  # runs # not; removed in 2.0", "def removed(self):  # in 2.0"),
]
WHOLE = [
    (lightning_version._LISTED, "| `pytorch-lightning` | 1.5.10 |", "pytorch-lightning | of 2022 | 1.5.10"),
    (lightning_version._LISTED, "- PyTorch Lightning: v1.9", "- PyTorch Lightning: 1.9 and newer"),
    (absent_values._IS_ZERO, "args.local_rank == 0", "args.get(rank) == 0"),
    (absent_values._IS_ZERO, "dist.get_rank() == 0", "ranks[0] == 0"),
    (absent_values._IS_ZERO, "self.accelerator.is_local_main_process", "self.this_main"),
    (absent_values._OF_OTHERS, "dist.get_rank() != 0", "args.size != 0"),
    (absent_values._OF_OTHERS, "not self.is_main_process()", "not self.this_main"),
    (random_data._MAKES_TENSORS, "torch.randint_like", "torch.load"),
]


@pytest.mark.parametrize(("pattern", "found", "other"), SEARCHED)
def test_searched_patterns(pattern: re.Pattern[str], found: str, other: str) -> None:
    assert pattern.search(found) is not None
    assert pattern.search(other) is None


@pytest.mark.parametrize(("pattern", "found", "other"), WHOLE)
def test_patterns_of_whole_texts(pattern: re.Pattern[str], found: str, other: str) -> None:
    assert pattern.fullmatch(found) is not None
    assert pattern.fullmatch(other) is None


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("FROM registry.example:5000/a/b/nvidia/pytorch:23.05-py3", "2.0"),
        ("image: docker.io/pytorch/pytorch:1.13.1-cuda11.6", "1.13.1"),
        ("image: 763.dkr.ecr.example/pytorch-training:2.0.1-gpu", "2.0.1"),
        ("gcr.io/deeplearning-platform-release/pytorch-gpu.1-13", "1.13"),
        ("a.example:5000/team/image:0.0.1-pytorch1.12.1-cuda11.6", "1.12.1"),
        ("mcr.example/azureml/curated/acpt-pytorch-1.13-cuda11.7:latest", "1.13"),
        ("pip install torch-1.13", ""),
    ],
)
def test_images(line: str, release: str) -> None:
    assert next(project_requirements._images_in(line), "") == release


def test_arguments_of_image_files() -> None:
    text = "ARG TAG=23.05\nARG A=nvidia/pytorch\nFROM $A:${TAG}-py3 $AB\nARG TAG=24.07\n"
    assert "FROM nvidia/pytorch:23.05-py3 $AB\n" in project_requirements._with_arguments(text)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("channels:\n  - pytorch\ndependencies:\n  - cudatoolkit=11.3\n  - pytorch\n", "1.12"),
        ("channels:\n  - pytorch\n  - pytorch\ndependencies:\n  - cudatoolkit=11.3\n", ""),
        ("- pytorch\nchannels:\n  - nvidia\ndependencies:\n  - cudatoolkit=11.3\n  - pytorch\n", ""),
    ],
)
def test_newest_torch_of_a_conda_environment(text: str, release: str) -> None:
    assert project_requirements._bound_of_cuda(text) == release


def test_commands_of_notebooks_that_install() -> None:
    def kept(line: str) -> list[str]:
        return notebooks._python_of(["x = 1", line])

    assert kept("!pip3 -q install torch") == ["x = 1", "pass  # !pip3 -q install torch"]
    assert kept("!install pip") == ["x = 1", "pass"]


def test_values_of_configurations_end_before_spaces() -> None:
    text = "MODEL:\n  WEIGHTS: 'a b'  \t\n  OTHER:  # none\n"
    assert [*yacs_entries._configured(text, ("MODEL", "WEIGHTS"))] == ["a b"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.cuda.set_device(args.local_rank)", True),
        ("set_device(device=int(os.environ['SLURM_LOCALID']))", True),
        ("torch.cuda.set_device(local_rank % 2)", False),
        ("torch.cuda.set_device(0)", False),
        ("torch.cuda.device(local_rank)", False),
    ],
)
def test_what_selects_the_gpu_by_the_local_rank(call: str, expected: bool) -> None:
    text = f"n = torch.cuda.device_count()\n{call}\nif n == 1:\n    device = 0\n"
    assert project_files._takes_only_gpu(text) is not expected


def test_commands_of_a_line() -> None:
    line = "python a/train.py --x && torchrun --nproc 2 -m pkg.run; srun python"
    commands = [*other_starts._commands(line)]
    assert [(one.stem, one.is_file) for one in commands] == [("train", True), ("run", False)]
    assert [one.text for one in commands] == ["python a/train.py", "torchrun --nproc 2 -m pkg.run"]


def test_lines_that_say_how_a_program_is_launched() -> None:
    commands, rest = other_starts._apart("# torchrun a.py b.py  # mp.spawn(\nimport torch\n# srun\n")
    assert commands == ["# torchrun a.py b.py"]
    assert rest == "  # mp.spawn(\nimport torch\n# srun\n"
    assert other_starts._apart("import a.py\n") == ([], "import a.py\n")


def test_variables_of_commands_are_looked_up_once() -> None:
    sets = "".join(f"n{number}=a{number}\n" for number in range(other_starts._MOST_NAMES + 1))
    uses = "".join(f"torchrun $n{number}.py\n" for number in range(other_starts._MOST_NAMES + 1))
    lines = [*other_starts._lines_with_stems(sets + uses)]
    assert lines[-2] == f"torchrun a{other_starts._MOST_NAMES - 1}.py"
    assert lines[-1] == f"torchrun $n{other_starts._MOST_NAMES}.py"
    assert [*other_starts._lines_with_stems("a=b\nfor a in 1 2; do\ntorchrun $a.py\n")][-1] == "torchrun $a.py"


def test_variables_in_names_of_programs() -> None:
    found = other_starts._IN_STEM.findall("torchrun src/${task}_$name.py $other a$1.py")
    assert found == ["task", "name", ""]
