"""Places that never run, and scripts that stop several processes, or are started as one."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

RULES = (
    "CODE001",
    "CODE003",
    "CODE005",
    "CODE007",
    "CODE022",
    "CODE024",
    "CODE029",
    "CODE009",
    "CODE011",
    "CODE012",
    "CODE030",
    "CODE041",
    "ENV014",
    "NCCL007",
)
BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in RULES))
HEAD = "import torch\nimport torch.distributed as dist\nfrom accelerate import Accelerator\n\n"
JOINS = "dist.init_process_group()\n"
HANG = "if dist.get_rank() == 0:\n    dist.barrier()\n"


def found(folder, files):
    return severities_in(folder, files, BOOK, preview=True)


def indented(text, by=4):
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


LEFT_OUT = {
    "the branch of a constant": "if False:\n" + indented(HANG),
    "the other branch of one": "if 1:\n    print()\nelse:\n" + indented(HANG),
    "below a return": "def run():\n    return 1\n" + indented(HANG),
    "a helper that nothing names": "def _old():\n" + indented(HANG),
    "an assertion": "world_size = dist.get_world_size()\nassert world_size == 1\n" + HANG,
    "an assertion below": HANG + "assert torch.cuda.device_count() == 1\n",
    "an error of several": "if dist.get_world_size() > 1:\n    raise NotImplementedError\n" + HANG,
    "a function that is called there": "def run():\n" + indented(HANG) + "\nassert dist.get_world_size() == 1\nrun()\n",
}
KEPT = {
    "a branch that is taken": "if True:\n" + indented(HANG),
    "a return of some": "def run(x):\n    if x:\n        return\n" + indented(HANG),
    "a helper that is called": "def _now():\n" + indented(HANG) + "\n_now()\n",
    "a helper that is registered": "@torch.no_grad()\ndef _now():\n" + indented(HANG),
    "another assertion": "depth = 1\nassert depth == 1\n" + HANG,
    "an assertion of several": "assert dist.get_world_size() == 8\n" + HANG,
    "an assertion in a branch": "if torch.cuda.is_available():\n    assert torch.cuda.device_count() == 1\n" + HANG,
    "an error of one": "if dist.get_world_size() == 1:\n    raise ValueError\n" + HANG,
    "a function that is also called elsewhere": "def run():\n"
    + indented(HANG)
    + "\ndef one():\n    assert dist.get_world_size() == 1\n    run()\n\nrun()\n",
}


@pytest.mark.parametrize("text", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_place_that_several_ranks_never_reach_is_left_out(tmp_path, text):
    assert found(tmp_path, {"train.py": HEAD + text}) == []


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_other_places_are_reported(tmp_path, text):
    assert found(tmp_path, {"train.py": HEAD + text}) == [("CODE005", "error")]


def test_a_private_helper_that_another_file_imports_is_reported(tmp_path):
    files = {
        "train.py": HEAD + JOINS + "def _wait():\n" + indented(HANG),
        "run.py": "from train import _wait\n_wait()\n",
    }
    assert ("CODE005", "error") in found(tmp_path, files)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("def wait_here():\n" + indented(HANG), "info"),
        ("class Waits:\n    def wait_here(self):\n" + indented(HANG, 8) + "\nWaits()\n", "info"),
        ("class Waits:\n    def wait_here(self):\n" + indented(HANG, 8) + "\nWaits().wait_here()\n", "error"),
        ("class Waits(Callback):\n    def wait_here(self):\n" + indented(HANG, 8) + "\nWaits()\n", "error"),
        ("class Waits(Callback):\n    def wait_here(self):\n" + indented(HANG, 8), "info"),
        ("def wait_here():\n" + indented(HANG) + "\nwait_here()\n", "error"),
        ("def wait_here():\n    dist.init_process_group()\n" + indented(HANG), "info"),
    ],
)
def test_a_deadlock_in_a_function_that_nothing_calls_is_an_info(tmp_path, text, severity):
    assert found(tmp_path, {"train.py": HEAD + text}) == [("CODE005", "error")]  # its callers are unknown
    joins = HEAD + JOINS + text
    assert found(tmp_path, {"train.py": joins, "other.py": "import torch\n"}) == [("CODE005", severity)]
    called = {"other.py": "import train\n\nname = train.wait_here\ntrain.Waits\n"}
    assert found(tmp_path, {"train.py": joins} | called) == [("CODE005", "error")]


def test_a_deadlock_in_a_package_that_offers_it_is_an_error(tmp_path):
    files = {
        "train.py": HEAD + JOINS + "def wait_here():\n" + indented(HANG),
        "__init__.py": "from .train import wait_here\n",
        "setup.py": "from setuptools import setup\n\nsetup()\n",
    }
    assert found(tmp_path, files) == [("CODE005", "error")]


@pytest.mark.parametrize(
    ("other", "severity"),
    [
        ("import torch\n", "warning"),
        ("import train\n", "warning"),
        ("import train\ntorch.distributed.init_process_group()\n", "error"),
        ("import model\ntorch.distributed.init_process_group()\n", "warning"),
        ("import train\ntrainer = Trainer(devices=4)\n", "error"),
    ],
)
def test_an_error_needs_a_start_of_ranks_that_reaches_the_file(tmp_path, other, severity):
    assert found(tmp_path, {"train.py": HEAD + HANG, "other.py": other}) == [("CODE005", severity)]
    started = {"other.py": other, "run.sh": "torchrun --nproc-per-node=8 train.py\n"}
    assert found(tmp_path, {"train.py": HEAD + HANG} | started) == [("CODE005", "error")]


def test_an_error_over_devices_needs_several_ranks_on_a_host(tmp_path):
    text = HEAD + 'dist.init_process_group("nccl")\nmodel = Net().cuda()\n'
    assert found(tmp_path, {"train.py": text}) == [("CODE003", "error")]
    assert found(tmp_path, {"train.py": text, "net.py": "import torch\n"}) == [("CODE003", "warning")]
    binds = {"run.sbatch": "#!/bin/bash\nsrun -n8 --gpus-per-task=1 --gpu-bind=closest python train.py\n"}
    assert found(tmp_path, {"train.py": text} | binds) == []
    (tmp_path / "run.sbatch").unlink()
    read = text.replace("\nmodel", '\nlocal_rank = int(os.environ["LOCAL_RANK"])\nmodel')
    assert found(tmp_path, {"train.py": read, "net.py": "import torch\n"}) == [("CODE003", "error")]


def test_a_function_that_another_file_imports_may_run_there(tmp_path):
    train = (
        HEAD
        + JOINS
        + "def wait():\n"
        + indented(HANG)
        + "\ndef main():\n    assert dist.get_world_size() == 1\n    wait()\n"
    )
    assert found(tmp_path, {"train.py": train}) == []
    assert ("CODE005", "error") in found(tmp_path, {"run.py": "from train import wait\nwait()\n"})


@pytest.mark.parametrize(("uses", "severity"), [("torch.nn.DataParallel(net)", "info"), ("net.cuda()", "error")])
def test_one_process_uses_several_gpus_by_threads(tmp_path, uses, severity):
    files = {"train.py": f"{HEAD}{uses}\n{HANG}", "run.sh": "CUDA_VISIBLE_DEVICES=3,1 python3 train.py --lr 3\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]


CONFIGURED = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: {}\n"


@pytest.mark.parametrize(
    ("launches", "severity"),
    [
        (["torchrun --nproc_per_node=1 train.py"], "info"),
        (["torchrun --nproc_per_node=1 train.py", "torchrun --nproc-per-node 8 train.py"], "error"),
        (["torchrun --nproc_per_node=1 --nnodes=4 train.py"], "error"),
        (["srun -N 4 torchrun --nproc_per_node=1 train.py"], "error"),
        (["torchrun --nproc_per_node=$GPUS train.py"], "error"),
        (["accelerate launch --num_processes=1 --num_machines=1 --gpu_ids=5 train.py"], "info"),
        (["accelerate launch --config_file all.yaml --num_processes=1 train.py"], "info"),
        (["accelerate launch --config_file ./one.yaml train.py"], "info"),
        (["accelerate launch --config_file=configs/one.yaml train.py"], "error"),
        (["accelerate launch --config_file all.yaml train.py"], "error"),
        (["accelerate launch --config_file one.yaml --num_processes 4 train.py"], "error"),
        (["deepspeed --include=localhost:3 --master_port=29501 train.py"], "info"),
        (["deepspeed --include localhost:3,4 train.py"], "error"),
        (["deepspeed --include=localhost:3 train.py", "deepspeed train.py"], "error"),
        (["deepspeed --num_gpus 1 train.py"], "info"),
        (["accelerate launch --num_processes=2 train.py"], "error"),
        (["accelerate launch train.py"], "error"),
        (["CUDA_VISIBLE_DEVICES=0 accelerate launch train.py"], "info"),
        (["export CUDA_VISIBLE_DEVICES=2\naccelerate launch ./train.py"], "info"),
        (["CUDA_VISIBLE_DEVICES=0,1 accelerate launch train.py"], "error"),
        (["torchrun --nproc_per_node=1 other.py"], "error"),
        (["python train.py"], "info"),
        (["python train.py --gpus 4"], "error"),
        (["python train.py --per_gpu_train_batch_size $SIZE --gpu_memory_share 0.5"], "info"),
        (["python train.py --per_gpu_train_batch_size 8 --n_gpu 4"], "error"),
        (["CUDA_VISIBLE_DEVICES=0,1 python train.py"], "error"),
        (["srun bash inner.sh\npython train.py"], "error"),
        (["# python train.py"], "error"),
        (["#SBATCH --nodes=1 --gres=gpu:8\nexport MASTER_ADDR=127.0.0.1\npython train.py"], "info"),
        (["#SBATCH --nodes=1 --gres=gpu:8\nexport MASTER_ADDR=$(hostname)\npython train.py"], "error"),
        (["#SBATCH --array=0-3\npython train.py"], "error"),
        (["python train.py --dist_eval"], "info"),
        (["python train.py --dist_url tcp://localhost:29500"], "error"),
        (["#SBATCH --ntasks=8\nsrun python train.py"], "error"),
        (["python train.py", "torchrun train.py"], "error"),
        (["accelerate launch train.py", "srun python train.py"], "error"),
        ([], "error"),
    ],
)
def test_launch_scripts_say_how_many_processes_a_script_has(tmp_path, launches, severity):
    scripts = {f"run{number}.sh": f"#!/bin/bash\n{line}\n" for number, line in enumerate(launches)}
    scripts |= {f"{name}.yaml": CONFIGURED.format(count) for name, count in (("one", 1), ("all", 8))}
    assert found(tmp_path, {"train.py": HEAD + HANG} | scripts) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        ("```\npython train.py --lr 3\n```\n", "info"),
        ("    $ CUDA_VISIBLE_DEVICES=0 python -u ./train.py\n", "info"),
        ("RUN torchrun --nproc_per_node=1 train.py\n", "info"),
        ("python train.py\n\ntorchrun --nproc_per_node=8 train.py\n", "error"),
        ("torchrun --nproc_per_node=8 \\\n  train.py\n", "error"),
        ("python -m torch.distributed.launch train.py\n", "error"),
        ("python train.py --gpus 8\n", "error"),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py\n", "error"),
        ("The model is in train.py.\n", "error"),
        ("python pretrain.py\n", "error"),
    ],
)
@pytest.mark.parametrize("name", ["README.md", "Dockerfile", "docs/usage.rst"])
def test_pages_say_how_many_processes_a_script_has(tmp_path, page, severity, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(page)
    assert found(tmp_path, {"train.py": HEAD + JOINS + HANG}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("", "info"),
        ("python check.py\n", "info"),
        ("torchrun --nproc_per_node=1 check.py\n", "info"),
        ("torchrun check.py\n", "error"),
        ("torchrun --nproc_per_node=8 check.py\n", "error"),
    ],
)
def test_a_program_that_gives_itself_one_rank_needs_a_launcher_for_more(tmp_path, command, severity):
    own = 'import os\n\nos.environ.setdefault("RANK", "0")\nos.environ.setdefault("WORLD_SIZE", "1")\n'
    files = {"check.py": own + HEAD + JOINS + HANG, "train.py": HEAD + JOINS, "run.sh": f"#!/bin/bash\n{command}"}
    assert found(tmp_path, files) == [("CODE005", severity)]


BY_MODULE = "deepspeed --num_gpus=1 -m jobs.train --lr 3\n"


@pytest.mark.parametrize(
    ("command", "page", "severity"),
    [
        (BY_MODULE, "", "info"),
        (BY_MODULE.replace("-m", "--module"), BY_MODULE, "info"),
        ("python -m jobs.train\n", "", "info"),
        (BY_MODULE.replace("=1", "=8"), "", "error"),
        (BY_MODULE, BY_MODULE.replace("=1", "=8"), "error"),
        (BY_MODULE, f"{BY_MODULE}\nFiles are named as modules, as in `deepspeed -m jobs.train`.\n", "info"),
        ("", f"{BY_MODULE}\nOn all GPUs, use `deepspeed --num_nodes 1 -m jobs.train`.\n", "error"),
        ("", "The command is `deepspeed -m jobs.train`.\n", "error"),
        (BY_MODULE.replace("jobs.train", "other.train"), "", "error"),
    ],
)
def test_a_script_may_be_started_as_a_module(tmp_path, command, page, severity):
    (tmp_path / "jobs").mkdir()
    files = {"run.sh": f"#!/bin/bash\n{command}", "README.md": page, "jobs/train.py": HEAD + JOINS + HANG}
    assert found(tmp_path, files) == [("CODE005", severity)]


def test_another_program_says_how_many_processes_a_script_has(tmp_path):
    for count, severity in ((1, "info"), (4, "error")):
        starts = f"command = ['deepspeed', '--num_gpus={count}', 'train.py', '--lr=3']\nsubprocess.run(command)\n"
        assert found(tmp_path, {"train.py": HEAD + JOINS + HANG, "run.py": starts}) == [("CODE005", severity)]


NAMED = (
    "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--net', type=str)\n"
    "args = parser.parse_args()\n"
)


@pytest.mark.parametrize(
    ("above", "below", "declares", "expected"),
    [
        ("'base-16' in args.net", "'base-16x4' in args.net", NAMED, []),
        ("args.lr or 'base-16' in args.net", "args.lr and 'base-16x4' in args.net", NAMED, []),
        ("'base' in args.net", "args.net == 'base-16x4'", "args = read()\n", []),
        ("'base' in args.net", "'base-16' in args.net", "args = read()\nprint(args.net.lower())\n", []),
        ("args.net == 'small'", "args.net == 'small'", "args = read()\n", []),
        ("'base-16x4' in args.net", "'base-16' in args.net", NAMED, ["error"]),
        ("'base-16' in args.name", "'base-16x4' in args.net", NAMED, ["error"]),
        ("args.lr and 'base-16' in args.net", "'base-16x4' in args.net", NAMED, ["error"]),
        ("'base-16' in args.net", "args.lr or 'base-16x4' in args.net", NAMED, ["error"]),
        ("'base-16' not in args.net", "'base-16x4' in args.net", NAMED, ["error"]),
        ("next(names) == 'small'", "next(names) == 'small'", "args = read()\n", ["error"]),
        ("'base-16' in args.net", "'base-16x4' in args.net", NAMED.replace("type=str", "nargs='+'"), ["error"]),
        ("'base-16' in args.net", "'base-16x4' in args.net", "args = read()\n", ["error"]),
    ],
)
def test_a_branch_that_is_only_possible_where_an_earlier_one_is_taken(tmp_path, above, below, declares, expected):
    chain = f"if {above}:\n    net = 1\nelif args.other:\n    net = 2\nelif {below}:\n" + indented(HANG)
    files = {
        "train.py": HEAD + declares + JOINS + chain,
        "run.sh": "#!/bin/bash\ntorchrun --nproc-per-node=8 train.py\n",
    }
    assert found(tmp_path, files) == [("CODE005", one) for one in expected]


def test_a_script_that_starts_its_ranks_is_not_one_process(tmp_path):
    (tmp_path / "README.md").write_text("python train.py\n")
    spawns = "def main(rank):\n" + indented(JOINS + HANG) + "\ntorch.multiprocessing.spawn(main, nprocs={})\n"
    assert found(tmp_path, {"train.py": HEAD + spawns.format(8)}) == [("CODE005", "error")]
    assert found(tmp_path, {"train.py": HEAD + spawns.format(1)}) == [("CODE005", "info")]


@pytest.mark.parametrize(
    ("calls", "severity"),
    [
        ("ranks = count = 1\nstart(ranks)", "info"),
        ("start(count=1)", "info"),
        ("start(1)\nstart(4)", "error"),
        ("start(torch.cuda.device_count())", "error"),
        ("jobs = [start]", "error"),
    ],
)
def test_a_number_of_processes_may_be_an_argument(tmp_path, calls, severity):
    work = "def work(rank):\n" + indented(JOINS + HANG)
    starts = f"def start(count):\n    torch.multiprocessing.spawn(work, nprocs=count)\n\n{calls}\n"
    assert found(tmp_path, {"train.py": HEAD + work + starts}) == [("CODE005", severity)]


def test_branches_of_ranks_that_nothing_ties_together_are_left_over(tmp_path):
    text = (
        "import torch\nimport torch.distributed as dist\nif args.local_rank != -1:\n    dist.init_process_group()\n"
        "model = Net()\nfor x in loader:\n    model(x).sum().backward()\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    assert found(tmp_path, {"train.py": text, "net.py": "import torch\n"}) == [("CODE005", "info")]
    wraps = text.replace("Net()", "torch.nn.parallel.DistributedDataParallel(Net())")
    assert found(tmp_path, {"train.py": wraps, "net.py": "import torch\n"}) == [("CODE005", "error")]
    imports = text.replace("import torch\n", "import torch\nfrom net import Net\n", 1)
    assert found(tmp_path, {"train.py": imports, "net.py": "Net = DDP\n"}) == [("CODE005", "error")]


def test_an_accelerator_of_the_cpu_is_one_process_unless_it_is_launched(tmp_path):
    text = (
        HEAD + "accelerator = Accelerator({})\nif accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n"
    )
    assert found(tmp_path, {"train.py": text.format("cpu=True")}) == [("CODE005", "info")]
    assert found(tmp_path, {"train.py": text.format("")}) == [("CODE005", "error")]


def test_what_concerns_one_process_is_reported_there(tmp_path):
    text = (
        "import torch\nassert torch.cuda.device_count() == 1\nmodel = torch.nn.DataParallel(Net())\n"
        "for x in loader:\n    model(x).sum().backward()\n"
    )
    assert found(tmp_path, {"train.py": text}) == [("CODE009", "warning")]


@pytest.mark.parametrize(
    ("beside", "severity"),
    [
        (("train_ddp.py", "DistributedDataParallel(Net())"), "info"),
        (("ddp/distributed_train.py", "DistributedDataParallel(Net())"), "info"),
        (("train_ddp.py", "SyncBatchNorm(8)"), "warning"),
        (("model.py", "DistributedDataParallel(Net())"), "warning"),
    ],
)
def test_threads_are_an_info_beside_the_same_with_a_process_per_gpu(tmp_path, beside, severity):
    train = "import torch\nmodel = torch.nn.DataParallel(Net())\nfor x in loader:\n    model(x).sum().backward()\n"
    name, made = beside
    (tmp_path / "ddp").mkdir()
    other = f"import torch\nmodel = torch.nn.parallel.{made}\nmodel(x).sum().backward()\n"
    assert found(tmp_path, {"train.py": train, name: other}) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("option", "severity"),
    [
        ("parser.add_argument('--devices')\nargs = parser.parse_args()\n", "info"),
        ("parser.add_argument('--device-ids')\nargs = parser.parse_args()\n", "warning"),
        ("args = parser.parse_args()\nargs.device_ids = [0, 1]\n", "warning"),
        ("args = parser.parse_args()\nfor name in names:\n    setattr(args, name, 1)\n", "warning"),
        ("args = read()\n", "warning"),
    ],
)
def test_threads_on_devices_that_no_option_names_are_an_info(tmp_path, option, severity):
    text = (
        "import argparse\nimport torch\nparser = argparse.ArgumentParser()\n"
        + option
        + "model = torch.nn.DataParallel(Net(), device_ids=args.device_ids)\n"
        "for x in loader:\n    model(x).sum().backward()\n"
    )
    (tmp_path / ".git").mkdir()
    assert found(tmp_path, {"train.py": text}) == [("CODE009", severity)]


@pytest.mark.parametrize(("count", "severity"), [("1", "info"), ("2", "info"), ("8", "warning"), ("$GPUS", "warning")])
def test_workers_for_all_cores_of_a_host_with_few_ranks(tmp_path, count, severity):
    text = (
        "import os\nimport torch\nfrom torch.utils.data import DataLoader\n\n"
        "torch.distributed.init_process_group('nccl')\n"
        "loader = DataLoader(read(), sampler=shares, num_workers=os.cpu_count())\n"
    )
    files = {"train.py": text, "run.sh": f"torchrun --nproc_per_node={count} train.py\n"}
    assert found(tmp_path, files) == [("CODE024", severity)]


THREADS = """\
import os
import torch
{above}

def main(model, loader):
    {wrap}
    for x in loader:
        model(x).sum().backward()

main(build(), load())
"""
_PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({})\nargs = parser.parse_args()"
_IF_SEVERAL = "if torch.cuda.device_count() > 1:\n        model = torch.nn.DataParallel(model)"


def threads(above="", wrap=_IF_SEVERAL):
    return {"train.py": THREADS.format(above=above, wrap=wrap), "other.py": "import torch\n"}


GPUS = {
    "a job of SLURM": lambda n: {**threads(), "job.sh": f"#!/bin/bash\n#SBATCH --gres=gpu:a100:{n}\npython train.py\n"},
    "a job of PBS": lambda n: {**threads(), "job.sh": f"#PBS -l select=1:ncpus=8:ngpus={n}\npython train.py\n"},
    "a pod": lambda n: {
        **threads(),
        "job.yaml": f"kind: Job\nspec:\n  command: [python, train.py]\n  limits:\n    nvidia.com/gpu: {n}\n",
    },
    "an option for the visible GPUs": lambda n: threads(
        _PARSES.format(f"'--gpu', default='{devices(n)}'") + "\nos.environ['CUDA_VISIBLE_DEVICES'] = args.gpu"
    ),
    "commands with that option": lambda n: {
        **threads(_PARSES.format("'--gpu'") + "\nos.environ['CUDA_VISIBLE_DEVICES'] = args.gpu"),
        "run.sh": f"python train.py --gpu {devices(n)}\n",
    },
    "a number of GPUs": lambda n: threads(
        _PARSES.format(f"'--n_gpu', type=int, default={n}"), "if args.n_gpu > 1: model = torch.nn.DataParallel(model)"
    ),
    "a range": lambda n: threads(
        _PARSES.format(f"'--n_gpu', type=int, default={n}"),
        "model = torch.nn.DataParallel(model, device_ids=list(range(args.n_gpu)))",
    ),
    "an option whose name is in those of many programs": lambda n: {
        **threads("", "if args.n_gpu > 1: model = torch.nn.DataParallel(model)"),
        "options.py": _PARSES.format(f"'--n_gpu', type=int, default={n}"),
        **{f"net{one}.py": "def predict(all_in_gpu=False): pass\n" for one in range(50)},
    },
    "a list in a text": lambda n: threads(
        _PARSES.format(f"'--ids', default='{devices(n)}'"),
        "model = torch.nn.DataParallel(model, device_ids=[int(one) for one in args.ids.split(',')])",
    ),
    "what a function makes of a configuration": lambda n: {
        **threads(
            "import json\nconfig = json.load(open('c.json'))",
            "ids = prepare(config['n_gpu'])\n    if len(ids) > 1: model = torch.nn.DataParallel(model, device_ids=ids)",
        ),
        "c.json": f'{{"n_gpu": {n}}}\n',
    },
    "a switch": lambda n: {
        **threads(
            _PARSES.format("'--multi_gpu', action='store_true'"),
            "if args.multi_gpu: model = torch.nn.DataParallel(model)",
        ),
        "run.sh": f"python train.py{' --multi_gpu' if n > 1 else ''}\n",
    },
    "a switch in a configuration": lambda n: {
        **threads("cfg = load('c.yaml')", "if cfg['multi_gpu']: model = torch.nn.DataParallel(model)"),
        "c.yaml": f"multi_gpu: {str(n > 1).lower()}\n",
    },
    "a constant": lambda n: threads(f"MANY = {n > 1}", "if MANY: model = torch.nn.DataParallel(model)"),
}


def devices(number):
    return ",".join(map(str, range(number)))


def test_a_counted_number_of_gpus_is_not_the_one_of_another_branch(tmp_path):
    above = (
        "args = parse()\nif args.rank == -1:\n    args.n_gpu = torch.cuda.device_count()\nelse:\n    args.n_gpu = 1\n"
    )
    files = threads(above, "if args.n_gpu > 1: model = torch.nn.DataParallel(model)")
    assert found(tmp_path, files) == [("CODE009", "warning")]


@pytest.mark.parametrize("way", GPUS)
def test_threads_need_more_than_one_gpu(tmp_path, way):
    for number, severity in ((1, "info"), (4, "warning")):
        (folder := tmp_path / str(number)).mkdir()
        assert found(folder, GPUS[way](number)) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("use", "more", "severity"),
    [
        ("print(args.runs)", "", "info"),
        ("print(args.rounds)", "", "error"),
        ("print(args.quiet or args.runs)", "", "error"),
        ("print(args.runs)", "parser.add_argument('--runs')\n", "error"),
        ("print(args.runs)", "args.runs = 3\n", "error"),
        ("print(args.runs)", "vars(args).update(more)\n", "error"),
        ("args.runs += 1", "", "error"),
    ],
)
def test_a_program_stops_at_an_option_that_nothing_declares(tmp_path, use, more, severity):
    text = (
        "import argparse\nimport torch.distributed as dist\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument('--rounds')\nargs = parser.parse_args()\n{more}"
        f"dist.init_process_group('nccl')\n{use}\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    (tmp_path / ".git").mkdir()
    (tmp_path / "other.py").write_text("import torch\n")
    assert found(tmp_path, {"train.py": text}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("use", "severity"),
    [
        ("evaluate(model, loader)", "info"),
        ("fine_tune(model, loader)", "warning"),
        ("evaluate(model, loader)\n    return model", "warning"),
        ("train(model, loader)", "warning"),
    ],
)
def test_threads_that_only_evaluate_are_an_info(tmp_path, use, severity):
    text = (
        "import torch\nfrom training import evaluate, fine_tune\n\n"
        "def train(model, loader):\n    for x in loader:\n        model(x).sum().backward()\n\n"
        "def main():\n    model, optimizer = Net(), make_optimizer()\n"
        "    optimizer.load_state_dict(torch.load('last.pt'))\n"
        f"    model = torch.nn.DataParallel(model).to('cuda')\n    model.eval()\n    {use}\n\nmain()\n"
    )
    assert found(tmp_path, {"evaluate.py": text}) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("own", "other", "severity"),
    [
        ("train_gpu.py", "train_ddp.py", "info"),
        ("training.py", "train_ddp.py", "info"),
        ("train_apex.py", "train_dist_apex.py", "info"),
        ("train_faces.py", "train_ddp.py", "warning"),
        ("train_gpu.py", "ddp/train_ddp.py", "warning"),
        ("train_gpu.py", "ddp_utils.py", "warning"),
    ],
)
def test_programs_whose_names_differ_in_the_use_of_gpus_do_the_same(tmp_path, own, other, severity):
    (tmp_path / "ddp").mkdir()
    threads = "import torch\nmodel = torch.nn.DataParallel(Net())\nfor x in loader:\n    model(x).sum().backward()\n"
    ranks = "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(Net())\ntrain_epoch(model)\n"
    assert found(tmp_path, {own: threads, other: ranks}) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, ["info"]),
        ({"run.sh": "#!/bin/bash\naccelerate launch score.py\n"}, ["info"]),
        ({"slurm.py": "launch = 1\n", "use.py": "from score import main\n"}, []),
        ({"use.py": "from score import main\nrank = os.environ['LOCAL_RANK']\n"}, ["info"]),
    ],
)
def test_waits_for_long_work_need_a_launcher_of_the_project(tmp_path, beside, expected):
    text = (
        "from accelerate import Accelerator\nfrom datasets import load_from_disk\n\ndef main(path, split):\n"
        "    accelerator = Accelerator()\n    data = load_from_disk(path)\n"
        "    with accelerator.main_process_first():\n        data = data.map(split)\n"
    )
    assert [severity for _, severity in found(tmp_path, {"score.py": text} | beside)] == expected


FLAG = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def train(data, distributed=False):
    sampler = DistributedSampler(data) if distributed else None
    loader = DataLoader(data, sampler=sampler)
    for epoch in range(9):
        for batch in loader:
            model(batch).sum().backward()


train(read(){})
"""


@pytest.mark.parametrize(
    ("call", "other", "expected"),
    [
        ("", "", []),
        (", distributed=True", "", ["CODE011"]),
        (", True", "", ["CODE011"]),
        (", **options", "", ["CODE011"]),
        ("", "from train import train\n\ntrain(data, distributed=True)\n", ["CODE011"]),
    ],
)
def test_a_flag_that_no_call_sets_is_false(tmp_path, call, other, expected):
    files = {"train.py": FLAG.format(call), **({"other.py": other} if other else {})}
    assert [name for name, _ in found(tmp_path, files) if name == "CODE011"] == expected


LOADER = """\
import torch
import torch.distributed as dist


class Loader:
    def __init__(self, path, restore=False, kind="best"):
        self.restore = restore
        self.kind = kind
        {condition}
            if dist.get_rank() == 0:
                dist.barrier()


dist.init_process_group()
{call}
"""


@pytest.mark.parametrize(
    ("condition", "call", "other", "expected"),
    [
        ("if restore:", "Loader(path)", "", []),
        ("if self.restore:", "Loader(path)", "", []),
        ("if self.restore and path:", "Loader(path)", "", []),
        ("if kind == 'last':", "Loader(path)", "", []),
        ("if not (restore or self.kind != 'best'):", "Loader(path)", "", ["CODE005"]),
        ("if restore:", "Loader(path, True)", "", ["CODE005"]),
        ("if restore:", "Loader(path, restore=True)", "", ["CODE005"]),
        ("if restore:", "Loader(*given)", "", ["CODE005"]),
        ("if restore:", "make(Loader)", "", ["CODE005"]),
        ("if restore or path:", "Loader(path)", "", ["CODE005"]),
        ("if restore:", "Loader(path)", "from train import Loader\n\nLoader(path, restore=True)\n", ["CODE005"]),
        ("if restore:", "Loader(path)", "from train import Loader as L\n\nL(path, restore=True)\n", ["CODE005"]),
        ("if restore:", "Loader(path)", "from train import Loader\n\nclass Own(Loader):\n    pass\n", ["CODE005"]),
        ("if self.restore:", "Loader(path)", "loader.restore = True\n", ["CODE005"]),
    ],
)
def test_an_argument_that_every_call_leaves_has_its_default(tmp_path, condition, call, other, expected):
    files = {"train.py": LOADER.format(condition=condition, call=call), "other.py": other}
    assert [rule for rule, severity in found(tmp_path, files) if severity != "info"] == expected


SWITCH = """\
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--save-model", action="store_true")
args = parser.parse_args()
dist.init_process_group()
if {test}:
    if dist.get_rank() == 0:
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("test", "files", "is_info"),
    [
        ("args.save_model", {"run.sh": "torchrun train.py --lr 3\n"}, True),
        ("args.save_model", {"README.md": "    torchrun train.py --lr 3\n"}, True),
        ("not args.save_model", {"run.sh": "torchrun train.py --save-model\n"}, True),
        ("not args.save_model", {"run.sh": "# torchrun train.py \\\ntorchrun train.py --save-model\n"}, True),
        ("args.save_model", {"run.sh": "torchrun train.py --save-model\n"}, False),
        ("args.save_model", {"run.sh": "torchrun train.py\n", "more.sh": "torchrun train.py --save-model\n"}, False),
        ("args.save_model", {"run.sh": "torchrun train.py $@\n"}, False),
        ("args.save_model", {"run.sh": "torchrun other.py\n"}, False),
        ("args.save_model", {"run.sh": "torchrun train.py\n", "README.md": "Add `--save-model`.\n"}, False),
        ("args.save_model", {}, False),
    ],
)
def test_a_switch_that_every_command_leaves_is_off(tmp_path, test, files, is_info):
    ((_, severity),) = found(tmp_path, {"train.py": SWITCH.format(test=test), **files})
    assert (severity == "info") == is_info


OPTION = SWITCH.replace('"--save-model", action="store_true"', "{option}")
MODE = '"--mode", "-m", choices=("fit", "score"), default="fit"'
EVERY = '"--every", type=int, default=1'


@pytest.mark.parametrize(
    ("option", "test", "files", "is_info"),
    [
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py\n"}, True),
        (MODE, "args.mode != 'fit'", {"run.sh": "torchrun train.py --mode fit\n"}, True),
        (MODE, "args.mode in ('score', 'both')", {"run.sh": "torchrun train.py\n"}, True),
        (MODE, "args.mode == 'fit'", {"run.sh": "torchrun train.py --mode score\n"}, True),
        (MODE, "args.mode == 'score'", {"run.sh": "MODE=fit\ntorchrun train.py --mode $MODE\n"}, True),
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py -m score\n"}, False),
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py --mo score\n"}, False),
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py --mode $MODE\n"}, False),
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py $1\n"}, False),
        (MODE, "args.mode == 'score'", {"run.sh": "torchrun train.py\n", "a.md": "`--mode score` tests\n"}, False),
        (MODE, "args.mode == 'score'", {}, False),
        (EVERY, "args.every > 1", {"run.sh": "torchrun train.py\n"}, True),
        (EVERY, "args.every == 1", {"run.sh": "torchrun train.py --every 4\ntorchrun train.py --every=2\n"}, True),
        (EVERY, "args.every > 1", {"run.sh": "torchrun train.py\ntorchrun train.py --every=2\n"}, False),
        ("'--path', default=''", "args.path != ''", {"run.sh": "torchrun train.py\n"}, False),
        ("'--path', default='a.pt'", "args.path", {"run.sh": "torchrun train.py\n"}, False),
        ("'--path'", "args.path is not None", {"run.sh": "torchrun train.py\n"}, False),
        ("'--amp', type=bool, default=True", "not args.amp", {"run.sh": "torchrun train.py --amp False\n"}, True),
        ("'--amp', type=str2bool, default=True", "args.amp", {"run.sh": "torchrun train.py --amp False\n"}, True),
        ("'--gpu_mode', default='a'", "args.gpu_mode == 'b'", {"run.sh": "torchrun train.py\n"}, False),
    ],
)
def test_a_branch_for_another_value_than_all_commands_give_is_not_taken(tmp_path, option, test, files, is_info):
    ((_, severity),) = found(tmp_path, {"train.py": OPTION.format(option=option, test=test), **files})
    assert (severity == "info") == is_info


READS_ENTRY = """\
import torch
import torch.distributed as dist

cfg = read("conf.yaml")
mode = cfg.train.mode
dist.init_process_group()
if {test}:
    if dist.get_rank() == 0:
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("test", "files", "is_info"),
    [
        ("cfg.train.amp", {"conf.yaml": "train:\n  amp: false\n"}, True),
        ("cfg['train']['amp']", {"conf.json": '{"train": {"amp": false}}\n'}, True),
        ("cfg.get('amp', False)", {"conf.yaml": "amp: no  # slow\n"}, True),
        ("mode == 'score'", {"conf.yaml": "train:\n  mode: fit\n", "more.yaml": "train:\n  mode: 'tune'\n"}, True),
        ("cfg.amp != 'no'", {"conf.yaml": "amp: 'no'\n"}, True),
        ("cfg.amp == 'no'", {"conf.yaml": "amp: 'no'\n"}, False),
        ("cfg.amp", {"conf.yaml": "amp: f\n"}, False),
        ("not cfg.train.amp", {"conf.yaml": "train:\n  amp: false\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "train:\n  amp: false\n", "more.yaml": "amp: true\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: false\n", "run.sh": "torchrun train.py train.amp=true\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: false\n", "run.sh": "torchrun train.py train.amp=$AMP\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: false\n", "README.md": "Set `amp` for newer GPUs.\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: false\n", "tune.py": "cfg.train.amp = True\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: false\n", "tune.py": "cfg.train.amp = trial.amp or slow\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "amp: ${oc.env:AMP}\n"}, False),
        ("cfg.amp", {"conf.yaml": "amp: no\n", "a.py": "class Net:\n    def f(self):\n        self.amp = x()\n"}, True),
        (
            "cfg.amp",
            {"conf.yaml": "amp: no\n", "a.py": "class Conf:\n    def f(self):\n        self.amp = x()\n"},
            False,
        ),
        ("cfg.train.resume_training", {"conf.yaml": "train:\n  resume_training: false\n"}, False),
        ("cfg.train.weights is not None", {"conf.yaml": "train:\n  weights: null\n"}, False),
        ("cfg.train.amp", {"conf.yaml": "lr: 3\n"}, False),
    ],
)
def test_a_branch_for_another_value_than_all_configurations_have_is_not_taken(tmp_path, test, files, is_info):
    ((_, severity),) = found(tmp_path, {"train.py": READS_ENTRY.format(test=test), **files})
    assert (severity == "info") == is_info


NAMES_ONE = """\
import argparse
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="conf/first.json")
cfg = read(parser.parse_args().config)
dist.init_process_group()
{test}:
    if dist.get_rank() == 0:
        dist.barrier()
"""
TWO = {
    "conf/first.json": '{"train": {"amp": false, "warm": 0}}\n',
    "conf/second.json": '{"train": {"amp": true, "warm": 9}}\n',
}
FIRST = {"run.sh": "torchrun tools/train.py --config conf/first.json\n"}
BOTH = {**FIRST, "more.sh": "torchrun tools/train.py --config conf/second.json\n"}
WITH_PATHS = {"tools/config.py": "class Config:\n    def get(self, *key):\n        return self.at(key)\n"}


@pytest.mark.parametrize(
    ("test", "files", "is_info"),
    [
        ("if cfg.train.amp", FIRST, True),
        ("if cfg.train.amp", {"run.sh": "torchrun tools/train.py --lr 3\n"}, True),
        ("if not cfg.train.amp", FIRST, False),
        ("if cfg.train.amp", BOTH, False),
        ("if cfg.train.amp", {}, False),
        ("if cfg.train.amp", {"run.sh": "torchrun tools/train.py --config $CONF\n"}, False),
        ("if cfg.train.amp", {"run.sh": f"{FIRST['run.sh'].rstrip()} train.amp=true\n"}, False),
        ("if cfg.train.amp", {**FIRST, "tools/tune.py": "cfg.update('amp', True)\n"}, False),
        ("if cfg.train.amp", {**FIRST, "README.md": "Set `amp` for newer GPUs.\n"}, False),
        ("if cfg.get('train', 'amp')", {**FIRST, **WITH_PATHS}, True),
        ("if cfg.get('train', 'amp')", FIRST, False),
        ("for step in range(cfg.train.warm)", FIRST, True),
        ("for step in range(0, cfg.train.warm)", FIRST, True),
        ("for step in range(-4, cfg.train.warm)", FIRST, False),
        ("for step in range(cfg.train.warm)", BOTH, False),
    ],
)
def test_a_branch_for_another_value_than_the_named_configurations_have(tmp_path, test, files, is_info):
    ((_, severity),) = found(tmp_path, {"tools/train.py": NAMES_ONE.format(test=test), **TWO, **files})
    assert (severity == "info") == is_info


@pytest.mark.parametrize(
    ("use", "files", "is_info"),
    [
        ("if cfg.train.amp:\n    score()\n", {}, True),
        ("def both():\n    score()\n\nif cfg.train.amp:\n    both()\n", {}, True),
        ("if cfg.train.amp:\n    score()\nscore()\n", {}, False),
        ("if cfg.train.amp:\n    score()\nhooks['score'] = 1\n", {}, False),
        ("if cfg.train.amp:\n    score()\n", {"other.py": "from train import score\nscore()\n"}, False),
        ("if not cfg.train.amp:\n    score()\n", {}, False),
    ],
)
def test_a_function_that_only_such_branches_use_never_runs(tmp_path, use, files, is_info):
    train = HEAD + 'cfg = read("conf.yaml")\n' + JOINS + "def score():\n" + indented(HANG) + "\n" + use
    ((_, severity),) = found(tmp_path, {"train.py": train, "conf.yaml": "train:\n  amp: false\n", **files})
    assert (severity == "info") == is_info


def test_a_method_that_only_such_branches_use_never_runs(tmp_path):
    train = (
        HEAD + 'cfg = read("conf.yaml")\n' + JOINS + "class Job:\n    def score(self):\n" + indented(HANG, 8)
    ) + "\n    def start(self):\n        if cfg.train.amp:\n            self.score()\n\nJob().start()\n"
    files = {"train.py": train, "conf.yaml": "train:\n  amp: false\n"}
    assert found(tmp_path, files) == [("CODE005", "info")]
    assert found(tmp_path, {"train.py": train.replace("Job:", "Job(Base):")}) == [("CODE005", "error")]


DOWNLOADS = """\
import argparse
import torch
from torchvision.datasets import MNIST

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="/tmp/data")
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
data = MNIST({folder}, download=True)
"""
PODS = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
spec:
  trainer:
    numNodes: 2
    numProcPerNode: 1
    command: [torchrun, --nnodes=2, --nproc_per_node=1, train.py]
"""
CLAIM = "    volumeMounts:\n    - mountPath: {}\n  volumes:\n  - persistentVolumeClaim:\n      claimName: all\n"


@pytest.mark.parametrize(
    ("folder", "files", "is_info"),
    [
        ("'data'", {"job.yaml": PODS}, True),
        ("args.folder", {"job.yaml": PODS}, True),
        ("args.folder", {"job.yaml": PODS + CLAIM.format("/mnt/all")}, True),
        ("args.folder", {"job.yaml": PODS + CLAIM.format("/tmp")}, False),
        ("'data'", {"job.yaml": PODS + CLAIM.format("/mnt/all")}, False),
        ("'data'", {"job.yaml": PODS.replace("numProcPerNode: 1", "numProcPerNode: 8")}, False),
        ("'data'", {"job.yaml": PODS.replace("1", "auto")}, False),
        ("'data'", {"job.yaml": PODS.replace("1", "auto") + "    resources: {nvidia.com/gpu: 1}\n"}, True),
        ("'data'", {"job.yaml": PODS.replace(", train.py", "")}, True),
        ("'data'", {"job.yaml": PODS, "run.sh": "torchrun --nproc-per-node=8 train.py\n"}, False),
    ],
)
def test_pods_share_no_folder_unless_a_volume_is_mounted_there(tmp_path, folder, files, is_info):
    train = DOWNLOADS.format(folder=folder)
    severities = [one for name, one in found(tmp_path, {"train.py": train, **files}) if name == "CODE029"]
    assert severities == ["info" if is_info else "warning"]


@pytest.mark.parametrize(
    ("test", "files", "is_info"),
    [
        ("training_args.fp16", {"run.sh": "torchrun train.py\n"}, True),
        ("training_args.fp16", {"run.sh": "torchrun train.py --fp16 false\n"}, True),
        ("training_args.fp16", {"run.sh": "torchrun train.py --fp16\n"}, False),
        ("training_args.fp16", {"run.sh": "torchrun train.py args.json\n", "args.json": '{"fp16": true}\n'}, False),
        ("training_args.do_train", {"run.sh": "torchrun train.py\n"}, False),
        ("training_args.fp16", {}, False),
    ],
)
def test_training_arguments_have_the_defaults_of_transformers(tmp_path, test, files, is_info):
    train = READS_ENTRY.format(test=test).replace("import torch\n", "from transformers import TrainingArguments\n", 1)
    ((_, severity),) = found(tmp_path, {"train.py": train, **files})
    assert (severity == "info") == is_info
    ((_, severity),) = found(tmp_path, {"train.py": f"import trl\n{train}", **files})
    assert severity == "error"


DECLARES = """\
import argparse

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-model", action="store_true")
    return parser.parse_args()
"""
LOCAL = "def build():\n    save_model = Saver()\n    return save_model\n"
OF_TEXT = 'parser.add_argument("--saves", default="no")'
FIELDS = "from dataclasses import dataclass\n\n@dataclass\nclass Options:\n    save_model: bool = {}\n"


@pytest.mark.parametrize("declares", [DECLARES, FIELDS.format("False"), FIELDS.format("field(default=False)")])
@pytest.mark.parametrize(
    ("files", "is_info"),
    [
        ({"run.sh": "torchrun train.py --lr 3\n"}, True),
        ({"run.sh": "torchrun train.py --save-model\n"}, False),
        ({"run.sh": "torchrun train.py\n", "other.sh": "torchrun other.py --save_model\n"}, False),
        ({"run.sh": "torchrun train.py\n", "start.py": "run(['torchrun', 'train.py', '--save-model'])\n"}, False),
        ({"run.sh": "torchrun train.py\n", "tune.py": "args.save_model = True\n"}, False),
        ({"run.sh": "torchrun train.py\n", "model.py": LOCAL}, True),
        ({"run.sh": "torchrun train.py\n", "model.py": LOCAL.replace("return", "args.save_model =")}, False),
        ({"run.sh": "torchrun train.py\n", "model.py": LOCAL.replace("return", "return locals(),")}, False),
        ({"run.sh": "torchrun train.py $EXTRA_ARGS\n"}, False),
        ({"run.sh": "torchrun other.py\n"}, False),
    ],
)
def test_options_that_another_module_declares(tmp_path, declares, files, is_info):
    train = READS_ENTRY.format(test="args.save_model").replace("cfg =", "from options import options\nargs = cfg =")
    ((_, severity),) = found(tmp_path, {"train.py": train, "options.py": declares, **files})
    assert (severity == "info") == is_info


@pytest.mark.parametrize(
    ("other", "severity"),
    [
        ("import os\nos.system(f'python train.py --lr {lr}')\n", "info"),
        ("import subprocess\nsubprocess.run('torchrun train.py', shell=True)\n", "error"),
        ("# python train.py\n", "error"),
        ("import os\nos.system('python train.py --gpus 8')\n", "error"),
    ],
)
def test_a_program_that_starts_a_script_with_python_has_one_process(tmp_path, other, severity):
    assert found(tmp_path, {"train.py": HEAD + JOINS + HANG, "all.py": other}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("line", "severity"), [("!python train.py --lr 3", "info"), ("!torchrun --nproc_per_node=2 train.py", "error")]
)
def test_cells_of_a_notebook_say_how_many_processes_a_script_has(tmp_path, line, severity):
    cell = f'{{"cells": [{{"cell_type": "code", "source": ["{line}\\n"]}}], "metadata": {{}}, "nbformat": 4}}'
    assert found(tmp_path, {"train.py": HEAD + JOINS + HANG, "run.ipynb": cell}) == [("CODE005", severity)]


@pytest.mark.parametrize(("count", "expected"), [("len(hosts)", "info"), ("len(sys.argv)", "warning")])
def test_ranks_of_different_hosts_share_no_folder(tmp_path, count, expected):
    text = (
        f"import torch.distributed as dist\nfrom torchvision import datasets\n\nworld_size = {count}\n"
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        "data = datasets.MNIST('./data', train=True, download=True)\n"
    )
    files = {"train.py": text, "other.py": ""}
    assert [one for rule, one in found(tmp_path, files) if rule == "CODE029"] == [expected]


PREPARES = """\
from accelerate import Accelerator
from net import Net, read
from step import step


def main():
    accelerator = Accelerator()
    model = Net()
    model, loader = accelerator.prepare(model, read())
    for batch in loader:
        {use}
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()


main()
"""
NETWORK = "class Net(Module):\n    def __init__(self):\n        self.scheduler = make()\n\ndef read():\n    pass\n"


@pytest.mark.parametrize(
    ("use", "other", "severity"),
    [
        ("model.scheduler.step()", {}, "info"),
        ("model.state_dict()", {}, "error"),
        ("model.module.scheduler.step()", {}, "error"),
        ("loader.scheduler", {}, "error"),
        ("model.other", {}, "error"),
        ("model = accelerator.unwrap_model(model); model.scheduler", {}, "error"),
        ("step(model)", {"step.py": "def step(model):\n    model.scheduler.step()\n"}, "info"),
        (
            "step(model)",
            {"step.py": "def step(model):\n    go(net=model)\n\ndef go(net):\n    net.scheduler\n"},
            "info",
        ),
        ("step(model)", {"step.py": "def step(model):\n    if model.training:\n        model.scheduler\n"}, "error"),
        ("step(model)", {"step.py": "def step(model):\n    model = model.module\n    model.scheduler\n"}, "error"),
        (
            "step(model)",
            {"step.py": "def step(model, x=0):\n    if x:\n        return\n    model.scheduler\n"},
            "error",
        ),
        ("step(loader)", {"step.py": "def step(model):\n    model.scheduler.step()\n"}, "error"),
        ("model.scheduler if accelerator.num_processes == 1 else model.module.scheduler", {}, "error"),
        ("model.scheduler.step()", {"all.yaml": "distributed_type: DEEPSPEED\n"}, "error"),
    ],
)
def test_a_program_that_reads_past_the_wrapper_works_in_one_process(tmp_path, use, other, severity):
    files = {"train.py": PREPARES.format(use=use), "net.py": NETWORK, "step.py": "def step(model): pass\n", **other}
    assert found(tmp_path, files) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("made", "severity"),
    [("Net().cuda()", "info"), ("Net().to('cuda').train()", "info"), ("Net().inner()", "error")],
)
def test_a_model_that_is_placed_when_it_is_made(tmp_path, made, severity):
    train = PREPARES.format(use="model.scheduler.step()").replace("Net()", made)
    files = {"train.py": train, "net.py": NETWORK, "step.py": "def step(model): pass\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]


WRAPS = """import os

import torch
from net import Net, fit
from torch.nn.parallel import DistributedDataParallel
{imports}

def main():
    rank = {rank}
    {sets}
    model = DistributedDataParallel(Net().to("cuda"), device_ids=[rank])
    fit(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.save(Net().predictions, "last.pt")


main()
"""
JOIN = 'import torch.distributed as dist\ndist.init_process_group("nccl")'
SETS = "torch.cuda.set_device(rank)"
NUMBER, TEXT = 'int(os.environ["LOCAL_RANK"])', 'os.environ["LOCAL_RANK"]'


@pytest.mark.parametrize(
    ("imports", "rank", "sets", "severity"),
    [
        (JOIN, NUMBER, SETS, "error"),
        ("", NUMBER, SETS, "info"),
        ("from start import join\njoin()", NUMBER, SETS, "error"),
        ("from mmengine import start\nstart()", NUMBER, SETS, "error"),
        (JOIN, TEXT, SETS, "info"),
        (JOIN, 'os.getenv("LOCAL_RANK", 0)', SETS, "info"),
        (JOIN, TEXT, "torch.cuda.set_device(int(rank))", "error"),
        (JOIN, TEXT, "print(rank)", "error"),
        (JOIN, 'os.environ["DEVICE"]', SETS, "error"),
    ],
)
def test_a_program_that_fails_to_wrap_its_model_has_one_process(tmp_path, imports, rank, sets, severity):
    files = {
        "train.py": WRAPS.format(imports=imports, rank=rank, sets=sets),
        "net.py": "class Net:\n    pass\n\ndef fit(model, optimizer):\n    optimizer.step()\n",
        "start.py": "import torch\n\ndef join():\n    torch.distributed.init_process_group()\n",
    }
    assert [one for one in found(tmp_path, files) if one[0] == "CODE029"] == [("CODE029", severity)]


def test_another_wrapper_in_the_opposite_branch_is_no_other_model(tmp_path):
    branch = (
        "if several:\n        model = DistributedDataParallel(model)\n    else:\n        model = DataParallel(model)\n"
    )
    text = PREPARES.format(use="step(model)").replace("from accelerate import Accelerator", IMPORTS_BRANCH)
    text = text.replace("model, loader = accelerator.prepare(model, read())", f"loader = read()\n    {branch}")
    files = {"train.py": text, "net.py": NETWORK, "step.py": "def step(model):\n    model.scheduler.step()\n"}
    assert found(tmp_path, files) == [("CODE005", "info")]
    files["train.py"] = text.replace("    else:\n        model = ", "    model = ")
    assert found(tmp_path, files) == [("CODE005", "error")]


IMPORTS_BRANCH = """from accelerate import Accelerator
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

several = Accelerator().num_processes > 1
"""


SHARDS = """import os

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
sampler = DistributedSampler(read(), num_replicas=dist.get_world_size(), rank=local_rank)
"""


@pytest.mark.parametrize(
    ("files", "is_reported"),
    [
        ({}, True),
        ({"README.md": "```\ntorchrun --standalone --nproc_per_node=4 train.py\n```\n"}, False),
        ({"README.md": "`$ python -m torch.distributed.launch --nproc_per_node=4 train.py`\n"}, False),
        ({"README.md": "torchrun --nnodes=2 --nproc_per_node=4 train.py\n"}, True),
        ({"run.sh": "torchrun --nproc-per-node=8 train.py\n"}, False),
        ({"run.sh": "torchrun --nproc-per-node=8 train.py\n", "README.md": "torchrun --nnodes 4 train.py\n"}, True),
        ({"run.sh": "srun python train.py\n"}, True),
        ({"go.py": "import os\nos.system('torchrun --nnodes 2 train.py')\n"}, True),
    ],
)
def test_the_local_rank_is_the_rank_if_every_launch_has_one_host(tmp_path, files, is_reported):
    reported = found(tmp_path, {"train.py": SHARDS, "other.py": "import torch\n", **files})
    assert [one for one in reported if one[0] == "CODE012"] == [("CODE012", "warning")] * is_reported


@pytest.mark.parametrize(
    ("above", "command", "expected"),
    [
        ("# torchrun --nnodes=1 --nproc_per_node=4 train.py\n", "torchrun --nproc_per_node=4 train.py\n", None),
        ('nodes = int(os.environ.get("NNODES", 1))\n', "torchrun --nproc_per_node=4 train.py\n", "info"),
        ('nodes = int(os.environ.get("NNODES", 1))\n', "torchrun --nnodes=2 --nproc_per_node=4 train.py\n", "error"),
        ("# torchrun --nnodes=2 train.py\n", "srun python train.py\n", "warning"),
    ],
)
def test_the_local_rank_in_code_for_several_hosts(tmp_path, above, command, expected):
    text = SHARDS.replace("dist.init", f"{above}dist.init")
    reported = found(tmp_path, {"train.py": text, "other.py": "import torch\n", "run.sh": command})
    assert [one for one in reported if one[0] == "CODE012"] == ([("CODE012", expected)] if expected else [])


ENGINE = """import deepspeed
settings = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
"""


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ("", "", "info"),
        ('"train_batch_size": 1', '"train_batch_size": 8', "error"),
        ("train_batch_size", "train_micro_batch_size_per_gpu", "error"),
        ("settings =", "settings = read()\nsettings =", "error"),
    ],
)
def test_a_batch_of_one_sample_is_for_one_rank(tmp_path, before, after, severity):
    head = ENGINE.replace(before, after) if before else ENGINE
    text = head + HEAD + "engine = deepspeed.initialize(model=net, config=settings)\n" + JOINS + HANG
    assert found(tmp_path, {"train.py": text, "other.py": ""}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "error"),
        ({"run.sh": "torchrun --standalone --nproc_per_node=4 train.py\n"}, "info"),
        ({"run.sh": "torchrun --standalone --nproc_per_node=8 train.py\n"}, "error"),
        ({"run.sh": "torchrun --nnodes=2 --nproc_per_node=4 train.py\n"}, "error"),
        (
            {"run.sh": "torchrun --standalone --nproc_per_node=4 train.py\n", "README.md": "torchrun train.py\n"},
            "error",
        ),
    ],
)
def test_shards_as_many_as_every_launch_starts_ranks_are_an_info(tmp_path, files, severity):
    text = SHARDS.replace("dist.get_world_size()", "4")
    reported = found(tmp_path, {"train.py": text, "other.py": "import torch\n", **files})
    assert [one for one in reported if one[0] == "CODE012"] == [("CODE012", severity)]


def test_the_commands_of_another_folder_start_the_script_of_that_folder(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    one = {"first/train.py": "print()\n", "first/run.sh": "torchrun --nproc_per_node=8 train.py\n"}
    two = {"second/train.py": HEAD + JOINS + HANG, "second/run.sh": "torchrun --nproc_per_node=1 train.py\n"}
    assert found(tmp_path, one | two) == [("CODE005", "info")]


def test_a_module_is_that_of_the_programs_beside_it(tmp_path):
    files = {}
    for name, count in (("first", 1), ("second", 8)):
        (tmp_path / name / "core").mkdir(parents=True)
        files[f"{name}/core/__init__.py"] = ""
        files[f"{name}/core/train.py"] = HEAD + "def fit():\n" + indented(JOINS + HANG)
        files[f"{name}/main.py"] = "from core.train import fit\n\nif __name__ == '__main__':\n    fit()\n"
        files[f"{name}/run.sh"] = f"torchrun --nproc_per_node={count} main.py\n"
    assert found(tmp_path, files) == [("CODE005", "info"), ("CODE005", "error")]


def test_a_program_that_runs_srun_itself_needs_none(tmp_path):
    options = "".join(f"#SBATCH --{one}\n" for one in ("nodes=4", "ntasks-per-node=2", "gres=gpu:2"))
    batch = f"#!/bin/bash\n{options}\npython $HOME/train.py\n"
    assert found(tmp_path, {"job.sh": batch, "train.py": "import torch\n"}) == [("ENV014", "warning")]
    starts = "import subprocess\n\nsubprocess.run('srun -N1 python work.py', shell=True)\n"
    assert found(tmp_path, {"job.sh": batch, "train.py": starts}) == []


TRAINS = "import torch\nfrom layers import Net\n\nmodel = {}\nloss(model(x)).backward()\n"
SPAWNS = "import torch.multiprocessing as mp\n\nmp.spawn(work, nprocs=4)\n"


@pytest.mark.parametrize(
    ("program", "layers", "nodes", "expected"),
    [
        (SPAWNS, "", 1, []),
        ("import layers\n\nlayers.start()\n", f"def start():\n{indented(SPAWNS)}", 1, []),
        (SPAWNS, "", 2, [("ENV014", "warning")]),  # those of the other host are never started
        (TRAINS.format("Net()"), "", 1, []),
        (TRAINS.format("torch.nn.DataParallel(Net())"), "", 1, []),
        (TRAINS.format("torch.nn.parallel.DistributedDataParallel(Net())"), "", 1, [("ENV014", "warning")]),
        (TRAINS.format("Net()"), "import torch.distributed as dist\n", 1, [("ENV014", "warning")]),
        (TRAINS.format("Net(os.environ['SLURM_PROCID'])"), "", 1, [("ENV014", "warning")]),
        ("from framework import run\n\nrun()\n", "", 1, [("ENV014", "info")]),  # nothing shows that it has ranks
        ("from framework import run\n\nrun()\n", "", 2, [("ENV014", "warning")]),
        ("from accelerate import Accelerator\n\nAccelerator()\n", "", 1, [("ENV014", "info")]),
        ("import pytorch_lightning as pl\n\npl.Trainer().fit(net)\n", "", 1, [("ENV014", "warning")]),
    ],
)
def test_tasks_may_reserve_the_cpus_of_one_process(tmp_path, program, layers, nodes, expected):
    options = "".join(f"#SBATCH --{one}\n" for one in (f"nodes={nodes}", "ntasks-per-node=8", "gres=gpu:8"))
    batch = f"#!/bin/bash\n{options}\npython -u train.py --gpu 0 1\n"
    hits = found(tmp_path, {"job.sh": batch, "train.py": program, "layers.py": layers})
    assert [one for one in hits if one[0] == "ENV014"] == expected


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        ("```\nbash -x job.sh\n```\n", "info"),
        ("`sh scripts/job.sh`\n", "info"),
        ("```\nbash job.sh\nsbatch job.sh\n```\n", "warning"),
        ("```\nbash job.sh.old\n```\n", "warning"),
        ("See job.sh\n", "warning"),
    ],
)
def test_a_shell_reads_the_lines_for_slurm_as_comments(tmp_path, page, severity):
    options = "".join(f"#SBATCH --{one}\n" for one in ("nodes=1", "ntasks-per-node=8", "gres=gpu:8"))
    program = TRAINS.format("torch.nn.parallel.DistributedDataParallel(Net())")
    files = {"job.sh": f"#!/bin/bash\n{options}\npython train.py\n", "train.py": program, "README.md": page}
    (tmp_path / ".git").mkdir()
    assert ("ENV014", severity) in found(tmp_path, files)


def test_a_program_of_the_project_without_a_group_may_be_slow(tmp_path):
    batch = "export CUDA_LAUNCH_BLOCKING=1\nsrun python {}.py\n"
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "group.py").write_text("import torch.distributed as dist\n\ndist.init_process_group('nccl')\n")
    files = {"job.sh": batch.format("alone"), "alone.py": "import torch\nimport model\n\nmodel.run()\n"}
    assert found(tmp_path, files) == []
    files = {"job.sh": batch.format("ranks"), "ranks.py": "import torch\nimport group\n\ngroup.run()\n"}
    assert found(tmp_path, files) == [("NCCL007", "info")]
    assert found(tmp_path, {"job.sh": batch.format("absent")}) == [("NCCL007", "info")]


def test_a_module_of_the_same_name_is_another_one(tmp_path):
    guard = "if world_size > 1:\n    raise NotImplementedError\nelse:\n    main()\n"
    script = HEAD + JOINS + "def main():\n" + indented(HANG) + "\n\n" + guard
    assert found(tmp_path, {"train.py": script, "other.py": "from tools.train import *\n\nmain()\n"}) == []
    assert ("CODE005", "error") in found(tmp_path, {"train.py": script, "other.py": "from train import *\n\nmain()\n"})


TESTED = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def validation_step(self, batch, number):
        self.log("val_loss", self.net(batch), sync_dist=True)

    def on_test_epoch_end(self):
        self.log("errors", self.errors / self.words)
"""


@pytest.mark.parametrize(
    ("evaluates", "expected"),
    [
        ("trainer = Trainer(devices=1)\ntrainer.test(net)\n", []),
        ("trainer = Trainer(devices=8)\ntrainer.test(net)\n", [("CODE007", "warning")]),
        ("trainer = Trainer(devices=1)\ntrainer.fit(net)\n", [("CODE007", "warning")]),
    ],
)
def test_metrics_of_a_test_on_one_device_cover_all_of_it(tmp_path, evaluates, expected):
    assert found(tmp_path, {"net.py": TESTED, "run.py": "from net import Net\n" + evaluates}) == expected


OLD_HOOK = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def training_epoch_end(self, outputs):
        print(outputs)
"""


@pytest.mark.parametrize(
    ("use", "severity"),
    [
        ("trainer.fit(Net())\n", "error"),
        ("net = Net.load_from_checkpoint('a.ckpt')\n", "info"),
        ("net = Net.load_from_checkpoint('a.ckpt')\nfit(Net)\n", "error"),
    ],
)
def test_an_old_hook_of_a_class_that_is_only_restored_is_an_info(tmp_path, use, severity):
    files = {"net.py": OLD_HOOK, "run.py": "from net import Net\n" + use, "requirements.txt": "lightning\n"}
    assert found(tmp_path, files) == [("CODE022", severity)]


def test_old_calls_are_warnings_where_the_project_installs_no_lightning(tmp_path):
    files = {"net.py": OLD_HOOK, "run.py": "import net\ntrainer.fit(net.Net())\n"}
    (tmp_path / "requirements.txt").write_text("torch>=2\n")
    assert found(tmp_path, files) == [("CODE022", "warning")]


EXPORTED = "#!/usr/bin/env python\n\n# In[1]:\n" + HEAD + "\n# In[2]:\n" + JOINS + HANG


@pytest.mark.parametrize(
    ("text", "page", "expected"),
    [
        (EXPORTED, "", []),
        (EXPORTED, "torchrun --nproc_per_node=4 train.py\n", [("CODE005", "error")]),
        (EXPORTED + "from accelerate import notebook_launcher\nnotebook_launcher(run)\n", "", [("CODE005", "error")]),
        (HEAD + JOINS + HANG, "", [("CODE005", "error")]),
        ("# Databricks notebook source\n" + HEAD + JOINS + HANG, "", []),
    ],
)
def test_an_exported_notebook_is_one_process_unless_something_starts_ranks(tmp_path, text, page, expected):
    (tmp_path / "README.md").write_text(page)
    assert found(tmp_path, {"train.py": text, "other.py": "import torch\n"}) == expected


@pytest.mark.parametrize(
    ("helpers", "expected"),
    [
        ("def log():\n    pass\n", [("CODE005", "info")]),
        ("def log():\n    pass\n\n# def prepare():\n", [("CODE005", "info")]),
        ("def log():\n    pass\n\ndef prepare():\n    pass\n", [("CODE005", "error")]),
        ("from os import *\n\ndef log():\n    pass\n", [("CODE005", "error")]),
        ("def other():\n    pass\n", [("CODE005", "info")]),  # the folder of a program comes first in sys.path
    ],
)
def test_a_module_whose_import_from_the_project_fails_never_runs(tmp_path, helpers, expected):
    train = "from helpers import log, prepare\n" + HEAD + JOINS + HANG
    assert found(tmp_path, {"train.py": train, "helpers.py": helpers}) == expected


def test_a_failing_import_of_a_script_that_is_launched_will_be_repaired(tmp_path):
    train = "from helpers import log, prepare\n" + HEAD + JOINS + HANG
    files = {"train.py": train, "helpers.py": "def log():\n    pass\n", "job.sh": "#!/bin/bash\ntorchrun train.py\n"}
    assert found(tmp_path, files) == [("CODE005", "error")]


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("from helpers import log, gone\nfrom train import run\n", [("CODE005", "info")]),
        ("from helpers import log\nfrom train import run\n", [("CODE005", "error")]),
    ],
)
def test_a_module_that_only_failing_modules_import_never_runs(tmp_path, main, expected):
    train = HEAD + "def run():\n    " + JOINS + indented(HANG)
    files = {"train.py": train, "main.py": main, "helpers.py": "def log():\n    pass\n"}
    assert found(tmp_path, files) == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("model = model_sync(1)", [("CODE005", "info")]),
        ("model = print and model_sync(1)", [("CODE005", "error")]),
        ("model = len([1])", [("CODE005", "error")]),
        ("for model_sync in ():\n        pass\n    model_sync(1)", [("CODE005", "error")]),
    ],
)
def test_a_function_that_uses_an_undefined_name_always_fails(tmp_path, statement, expected):
    train = HEAD + "def run():\n    " + JOINS + indented(HANG) + f"    {statement}\n\nrun()\n"
    assert found(tmp_path, {"train.py": train, "other.py": "import torch\n"}) == expected


@pytest.mark.parametrize(
    ("declares", "severity"),
    [
        ("passer = argparse.ArgumentParser()", "info"),
        ("parser = argparse.ArgumentParser()", "error"),
        ("from argparse import *\n    parser = ArgumentParser()", "error"),
    ],
)
def test_a_program_that_starts_with_an_undefined_name_always_fails(tmp_path, declares, severity):
    train = HEAD + "import argparse\n\ndef run(args):\n    " + JOINS + indented(HANG)
    train += f"\nif __name__ == '__main__':\n    {declares}\n    args = parser.parse_args()\n    run(args)\n"
    assert found(tmp_path, {"train.py": train, "other.py": "import torch\n"}) == [("CODE005", severity)]


LOADS = "dist.init_process_group('nccl')\nmodel.load_state_dict(torch.load('checkpoint.pt'))\n"


@pytest.mark.parametrize(
    ("jobs", "binds", "expected"),
    [
        (["#SBATCH --gpus-per-task=1\nsrun python train.py\n"], "", []),
        (["srun --gpu-bind=single:1 python train.py\n"], "", []),
        (["#SBATCH --gpus-per-task=1\nsrun python train.py\n", "torchrun train.py\n"], "", [("CODE001", "warning")]),
        (["#SBATCH --gpus-per-task=4\nsrun python train.py\n"], "", [("CODE001", "warning")]),
        (["export CUDA_VISIBLE_DEVICES=$1\npython train.py --rank $2\n"], "", []),
        (["export CUDA_VISIBLE_DEVICES=$1\ntorchrun train.py\n"], "", [("CODE001", "warning")]),
        (
            ["#SBATCH --gpus-per-task=1\nsrun python train.py\n"],
            "torch.cuda.set_device(local_rank)\n",
            [("CODE001", "warning")],
        ),
    ],
)
def test_checkpoints_are_loaded_to_the_own_gpu_if_every_launch_shows_one(tmp_path, jobs, binds, expected):
    jobs = {f"job{number}.sh": "#!/bin/bash\n" + job for number, job in enumerate(jobs)}
    assert found(tmp_path, {"train.py": HEAD + binds + LOADS, **jobs}) == expected


BINDS = 'export CUDA_VISIBLE_DEVICES=$((3 - ${PMI_LOCAL_RANK} % 4))\nexec "$@"\n'
BOUND = "mpiexec -n 8 --ppn 4 ./bind.sh python3 train.py\n"


@pytest.mark.parametrize(
    ("binds", "job", "expected"),
    [
        (BINDS, BOUND, []),
        (BINDS.replace("3 - ${PMI_LOCAL_RANK} % 4", "0"), BOUND, [("CODE001", "warning")]),
        (BINDS.replace("exec", "echo"), BOUND, [("CODE001", "warning")]),
        (BINDS, BOUND.replace("./bind.sh ", ""), [("CODE001", "warning")]),
        ("gpu=$SLURM_LOCALID\nexport CUDA_VISIBLE_DEVICES=$gpu\nexec $*\n", BOUND.replace("mpiexec", "srun"), []),
        (BINDS, BOUND.replace("train.py", "other.py"), []),
    ],
)
def test_checkpoints_are_loaded_to_the_own_gpu_if_a_script_shows_each_rank_one(tmp_path, binds, job, expected):
    files = {"train.py": HEAD + LOADS, "bind.sh": "#!/bin/bash\n" + binds, "job.sh": "#!/bin/bash\n" + job}
    assert found(tmp_path, files) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, "info"), (4, "error")])
def test_runs_of_horovod_say_how_many_processes_there_are(tmp_path, count, expected):
    train = (
        "import horovod\n" + HEAD + "def run():\n    " + JOINS + indented(HANG) + f"\nhorovod.run(run, np={count})\n"
    )
    assert found(tmp_path, {"train.py": train, "other.py": "import torch\n"}) == [("CODE005", expected)]


EVALUATES = (
    "import argparse\n"
    + HEAD
    + "parser = argparse.ArgumentParser()\nparser.add_argument('--dist_eval', action='store_true')\n"
    "args = parser.parse_args()\n" + JOINS + "def evaluate():\n    if args.dist_eval:\n        dist.barrier()\n\n"
    "if dist.get_rank() == 0:\n    evaluate()\n"
)


@pytest.mark.parametrize(
    ("text", "launch", "expected"),
    [
        (EVALUATES, "torchrun train.py\n", "warning"),
        (EVALUATES, "torchrun train.py --dist_eval\n", "error"),
        (EVALUATES.replace("'store_true'", "'store_true', default=True"), "torchrun train.py\n", "error"),
        (EVALUATES + "args.dist_eval = True\n", "torchrun train.py\n", "error"),
    ],
)
def test_a_collective_behind_an_option_that_nothing_sets_is_a_warning(tmp_path, text, launch, expected):
    assert found(tmp_path, {"train.py": text, "job.sh": "#!/bin/bash\n" + launch}) == [("CODE005", expected)]


JOB = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:v100:1\nsrun start train.py\n"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JOB, "info"),
        (JOB.replace("v100:1", "v100:4"), "error"),
        (JOB.replace("nodes=1", "nodes=2"), "error"),
        (JOB.replace("--nodes=1", "-N 1\n#SBATCH -n 1"), "info"),
        (JOB.replace("--nodes=1", "-N 2"), "error"),
        (JOB.replace("--nodes=1", "-N1\n#SBATCH -n4"), "error"),
        (JOB.replace("#SBATCH --nodes=1", "#SBATCH --ntasks=4"), "error"),
        (JOB.replace("srun start", "torchrun --nproc_per_node=2"), "error"),
    ],
)
def test_a_job_with_one_gpu_has_one_process(tmp_path, job, expected):
    files = {"train.py": HEAD + JOINS + HANG, "net.py": "import torch\n", "job.slurm": job}
    assert found(tmp_path, files) == [("CODE005", expected)]


PROGRAM = 'from steps import wait\n\nif __name__ == "__main__":\n    wait()\n'


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"one.py": PROGRAM}, "info"),
        ({"one.py": PROGRAM, "two.py": PROGRAM}, "error"),
        ({"one.py": PROGRAM, "three.py": PROGRAM}, "error"),
        ({"one.py": PROGRAM.replace("steps", "between"), "between.py": "from steps import wait\n"}, "info"),
        ({"one.py": PROGRAM + "    torch.multiprocessing.spawn(wait, nprocs=8)\n"}, "error"),
        ({}, "error"),
    ],
)
def test_the_programs_that_import_a_module_say_how_many_processes_it_has(tmp_path, files, severity):
    runs = "accelerate launch --num_processes=1 one.py\naccelerate launch --num_processes=2 two.py\n"
    steps = HEAD + "def wait():\n" + indented(JOINS + HANG)
    assert found(tmp_path, {"steps.py": steps, "run.sh": runs, **files}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("imports", "severity"), [("steps", "info"), ("other.steps", "error")], ids=["its own copy", "that of another"]
)
def test_a_program_imports_the_copy_of_a_module_below_its_own_folder(tmp_path, imports, severity):
    steps = HEAD + "def wait():\n" + indented(JOINS + HANG)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "core").mkdir()
        count = 1 if name == "one" else 4
        module = imports.replace("steps", "core.steps").replace("other.", "one." if name == "two" else "")
        (tmp_path / name / "main.py").write_text(PROGRAM.replace("steps", module))
        (tmp_path / name / "run.sh").write_text(f"torchrun --nproc_per_node={count} main.py\n")
        (tmp_path / name / "core" / "steps.py").write_text(steps if name == "one" else "def wait():\n    pass\n")
    assert found(tmp_path, {}) == [("CODE005", severity)]


RAY = (
    "import ray.train\nfrom ray.train import ScalingConfig\nfrom ray.train.torch import TorchTrainer\n\n"
    "def loop():\n    if ray.train.get_context().get_world_rank() == 0:\n        dist.barrier()\n\n"
    "def main(cfg):\n    trainer = cfg.get('trainer')\n"
    "    TorchTrainer(loop, scaling_config=ScalingConfig(num_workers={}, use_gpu=True)).fit()\n"
)


@pytest.mark.parametrize(
    ("workers", "configurations", "severity"),
    [
        ("1", (), "info"),
        ("4", (), "error"),
        ("cfg.workers", (), "error"),
        ("trainer.num_workers", (1,), "info"),
        ("trainer['num_workers']", (1, 1), "info"),
        ("cfg.trainer.num_workers", (1,), "info"),
        ("cfg.trainer.num_workers", (1, 8), "error"),
        ("cfg.loader.num_workers", (1,), "error"),
        ("trainer.num_workers", (), "error"),
    ],
)
def test_a_job_of_ray_says_how_many_workers_it_has(tmp_path, workers, configurations, severity):
    files = {"train.py": HEAD + RAY.format(workers)}
    for number, count in enumerate(configurations):
        text = f"loader:\n  num_workers: 4\n\ntrainer:\n  use_gpu: true\n  num_workers: {count}\n"
        files[f"conf{number}.yaml"] = text
    assert found(tmp_path, files) == [("CODE005", severity)]


TRAINED = """\
import lightning.pytorch as pl
import wandb

def main(cfg):
    wandb.init(project="net")
    pl.Trainer(gpus=cfg.gpus, accelerator="ddp"{}).fit(Net())

main(read("config.yaml"))
"""


@pytest.mark.parametrize(
    ("more", "files", "severity"),
    [
        ("", {"config.yaml": "gpus: 1\nepochs: 3\n"}, "info"),
        ("", {"config.yaml": "gpus: 4\nepochs: 3\n"}, "warning"),
        ("", {"config.yaml": "gpus: 1\n", "run.sh": "#!/bin/bash\npython train.py gpus=4\n"}, "warning"),
        (", num_nodes=2", {"config.yaml": "gpus: 1\nepochs: 3\n"}, "warning"),
        ("", {"config.yaml": "epochs: 3\n"}, "warning"),
    ],
)
def test_configurations_say_how_many_devices_a_trainer_gets(tmp_path, more, files, severity):
    files = {"train.py": TRAINED.format(more)} | files
    assert [one for name, one in found(tmp_path, files) if name == "CODE041"] == [severity]


UNDIVIDED = """\
import argparse
import torch
import torch.distributed as dist
import wandb
from torch.utils.data.distributed import DistributedSampler

args = argparse.ArgumentParser().parse_args()
if args.distributed:
    dist.init_process_group()
if {test}:
    sampler = DistributedSampler(data)
wandb.init(project="net")
if args.distributed:
    model = torch.nn.parallel.DistributedDataParallel(model)
train(model).backward()
"""


@pytest.mark.parametrize(
    ("test", "files", "severity"),
    [
        ("False", {}, "info"),
        ("args.distributed and False", {}, "info"),
        ("0", {"README.md": "    python train.py\n"}, "info"),
        ("args.distributed", {}, "warning"),
        ("False", {"run.sh": "torchrun --nproc-per-node=8 train.py\n"}, "warning"),
        ("False", {"README.md": "    torchrun --nproc-per-node=8 \\\n        train.py\n"}, "warning"),
    ],
)
def test_a_program_whose_samplers_are_switched_off_has_one_process(tmp_path, test, files, severity):
    files = {"train.py": UNDIVIDED.format(test=test), "other.py": "import torch\n", **files}
    assert [one for name, one in found(tmp_path, files) if name == "CODE041"] == [severity]


@pytest.mark.parametrize(("test", "severity"), [("args.saves != 'no'", "info"), ("args.saves == 'no'", "error")])
def test_an_option_is_read_as_its_parser_reads_it(tmp_path, test, severity):
    train = READS_ENTRY.format(test=test).replace("cfg =", "from options import options\nargs = cfg =")
    declares = DECLARES.replace('parser.add_argument("--save-model", action="store_true")', OF_TEXT)
    files = {"train.py": train, "options.py": declares, "run.sh": "torchrun train.py --saves no\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]
    fields = FIELDS.partition("    save")[0] + "    saves: Literal['no', 'all'] = 'no'\n"
    assert found(tmp_path, {**files, "options.py": fields}) == [("CODE005", severity)]


MARKED = JOINS + HANG.replace("barrier()", "barrier()  # BUG: the other ranks do not call it")


@pytest.mark.parametrize(
    ("program", "page", "severity"),
    [
        (MARKED, "Let us write a buggy script [hang.py](hang.py), in which rank 0 waits.\n", "info"),
        (MARKED, "`torchrun hang.py` reproduces a deadlock.\n", "info"),
        (MARKED, "Start it with `torchrun hang.py`.\n", "error"),
        (JOINS + HANG, "Let us write a buggy script [hang.py](hang.py), in which rank 0 waits.\n", "error"),
    ],
)
def test_a_page_may_show_a_bug(tmp_path, program, page, severity):
    files = {"hang.py": HEAD + program, "README.md": f"# Debugging\n\n{page}\n    torchrun hang.py\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]


SPAWNED = HEAD + "import torch.multiprocessing as mp\nfrom accelerate import notebook_launcher\n\n"
SPAWNED += "def work(rank):\n    dist.init_process_group()\n" + indented(HANG) + "\n"


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        ("mp.spawn(work)", "info"),  # nprocs=1 is the default
        ("mp.start_processes(work, nprocs=1)", "info"),
        ("notebook_launcher(work, num_processes=1)", "info"),
        ("notebook_launcher(work)", "error"),
        ("mp.spawn(work, nprocs=2)", "error"),
        ("mp.spawn(work, **given)", "error"),
    ],
)
def test_a_program_may_start_one_process_itself(tmp_path, start, severity):
    assert found(tmp_path, {"train.py": SPAWNED + start + "\n", "other.py": ""}) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("os.system('torchrun --nproc_per_node=1 train.py')", "info"),
        ("os.system('torchrun --nproc_per_node=8 train.py')", "error"),
        ("os.system(f'torchrun --nproc_per_node={count} train.py')", "error"),
        ("# os.system('torchrun --nproc_per_node=1 train.py')", "error"),
    ],
)
def test_a_program_may_start_another_one_by_a_text(tmp_path, line, severity):
    files = {"train.py": HEAD + JOINS + HANG, "go.py": f"import os\n{line}\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("values", "severity"), [(["False"], "info"), (["True"], "error"), (["False", "True"], "error"), ([], "error")]
)
def test_an_attribute_that_the_function_sets_decides_its_branches(tmp_path, values, severity):
    sets = "".join(f"    args.waits = {value}\n" for value in values)
    train = (
        HEAD + "def run(args):\n    " + JOINS + sets + "    if args.waits:\n" + indented(HANG, by=8) + "\nrun(read())\n"
    )
    assert found(tmp_path, {"train.py": train}) == [("CODE005", severity)]


SPAWNS_IF_ASKED = """\
import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--multiprocessing-distributed", action="store_true", help="one process for each GPU")


def work(rank):
    dist.init_process_group("nccl", rank=rank, world_size=8)
    if rank == 0:
        dist.barrier()


args = parser.parse_args()
if args.multiprocessing_distributed:
    torch.multiprocessing.spawn(work, nprocs=8)
else:
    work(0)
"""


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"README.md": "    python train.py --lr 3\n"}, "info"),
        ({"run.sh": "python train.py --batch-size 256\n"}, "info"),
        ({"README.md": "    python train.py --multiprocessing-distributed\n"}, "error"),
        ({"run.sh": "python train.py\n", "README.md": "Add `--multiprocessing-distributed` for more GPUs.\n"}, "error"),
        ({"run.sh": "python train.py --world-size 8 --rank $RANK\n"}, "error"),
        ({"run.sh": "torchrun --nproc_per_node=8 train.py\n"}, "error"),
        ({}, "error"),
    ],
)
def test_a_switch_that_no_command_gives_starts_no_processes(tmp_path, files, severity):
    assert found(tmp_path, {"train.py": SPAWNS_IF_ASKED, **files}) == [("CODE005", severity)]


BRIEF = """\
import torch
import torchvision

model = torch.nn.DataParallel(build(), device_ids=[0, 1, 2])
data = {data}

def run():
    for step, x in enumerate(loader):
        model(x).sum().backward()
        {leave}

{call}
"""
LEAVES, ONCE = "if step == 100:\n            break", "for epoch in range(1):\n    pass\nrun()"


@pytest.mark.parametrize(
    ("data", "leave", "call", "severity"),
    [
        ("Images()", LEAVES, ONCE, "info"),
        ("Images()", LEAVES.replace("100", "100000"), ONCE, "warning"),
        ("Images()", LEAVES, "for epoch in range(90):\n    run()", "warning"),
        ("Images()", "if step == 100:\n            print(step)", ONCE, "warning"),
        ("torchvision.datasets.MNIST('d')", "", ONCE, "info"),
        ("torchvision.datasets.ImageNet('d')", "", ONCE, "warning"),
    ],
)
def test_threads_of_a_brief_demonstration_are_an_info(tmp_path, data, leave, call, severity):
    text = BRIEF.format(data=data, leave=leave, call=call)
    assert found(tmp_path, {"train.py": text}) == [("CODE009", severity)]


LISTED = """\
import torch

def fit(cfg, model, loader):
    if len(cfg.train.data_para_dids):
        model = torch.nn.DataParallel(model, device_ids=cfg.train.data_para_dids)
    for x in loader:
        model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"defaults.py": "cfg.train.data_para_dids = []  # devices\n"}, "info"),
        ({"defaults.py": "cfg.train.data_para_dids = [0, 1]\n"}, "warning"),
        ({"defaults.py": "cfg.train.data_para_dids = []\n", "a.yaml": "data_para_dids: [0, 1]\n"}, "warning"),
        ({"defaults.py": "cfg.train.data_para_dids = []\ncfg.train.data_para_dids = read()\n"}, "warning"),
    ],
)
def test_threads_on_devices_that_no_configuration_lists_are_an_info(tmp_path, files, severity):
    program = "from fit import fit\n\nif __name__ == '__main__':\n    fit(read(), build(), load())\n"
    assert found(tmp_path, {"fit.py": LISTED, "main.py": program, **files}) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        ("Single GPU training, use run.sh.", "info"),
        ("For several GPUs, use run.sh.", "warning"),
        ("Single GPU training: use small.sh. All GPUs: use run.sh.", "warning"),
    ],
)
def test_a_page_says_that_a_launch_file_is_for_one_gpu(tmp_path, page, severity):
    text = "import torch\nmodel = torch.nn.DataParallel(Net())\nfor x in loader:\n    model(x).sum().backward()\n"
    files = {"train.py": text, "run.sh": "#!/bin/bash\npython train.py --lr 3\n", "README.md": f"{page}\n"}
    assert found(tmp_path, files) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("CUDA_VISIBLE_DEVICES=0 sh scripts/run.sh", "info"),
        ("CUDA_VISIBLE_DEVICES=0,1 sh scripts/run.sh", "warning"),
        ("sh scripts/run.sh", "warning"),
        ("CUDA_VISIBLE_DEVICES=0 sh scripts/run.sh\nbash scripts/run.sh", "warning"),
    ],
)
@pytest.mark.parametrize("is_module", [False, True])
def test_a_launch_file_that_is_started_with_one_gpu(tmp_path, command, severity, is_module):
    text = "import torch\n\ndef fit():\n    model = torch.nn.DataParallel(Net())\n    model(x).sum().backward()\n"
    main = "from fit import fit\n\nif __name__ == '__main__':\n    fit()\n"
    files = {"fit.py": text, "main.py": main} if is_module else {"main.py": f"{text}\nfit()\n"}
    files |= {"scripts/run.sh": "python3 main.py --lr 3\n", "README.md": f"```bash\n{command}\n```\n"}
    assert found(tmp_path, files) == [("CODE009", severity)]


IN_PACKAGE = {
    "train/__init__.py": "from train.base import Fit\nfrom train.more import More\n",
    "train/base.py": "import torch\n\nclass Fit:\n    def run(self):\n        model = torch.nn.DataParallel(Net())\n"
    "        model(x).sum().backward()\n",
    "train/more.py": "from train.base import Fit\n\nclass More(Fit):\n    size = 2\n",
}
STARTS_ONE = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '{}'\nfrom train import *\n\nMore().run()\n"


@pytest.mark.parametrize(
    ("programs", "severity"),
    [
        ({"a.py": STARTS_ONE.format(3)}, "info"),
        ({"a.py": STARTS_ONE.format(3), "b.py": STARTS_ONE.format(4)}, "info"),
        ({"a.py": STARTS_ONE.format(3), "b.py": "from train import Fit\n\nFit().run()\n"}, "warning"),
        ({"a.py": STARTS_ONE.format("3,4")}, "warning"),
        ({"a.py": STARTS_ONE.format(3).replace("os.", "if debug:\n    os.", 1)}, "warning"),
    ],
)
def test_a_package_whose_programs_leave_themselves_one_gpu(tmp_path, programs, severity):
    assert found(tmp_path, IN_PACKAGE | programs) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("jobs", "page", "severity"),
    [
        (["--gres=gpu:1"], "", "info"),
        (["-N 1 -n 16 --gres=gpu:1"], "sh run.sh", "info"),
        (["-N 1 -n 16 --gres=gpu:2"], "", "warning"),
        (["--gres=gpu:1", "--gres=gpu:4"], "", "warning"),
        (["--gres=gpu:1"], "CUDA_VISIBLE_DEVICES=0,1 sh run.sh", "warning"),
    ],
)
def test_a_job_of_one_gpu_that_starts_a_launch_file(tmp_path, jobs, page, severity):
    text = "import torch\n\nmodel = torch.nn.DataParallel(Net())\nmodel(x).sum().backward()\n"
    files = {"main.py": text, "run.sh": "python main.py --lr 3\n", "README.md": f"```\n{page}\n```\n"}
    files |= {f"{n}.slurm": f"#!/bin/bash\n#SBATCH {job}\n\nsh run.sh\n" for n, job in enumerate(jobs)}
    assert found(tmp_path, files) == [("CODE009", severity)]


_OF_SHARES = """\
import lightning as L
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

class Data(L.LightningDataModule):
    def test_dataloader(self):
        if dist.is_initialized():
            sampler = DistributedSampler(self.test_set)
            return DataLoader(self.test_set, self.batch_size, sampler=sampler, drop_last=True)
        return DataLoader(self.test_set, self.batch_size)
"""
_BY_HYDRA = """\
import hydra

@hydra.main(config_path="configs", config_name="train.yaml")
def main(cfg):
    hydra.utils.instantiate(cfg.trainer).fit(model, hydra.utils.instantiate(cfg.data))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["info"]),
        ({"configs/trainer/gpu.yaml": "defaults:\n  - default\n\ndevices: 4\n"}, ["warning"]),
        ({"configs/exp/large.yaml": "defaults:\n  - override /trainer: ddp\n"}, ["warning"]),
        ({"configs/exp/large.yaml": "trainer:\n  devices: 8\n"}, ["warning"]),
        ({"configs/exp/large.yaml": "trainer:\n  max_epochs: 8\n"}, ["info"]),
        ({"README.md": "    python train.py trainer=ddp\n"}, ["warning"]),
        ({"README.md": "    python train.py trainer.devices=4\n"}, ["warning"]),
        ({"README.md": "    python train.py trainer=gpu\n"}, ["info"]),
        ({"run.sh": "srun python train.py trainer=gpu\n"}, ["warning"]),
    ],
)
def test_a_selected_trainer_with_one_device(tmp_path, more, expected):
    (tmp_path / ".git").mkdir()
    files = {
        "data.py": _OF_SHARES,
        "train.py": _BY_HYDRA,
        "configs/train.yaml": "defaults:\n  - _self_\n  - trainer: gpu.yaml\n  - data: mine\n",
        "configs/data/mine.yaml": "_target_: data.Data\nbatch_size: 64\n",
        "configs/trainer/default.yaml": "_target_: lightning.Trainer\naccelerator: cpu\ndevices: 1\n",
        "configs/trainer/gpu.yaml": "defaults:\n  - default\n\naccelerator: gpu\n",
        "configs/trainer/ddp.yaml": "defaults:\n  - default\n\nstrategy: ddp\ndevices: 4\n",
    }
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE015"))
    hits = severities_in(tmp_path, {**files, **more}, book, preview=True)
    assert [severity for _, severity in hits] == expected


_SPAWNS_PER_HOST = """\
import argparse
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from other import build, fit
from torch.nn.parallel import DistributedDataParallel as DDP

def train(gpu, args):
    dist.init_process_group("nccl", world_size=args.nodes * args.gpus, rank=args.host * args.gpus + gpu)
    model = DDP(build())
    fit(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.save(model.state_dict(), "last.pt")

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--host", type=int, default=0)
parser.add_argument("--gpus", type=int, default=1)
args = parser.parse_args()
mp.spawn(train, nprocs=args.gpus, args=(args,))
"""


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        ("    python spawns.py --host 2\n", "info"),
        ("    python spawns.py --host 2 --gpus 8\n", "warning"),
    ],
)
def test_one_rank_on_each_host_has_a_folder_of_its_own(tmp_path, page, severity):
    files = {
        "spawns.py": _SPAWNS_PER_HOST,
        "README.md": page,
        "other.py": "def build(): pass\n\ndef fit(*args): pass\n",
    }
    assert found(tmp_path, files) == [("CODE029", severity)]


_REAL_OR_MADE_UP = """\
import argparse
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class RandomData(Dataset):
    def __getitem__(self, index):
        return torch.rand(3, 32, 32), 0

    def __len__(self):
        return 50000

parser = argparse.ArgumentParser()
parser.add_argument("--use_cifar", action="store_true")
args = parser.parse_args()
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(9, 9))
if args.use_cifar:
    data = torchvision.datasets.CIFAR10("data", download=True)
else:
    data = RandomData()
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(9):
    for x, y in loader:
        model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("    torchrun --nproc_per_node=4 real.py\n", [("CODE029", "info")]),
        ("    torchrun --nproc_per_node=4 real.py --use_cifar\n", [("CODE011", "warning"), ("CODE029", "warning")]),
    ],
)
def test_real_data_that_nothing_asks_for(tmp_path, page, expected):
    files = {"real.py": _REAL_OR_MADE_UP, "README.md": page, "other.py": "import torch\n"}
    assert found(tmp_path, files) == expected


_OF_NUMBERS = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class {name}(Dataset):
    def __init__(self, depth=9, {given}=4):
        super().__init__()
        self.depth, self.kept = depth, {given}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {item}

dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(9, 9))
sampler = DistributedSampler({name}())
loader = DataLoader({name}(), 8, sampler=sampler)
for epoch in range(9):
    for x in loader:
        model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("name", "given", "item", "expected"),
    [
        ("MockData", "data_size", "torch.full((1, self.depth), index)", []),
        ("Numbers", "data_size", "torch.full((1, self.depth), index)", [("CODE011", "warning")]),
        ("MockData", "rows", "torch.full((1, self.depth), index)", [("CODE011", "warning")]),
        ("MockData", "data_size", "torch.full((1, 9), read(index))", [("CODE011", "warning")]),
        ("Numbers", "data_size", "torch.rand(1, self.depth)", []),
        ("Numbers", "data_size", "load_image(index) + torch.rand(1, self.depth)", [("CODE011", "warning")]),
    ],
)
def test_the_order_of_data_that_is_made_up(tmp_path, name, given, item, expected):
    assert found(tmp_path, {"train.py": _OF_NUMBERS.format(name=name, given=given, item=item)}) == expected


@pytest.mark.parametrize(("above", "expected"), [("# Dummy dataset.", []), ("# Rows.", [("CODE011", "warning")])])
def test_a_comment_says_that_data_is_made_up(tmp_path, above, expected):
    text = _OF_NUMBERS.format(name="Rows", given="hidden", item="torch.full((1, self.depth), index)")
    assert found(tmp_path, {"train.py": text.replace("class Rows", f"{above}\nclass Rows")}) == expected


_ON_NOISE = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(local_rank)
net = torch.nn.Linear(9, 9).cuda()
model = DDP(net)
checkpoint = torch.load("checkpoint.pt")
net.load_state_dict(checkpoint["model"])
for step in range(99):
    x = {made}
    model({given}).sum().backward()
"""


@pytest.mark.parametrize(
    ("made", "given", "severity"),
    [
        ("torch.rand(8, 9).to('cuda')", "x", "info"),
        ("torch.ones(8, 9)", "x.cuda()", "info"),
        ("next(batches)", "x", "warning"),
        ("torch.rand(8, 9)", "x, next(batches)", "warning"),
        ("fit(model, torch.rand(8, 9))", "torch.rand(8, 9)", "warning"),
    ],
)
def test_weights_that_learn_from_random_numbers(tmp_path, made, given, severity):
    assert found(tmp_path, {"train.py": _ON_NOISE.format(made=made, given=given)}) == [("CODE001", severity)]


_JOINS_ALONE = """\
import os
import torch
import torch.distributed as dist

def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

def main(model):
    rank = 0
    world_size = {size}
    setup(rank, world_size)
    torch.save(model.state_dict(), "model.pt")

if __name__ == "__main__":
    main(build())
"""


@pytest.mark.parametrize(
    ("size", "other", "expected"),
    [
        ("1", "import torch\n", []),
        ("2", "import torch\n", [("CODE029", "warning")]),
        ("1", "from train import setup\n\nsetup(int(sys.argv[1]), 8)\n", [("CODE029", "warning")]),
    ],
)
def test_a_program_that_joins_a_group_alone(tmp_path, size, other, expected):
    files = {"train.py": _JOINS_ALONE.format(size=size), "other.py": other}
    assert [one for one in found(tmp_path, files) if one[0] == "CODE029"] == expected


_UNPACKS = """\
import tarfile
import torch.distributed as dist

def prepare(folder, url="https://example.org/{archive}"):
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        with tarfile.open(folder + "/{archive}") as tar:
            tar.extractall(folder)
    dist.barrier()

prepare("data")
"""


@pytest.mark.parametrize(
    ("archive", "severity"),
    [("aclImdb_v1.tar.gz", "info"), ("cifar-10-python.tar.gz", "info"), ("corpus_v1.tar.gz", "warning")],
)
def test_a_small_archive_is_unpacked_within_the_timeout(tmp_path, archive, severity):
    assert found(tmp_path, {"train.py": _UNPACKS.format(archive=archive)}) == [("CODE030", severity)]
    quiet = severities_in(tmp_path, {}, BOOK)
    assert quiet == ([] if severity == "info" else [("CODE030", severity)])


_HELD = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from nets.model import Net

class Solver:
    def __init__(self, rank):
        dist.init_process_group("nccl")
        self.net = None
        self.rank = rank

    def build(self):
        self.net = Net(4).to(self.rank)
        self.net = DDP(self.net, device_ids=[self.rank])

    def test(self, x):
        self.build()
        self.net.eval()
        if self.rank == 0:
            print(self.net(x))

Solver(int(os.environ["LOCAL_RANK"])).test(x)
"""
_NETS = """\
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.{layer}(width)

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(8)

class Net({base}):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(Block(8))
        self.blocks = nn.Sequential(*self.blocks)
"""


@pytest.mark.parametrize(
    ("layer", "base", "expected"),
    [
        ("LayerNorm", "nn.Module", []),
        ("BatchNorm1d", "nn.Module", [("CODE005", "warning")]),
        ("LayerNorm", "Base", [("CODE005", "warning")]),
    ],
)
def test_the_forward_pass_of_an_imported_model_without_buffers(tmp_path, layer, base, expected):
    files = {"solver.py": _HELD, "nets/__init__.py": "", "nets/model.py": _NETS.format(layer=layer, base=base)}
    assert found(tmp_path, files) == expected


MAKES_GROUP = "    if ddp:\n" + indented(JOINS, 8)
SWITCHES = {
    "off": ("ddp = False\n\ndef main():\n" + MAKES_GROUP + indented(HANG, 8), "info"),
    "off, the group alone": ("ddp = False\n\ndef main():\n" + MAKES_GROUP + indented(HANG), "info"),
    "off, of a function": ("def main():\n    ddp = 0\n" + MAKES_GROUP + indented(HANG), "info"),
    "off, an entry": (
        "use = {'ddp': False}\n\ndef main():\n    if use['ddp']:\n" + indented(JOINS, 8) + indented(HANG, 8),
        "info",
    ),
    "off, beside a function that a comment names": (
        "ddp = False\n\ndef join():\n"
        + indented(JOINS)
        + "\ndef main():\n    # join()\n"
        + MAKES_GROUP
        + indented(HANG),
        "info",
    ),
    "off, beside a function that is called": (
        "ddp = False\n\ndef join():\n" + indented(JOINS) + "\ndef main():\n    join()\n" + MAKES_GROUP + indented(HANG),
        "error",
    ),
    "on": ("ddp = True\n\ndef main():\n" + MAKES_GROUP + indented(HANG), "error"),
    "on, an entry": (
        "use = {'ddp': True}\n\ndef main():\n    if use['ddp']:\n" + indented(JOINS, 8) + indented(HANG, 8),
        "error",
    ),
    "set later": (
        "ddp = False\n\ndef main():\n    global ddp\n    ddp = True\n" + MAKES_GROUP + indented(HANG),
        "error",
    ),
    "an entry that is set later": (
        "use = {'ddp': False}\nuse['ddp'] = True\n\ndef main():\n    if use['ddp']:\n"
        + indented(JOINS, 8)
        + indented(HANG, 8),
        "error",
    ),
    "off, with another group": (
        "ddp = False\n\ndef main():\n" + MAKES_GROUP + "    else:\n" + indented(JOINS, 8) + indented(HANG),
        "error",
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_that_the_text_sets_once(tmp_path, name):
    text, severity = SWITCHES[name]
    files = {"train.py": HEAD + text + "\nif __name__ == '__main__':\n    main()\n", "other.py": ""}
    assert found(tmp_path, files) == [("CODE005", severity)]
