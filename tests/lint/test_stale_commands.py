"""Commands and copies of programs that no longer fit their project."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

RULES = ("ENV007", "ENV008", "GPU003", "CODE005", "CODE022", "CODE035")
BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in RULES))
PROGRAM = "import torch\n\nif __name__ == '__main__':\n    torch.zeros(1)\n"
PROGRAMS = {"train.py": PROGRAM, "tools/test.py": PROGRAM}


def found(folder, files):
    return severities_in(folder, files, BOOK)


def start(program, before=""):
    return f"{before}torchrun --nproc_per_node=8 --master_port=71000 {program}\n"


@pytest.mark.parametrize(
    "files",
    [
        {"run.sh": start("train_old.py")},
        {"run.sh": start("./train_old.py --lr 1")},
        {"jobs/run.sh": start("tools/train.py")},
        {"run.sh": start("tools/train.py", "cd ..\n")},
        {"parts/data/run.sh": start("../test.py")},
        {"run.sh": start("train_big.py", "cd tools/\n")},
        {"run.sh": "export MASTER_PORT=71000\nsrun python train_old.py\n"},
        {"run.sh": "python -m torch.distributed.launch --master_port 71000 train_old.py &\n"},
        {"run.sh": start("train_old.py", "OUT=$PWD/out/$1\nmkdir -p $OUT\ncp -r $PWD/$0 $OUT\n")},
        {"run.sh": start("train.py --deepspeed zero3.json")},
        {"run.sh": start("train.py --config=tools/large.yaml")},
        {"run.sh": "accelerate launch --config_file four.yaml --main_process_port 71000 train.py\n"},
    ],
)
def test_a_command_without_its_program_or_configuration_starts_nothing(tmp_path, files):
    assert found(tmp_path, PROGRAMS | files) == []


@pytest.mark.parametrize(
    "files",
    [
        {"run.sh": start("train.py")},
        {"jobs/run.sh": start("../train.py")},
        {"jobs/small/run.sh": start("../train.py")},
        {"tools/run.sh": start("../test.py")},
        {"parts/data/run.sh": start("../test.py", "cd tools/unit\n"), "tools/unit/main.py": PROGRAM},
        {"parts/data/run.sh": start("../test.py"), "parts/.gitignore": "test.py\n"},
        {"run.sh": start("test.py", "cd tools\n")},
        {"run.sh": start("$PROGRAM")},
        {"run.sh": start("/opt/other/train_old.py")},
        {"run.sh": start("train_old.py", "cd $HOME/other\n")},
        {"run.sh": start("train_old.py", "cd ../other\n")},
        {"run.sh": start("train_old.py", "git clone https://example.org/other\n")},
        {"run.sh": start("train_old.py", "cp train.py train_old.py\n")},
        {"run.sh": start("train_old.py", "cp ../train_old.py $PLACE\n")},
        {"run.sh": start("train_old.py", "mkdir -p $OUT\ncp train_old.py $OUT\ncd $OUT\n")},
        {"run.sh": start("tools/train_old.py", "mkdir -p $OUT\ncp ../train_old.py $OUT\n")},
        {"run.sh": start("other/train.py")},
        {"run.sh": start("train_old.py"), ".gitignore": "train_old.py\n"},
        {"run.sh": start("train_old.py"), "write.py": "open('train_old.py', 'w').write(text)\n"},
        {"run.sh": start("train.py --output result.json --data other.yaml")},
        {"run.sh": start("train.py --config large.yaml"), "large.yaml": "lr: 1\n"},
        {"run.sh": start("train.py --config made.yaml"), "make.py": "dump(config, 'made.yaml')\n"},
        {"run.sh": "export MASTER_PORT=71000\nsrun python train_old.py\nsrun python train.py\n"},
    ],
)
def test_other_commands_keep_their_findings(tmp_path, files):
    assert found(tmp_path, PROGRAMS | files) == [("ENV007", "error")]


COPIED = {
    "train.py": "from copied import build\n\nif __name__ == '__main__':\n    build()\n",
    "README.md": "    python train.py\n",
    "copied/LICENSE": "MIT\n",
    "copied/copied/__init__.py": "import torch\n",
    "copied/main.py": PROGRAM,
    "copied/scripts/run.sh": start("main.py"),
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"README.md": "    python train.py\n    bash copied/scripts/run.sh\n"}, [("ENV007", "error")]),
        ({"train.py": PROGRAM}, [("ENV007", "error")]),
        ({"README.md": "See the files.\n"}, [("ENV007", "error")]),
    ],
)
def test_a_launch_file_of_a_copied_library_starts_nothing_here(tmp_path, files, expected):
    assert found(tmp_path, COPIED | files) == expected


def test_a_copy_without_its_license_is_a_part_of_the_project(tmp_path):
    files = {name: text for name, text in COPIED.items() if not name.endswith("LICENSE")}
    assert found(tmp_path, files) == [("ENV007", "error")]


def test_a_part_of_a_repository_shows_not_all_programs(tmp_path):
    (tmp_path / ".git").mkdir()
    assert found(tmp_path / "part", PROGRAMS | {"run.sh": start("train_old.py")}) == [("ENV007", "error")]


RUN = "torchrun --master_port={port} train.py{end}\n"
BACKGROUND, FOREGROUND = RUN.format(port=29501, end=" &"), RUN.format(port=29501, end="")
OTHER = RUN.format(port=29600, end="")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (BACKGROUND + FOREGROUND, [("ENV008", "warning")]),
        (BACKGROUND + OTHER.replace("\n", " &\n") + FOREGROUND, [("ENV008", "warning")]),
        (BACKGROUND + OTHER + FOREGROUND, []),
        (BACKGROUND + OTHER.replace("\n", "; sleep 1h\n") + BACKGROUND, []),
        (BACKGROUND + "python prepare.py\n" + FOREGROUND, [("ENV008", "warning")]),
        ((BACKGROUND + FOREGROUND).replace("29501", "81004"), [("ENV007", "error")] * 2),
    ],
)
def test_a_run_after_one_in_the_foreground_may_find_the_port_free(tmp_path, script, expected):
    assert found(tmp_path, {"run.sh": script}) == expected


@pytest.mark.parametrize(
    ("value", "severity"),
    [
        ("4,5,6,7\\\nMASTER_ADDR=localhost \\\n", "warning"),
        ("0,1x ", "warning"),
        ("'0,1;' ", "warning"),
        ("0-3 ", "error"),
        ("'0 1' ", "error"),
        ("'0;1' ", "error"),
        ("0,1,1 ", "error"),
        ("0,a,1 ", "error"),
    ],
)
def test_an_entry_of_which_cuda_reads_the_number(tmp_path, value, severity):
    assert found(tmp_path, {"run.sh": f"CUDA_VISIBLE_DEVICES={value}torchrun train.py\n"}) == [("GPU003", severity)]


HANGS = """\
import torch.distributed as dist

dist.init_process_group('nccl')
if dist.get_rank() == 0:
    dist.barrier()
"""
COPY = f"from src.nets import net\nfrom src.data.loader import load\n{HANGS}"
ADDS = "import sys\n\nsys.path.insert(0, root)\n"
COPIES = {
    "one/src/nets/net.py": "net = 1\n",
    "one/src/nets/__init__.py": "from .net import net\n",
    "two/src/nets/__init__.py": "from .net import net\n",
    "two/src/nets/net.py": "net = 1\n",
    "one/src/data/shape.py": "shape = 1\n",
    "two/src/data/loader.py": "def load():\n    pass\n",
    "two/src/main.py": "from src.data.loader import load\n\nload()\n",
}


@pytest.mark.parametrize(
    "files",
    [
        {"one/src/tasks/run.py": COPY},
        {"one/src/tasks/run.py": f"import sys\n\nsys.path.insert(0, root)\n{COPY}"},
        {"one/src/tasks/run.py": COPY.replace("from src.data.loader import load", "import src.data.loader as loader")},
        {"one/src/tasks/run.py": COPY.replace("from src.data.loader import load", "from src.data import loader")},
    ],
)
def test_a_copy_that_lacks_a_module_fails_to_import(tmp_path, files):
    assert found(tmp_path, COPIES | files) == []


@pytest.mark.parametrize(
    "files",
    [
        {"two/src/tasks/run.py": ADDS + COPY},
        {"one/src/tasks/run.py": f"import sys\n\nsys.path.insert(0, '../two')\n{COPY}"},
        {"one/src/tasks/run.py": ADDS + COPY, "run.sh": "PYTHONPATH=one:two torchrun one/src/tasks/run.py\n"},
        {"one/src/tasks/run.py": ADDS + COPY, "one/run.sh": "torchrun src/tasks/run.py\n"},
        {"one/src/tasks/run.py": ADDS + COPY, ".gitignore": "loader.py\n"},
        {
            "one/src/tasks/run.py": ADDS + COPY,
            "setup.py": "from setuptools import find_packages, setup\nsetup(packages=find_packages())\n",
        },
        {"three/run.py": ADDS + COPY},
    ],
)
def test_other_copies_may_run(tmp_path, files):
    assert ("CODE005", "error") in found(tmp_path, COPIES | files)


SEED = (
    "from pytorch_lightning.utilities.seed import seed_everything\n\ndef seed(number):\n    seed_everything(number)\n"
)
OWN = "import importlib\n\nfor name in names:\n    importlib.import_module({}, __name__)\n"


@pytest.mark.parametrize(
    ("finder", "place", "expected"),
    [
        (OWN.format('"." + name'), "model/__init__.py", []),
        (OWN.format("f'.{name}'"), "model/__init__.py", []),
        (OWN.format('"." + name'), "utils/__init__.py", [("CODE022", "error")]),
        (OWN.format("name"), "model/__init__.py", [("CODE022", "error")]),
        ("# importlib.import_module(name)\n", "model/__init__.py", []),
        ("def exec(blocks):\n    pass\n\n\nexec([1])\n", "model/net.py", []),
    ],
)
def test_a_package_that_imports_its_own_modules_by_name(tmp_path, finder, place, expected):
    files = {"net/utils/seed.py": SEED, f"net/{place}": finder, "requirements.txt": "pytorch-lightning==2.1.3\n"}
    assert found(tmp_path, files | {"train.py": f"import net.model\n\n{PROGRAM}"}) == expected


OFFLOADS = '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"run.sh": "deepspeed train.py --deepspeed conf/zero2_offload_large.json\n"}, []),
        ({"run.sh": "deepspeed train.py --deepspeed conf/zero2_offload.json\n"}, [("CODE035", "info")]),
        ({"README.md": "With less memory, take `conf/zero2_offload.json`.\n"}, [("CODE035", "info")]),
        ({"more.py": "settings = TrainingArguments(deepspeed='conf/zero2_offload.json')\n"}, [("CODE035", "info")]),
    ],
)
def test_a_configuration_that_nothing_names_may_not_be_in_use(tmp_path, files, expected):
    (tmp_path / ".git").mkdir()
    assert found(tmp_path, {**PROGRAMS, "conf/zero2_offload.json": OFFLOADS, **files}) == expected


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        ("├── conf\n│   └── both.yaml   # of Accelerate\n", "info"),
        ("|-- conf\n|   |-- both.yaml\n", "info"),
        ("    accelerate launch --config_file conf/both.yaml train.py\n", "error"),
    ],
)
def test_a_refused_configuration_that_no_job_reads(tmp_path, page, severity):
    (tmp_path / ".git").mkdir()
    both = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n"
    both += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert found(tmp_path, {**PROGRAMS, "conf/both.yaml": both, "README.md": page}) == [("CODE035", severity)]


def test_a_configuration_of_a_part_of_a_project_may_be_in_use(tmp_path):
    (tmp_path / ".git").mkdir()
    files = {**PROGRAMS, "conf/zero2_offload.json": OFFLOADS}
    assert found(tmp_path / "part", files) == [("CODE035", "info")]


HANG = "import torch.distributed as dist\n\ndist.init_process_group()\nif dist.get_rank() == 0:\n    dist.barrier()\n"
INSTALLED = {
    "main.py": "import toolkit\n\nif __name__ == '__main__':\n    toolkit.run()\n",
    "libs/toolkit-main/LICENSE": "Apache License\n",
    "libs/toolkit-main/setup.py": "from setuptools import setup\nsetup(packages=['toolkit'])\n",
    "libs/toolkit-main/examples/hang.py": HANG,
}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("    pip install -e libs/toolkit-main\n    python main.py\n", []),
        ("    pip install libs/toolkit-main/\n    python main.py\n", []),
        ("    pip install toolkit\n    python main.py\n    torchrun your_script.py\n", [("CODE005", "error")]),
        (
            "    pip install -e libs/toolkit-main\n    torchrun libs/toolkit-main/examples/hang.py\n",
            [("CODE005", "error")],
        ),
        ("    pip install -e libs/toolkit-main\n", [("CODE005", "error")]),
    ],
)
def test_examples_of_an_installed_copy_of_another_project_are_left_over(tmp_path, page, expected):
    assert found(tmp_path, {**INSTALLED, "README.md": page}) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"old/run.sh": start("train.py")}, []),
        ({"jobs_old/run.sh": start("train.py")}, []),
        ({"jobs/run.sh": start("train.py")}, [("ENV007", "error")]),
        ({"old/run.sh": start("train.py"), "README.md": "Run `bash old/run.sh`.\n"}, [("ENV007", "error")]),
        ({"old/run.sh": start("train.py"), "all.sh": "bash old/run.sh\n"}, [("ENV007", "error")]),
    ],
)
def test_a_launch_file_in_an_old_folder(tmp_path, files, expected):
    assert found(tmp_path, PROGRAMS | files) == expected
