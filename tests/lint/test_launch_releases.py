"""What the torch that runs decides about variables of launch files, and what hosts and processes do."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("NCCL004", "NCCL002", "ENV007")))
RENAMED = "export NCCL_ASYNC_ERROR_HANDLING=1\n"
START = "torchrun --nproc_per_node=8 train.py\n"
OLD_START = "python -m torch.distributed.launch --nproc_per_node=8 train.py\n"


def found(folder, files):
    return severities_in(folder, files, BOOK)


@pytest.mark.parametrize(
    "files",
    [
        {"job.sbatch": f"{RENAMED}srun --container-image nvcr.io/nvidia/pytorch:23.05-py3 {START}"},
        {"job.sbatch": f"IMAGE=docker://nvcr.io#nvidia/pytorch:22.12-py3\n{RENAMED}{START}"},
        {"job.sbatch": f"IMAGE=/images/nvidia+pytorch+24.01-py3.sqsh\n{RENAMED}{START}"},
        {"job.sh": f"docker run mosaicml/pytorch:1.13.1_cu117-python3.10 true\n{RENAMED}{START}"},
        {"job.sh": f"module load PyTorch/1.12.0-foss-2022a-CUDA-11.7.0\n{RENAMED}{START}"},
        {"job.sh": f"conda activate torch1.13\n{RENAMED}{START}"},
        {"job.sh": f"pip install torch==2.0.1\n{RENAMED}{START}"},
        {"a/job.sh": RENAMED + START, "a/2.train.Dockerfile": "FROM nvcr.io/nvidia/pytorch:23.05-py3\n"},
        {"a/job.sh": RENAMED + START, "Containerfile": "FROM acr.io/curated/acpt-pytorch-1.13-cuda11.7:latest\n"},
        {"job.sh": RENAMED + START, "nemo.Dockerfile": "ARG TAG=23.03\nFROM nvcr.io/nvidia/nemo:${TAG}\n"},
        {"job.sh": RENAMED + START, "Dockerfile": "ARG V=1.13.1\nFROM pytorch/pytorch:$V-cuda11.6\n"},
        {"job.sh": RENAMED + START, "train.def": "Bootstrap: docker\nFrom: pytorch/pytorch:1.11.0-cuda11.3\n"},
        {"job.sh": RENAMED + START, "1-create_environment.sh": "conda install pytorch==1.13.1 -c pytorch\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "torchvision==0.14.1\ntorch\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "torchaudio==0.12.1\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "vllm==0.4.0.post1\n"},
        {"job.sh": RENAMED + START, "environment.yml": "dependencies:\n  - python=3.7\n  - pytorch\n"},
        {"job.sh": RENAMED + START, "README.md": "conda create -n own python=3.7\npip install torch\n"},
        {"job.sh": RENAMED + START, "README.md": "- [PyTorch](https://pytorch.org) 1.13.1+cu117\n"},
        {"job.sh": RENAMED + START, "README.md": "* PyTorch (= 1.10.0)\n"},
        {"job.sh": RENAMED + START, "README.md": "The code is tested with Python 3.8 and PyTorch 1.12.1.\n"},
        {"job.sh": RENAMED + START, "README.md": "![](https://img.shields.io/badge/PyTorch-1.13-red)\n"},
        {
            "job.sh": RENAMED + START,
            "README.md": "Use gcr.io/deeplearning-platform-release/pytorch-gpu.1-13\n",
        },
        {
            "job.sh": RENAMED + START,
            "docker-compose.yml": "services: {a: {image: 'pytorch/pytorch:1.12.1-cuda11.3'}}\n",
        },
        {"job.sh": RENAMED + START, "cog.yaml": "build:\n  python_packages:\n    - torch==2.0.1\n"},
        {"job.sh": RENAMED + OLD_START},
        {"job.sh": f"{RENAMED}srun -l $IMAGE /opt/nccl-tests/build/all_reduce_perf -b 8 -e 2G\n"},
    ],
)
def test_an_old_name_stands_where_no_newer_torch_is_known_to_run(tmp_path, files):
    assert found(tmp_path, files) == []


@pytest.mark.parametrize(
    "files",
    [
        {"job.sbatch": f"{RENAMED}srun --container-image nvcr.io/nvidia/pytorch:24.02-py3 {START}"},
        {"job.sbatch": f"# was nvcr.io/nvidia/pytorch:22.12-py3\n{RENAMED}{START}"},
        {"job.sh": RENAMED + START},
        {"job.sh": RENAMED + OLD_START, "requirements.txt": "torch\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "torchvision==0.17.0\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "torchvision>=0.8\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "vllm==0.4.1\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "vllm>=0.4.0\n"},
        {"job.sh": RENAMED + START, "requirements.txt": "vllm==0.16.0\n"},
        {"job.sh": RENAMED + START, "environment.yml": "dependencies:\n  - python=3.10\n  - pytorch\n"},
        {"job.sh": RENAMED + START, "README.md": "- PyTorch 1.13+\n- PyTorch >= 1.12\n"},
        {"job.sh": RENAMED + START, "README.md": "The code is tested with PyTorch 1.12 and above.\n"},
        {"job.sh": RENAMED + START, "README.md": "![](https://img.shields.io/badge/PyTorch-1.13%2B-red)\n"},
        {"job.sh": RENAMED + START, "Dockerfile": "FROM pytorch/pytorch:2.4.0-cuda12.1\n"},
        {"job.sh": f"{RENAMED}srun /opt/nccl-tests/build/all_reduce_perf -b 8\nsrun python train.py\n"},
    ],
)
def test_an_old_name_is_reported_otherwise(tmp_path, files):
    assert found(tmp_path, files) == [("NCCL004", "info")]


def test_the_nccl_of_an_old_torch_reads_what_a_later_one_does_not(tmp_path):
    job = f"export NCCL_LL_THRESHOLD=0\n{START}"
    page = "conda install pytorch=1.4 torchvision=0.5 cudatoolkit=10.0 -c pytorch\n"
    assert found(tmp_path, {"job.sh": job, "README.md": page}) == []
    assert found(tmp_path, {"job.sh": job, "README.md": page.replace("=1.4", "=1.7")}) == [("NCCL004", "info")]


def test_a_lost_setting_of_nccl_is_an_info(tmp_path):
    job = f"export NCCL_IB_GDR_LEVEL=3 NCCL_SHARED_BUFF_COUNT=16\nexport NCCL_MAX_NRINGS=4\n{START}"
    assert found(tmp_path, {"job.sh": job}) == [("NCCL004", "info")] * 2


@pytest.mark.parametrize(
    ("setting", "severity"),
    [
        ("NCCL_IB_TIMEOUT=3600", "warning"),
        ("NCCL_IB_DISABLE=true", "warning"),
        ("NCCL_SOCKET_FAMILY=IPv4", "warning"),
        ("NCCL_ALGO=Rings", "error"),
        ("NCCL_COMM_ID=10.0.0.1", "error"),
        ("TORCH_NCCL_BLOCKING_WAIT=on", "error"),
        ("TORCH_DISTRIBUTED_DEBUG=1", "error"),
    ],
)
def test_a_value_is_an_error_if_the_job_does_not_start(tmp_path, setting, severity):
    assert found(tmp_path, {"job.sh": f"export {setting}\n{START}"}) == [("NCCL002", severity)]


TUNED = "export NCCL_MIN_NCHANNELS=32 NCCL_ALGO=Tree\n"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (f"module load gcc/12 rocm/6.3.1\n{TUNED}{START}", []),
        (f"ml rocm/5.7.1\n{TUNED}{START}", []),
        (f"IMAGE=docker://rocm/pytorch:rocm6.2_ubuntu22.04_py3.10\n{TUNED}{START}", []),
        (f"pip install torch --index-url https://download.pytorch.org/whl/rocm6.1\n{TUNED}{START}", []),
        (f"export ROCM_PATH=/opt/rocm-6.0.0\n{TUNED}{START}", []),
        (f"SIF=/images/lumi-pytorch-rocm-6.2.4-python-3.12-pytorch-v2.6.0.sif\n{TUNED}{START}", []),
        (f"OUTPUT=/runs/pytorch-rocm-6.2.4/log.txt\n{TUNED}{START}", ["NCCL002", "NCCL004"]),
        (f"module load rocm\n{TUNED}{START}", ["NCCL002"]),
        (f"module load rocm/7.0.1\n{TUNED}{START}", ["NCCL002"]),
        (f"# module load rocm/6.3.1\n{TUNED}{START}", ["NCCL002", "NCCL004"]),
        (f"export HIP_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES=0,1\n{TUNED}{START}", ["NCCL002", "NCCL004"]),
        (f"cd /home/me/rocmdock\n{TUNED}{START}", ["NCCL002", "NCCL004"]),
    ],
)
def test_a_job_on_rocm_uses_rccl(tmp_path, job, expected):
    assert sorted(rule for rule, _ in found(tmp_path, {"job.sh": job})) == expected


PORT = 'import os\n\nos.environ["MASTER_PORT"] = "80000"\ndist.init_process_group("nccl")\n'


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"requirements.txt": "torch==1.4.0\n"}, "info"),
        ({"README.md": "## Environment\n\n* Python3.6.9\n* pytorch1.2.0\n* numpy1.16.4\n"}, "info"),
        ({"README.md": "| package | release |\n|---|---|\n| PyTorch | 1.7.1 |\n"}, "info"),
        ({"README.md": "We fixed a bug of PyTorch 1.2.0\n"}, "error"),
        ({"requirements.txt": "torch==1.10.0\n", "README.md": "* pytorch1.2.0\n"}, "error"),
        ({"requirements.txt": "torch\n"}, "error"),
    ],
)
def test_an_old_torch_cuts_a_port(tmp_path, files, severity):
    assert found(tmp_path, {"train.py": PORT, **files}) == [("ENV007", severity)]


OF_LAUNCHER = "python -m torch.distributed.launch --nproc_per_node=8 --master_port=66667 train.py\n"


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"requirements.txt": "torch==1.8.0+cu111\n"}, "info"),
        ({"README.md": "## Software\n\nPytorch: 1.7.1\n"}, "info"),
        ({"README.md": "- **PyTorch** 1.7.1\n"}, "info"),
        ({"requirements.txt": "torch==1.10.2\n"}, "error"),
        ({"part/requirements.txt": "torch==1.7.0\n", "README.md": "pip install mmdet==2.13.0\n"}, "info"),
        ({"part/requirements.txt": "torch==1.7.0\n", "other/requirements.txt": "torch==2.1.0\n"}, "error"),
        ({}, "error"),
    ],
)
def test_an_old_torch_cuts_the_port_of_a_launcher(tmp_path, files, severity):
    assert found(tmp_path, {"run.sh": OF_LAUNCHER, **files}) == [("ENV007", severity)]


SUBMITS = "export NCCL_DEBUG=DEBUG\nray job submit --address=$HEAD \\\n  -- python -m team.train lr=1 2>&1 | tee log\n"
STARTS = "import ray\n\nray.init(runtime_env={'env_vars': {'HF_HOME': '/data', 'NCCL_DEBUG': 'WARN'}})\n"
IN_COMMAND = SUBMITS.replace("--address", '--runtime-env-json=\'{"env_vars": {"NCCL_DEBUG": "WARN"}}\' --address')


@pytest.mark.parametrize(
    ("job", "program", "expected"),
    [
        (SUBMITS, STARTS, []),
        (IN_COMMAND, "import ray\n", []),
        (SUBMITS, STARTS.replace("NCCL_DEBUG", "NCCL_IB_HCA"), [("NCCL002", "warning")]),
        (SUBMITS.replace("ray job submit --address=$HEAD \\\n  --", ""), STARTS, [("NCCL002", "warning")]),
        (f"{SUBMITS}ray job submit -- python -m team.other\n", STARTS, [("NCCL002", "warning")]),
    ],
)
def test_a_job_of_ray_may_set_a_variable_itself(tmp_path, job, program, expected):
    assert found(tmp_path, {"job.sh": job, "team/train.py": program}) == expected


JOINS = """\
import os

import torch.distributed as dist


def enable(*, timeout=False):
    if timeout:
        os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"
    dist.init_process_group("nccl")
"""
JOINED = [("NCCL004", "info")]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.py": "from job import enable\n\nenable()\n"}, []),
        ({"train.py": "import job\n\njob.enable()\n", "conf.yaml": "amp: {enable: true}\n"}, []),
        ({"train.py": "import job\n\njob.enable(timeout=True)\n"}, JOINED),
        ({"train.py": "import job\n\njob.enable()\n", "conf.yaml": "{_target_: job.enable, timeout: true}\n"}, JOINED),
        ({"train.py": "import job\n\njob.enable(**options)\n"}, JOINED),
    ],
)
def test_a_variable_below_an_argument_that_no_call_gives(tmp_path, files, expected):
    assert found(tmp_path, {"job.py": JOINS, "requirements.txt": "torch==2.6.0\n", **files}) == expected


@pytest.mark.parametrize(
    ("required", "torch"),
    [
        ("vllm==0.1.4", None),
        ("vllm==0.4.1", "2.2"),
        ("vllm==0.6.3.post1", "2.4"),
        ("vllm<=0.8", "2.6"),
        ("vllm==0.11.0", "2.8"),
        ("vllm==0.14.0", None),
        ("vllm==0.4.1\ntorch==2.0.1", "2.0.1"),
    ],
)
def test_the_torch_that_vllm_pins(tmp_path, required, torch):
    (tmp_path / "requirements.txt").write_text(f"{required}\n")
    releases = Releases({}).of_project(tmp_path / "train.py", tmp_path)
    assert (releases["torch"] if releases.is_bounded("torch") else None) == torch
