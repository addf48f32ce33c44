"""What a process runs, by its command line."""

import pytest

from doctor.attach.processes import Process
from doctor.attach.programs import Command, agent_of, is_doctor, is_helper, plain, python_command


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python train.py -m x", Command("script", "train.py")),
        ("python -u -X dev -Wignore -W error train.py", Command("script", "train.py")),
        ("python -uBm pkg.train --lr 1", Command("module", "pkg.train")),
        ("python -mpkg.train", Command("module", "pkg.train")),
        ("python -Ic pass", Command("code", "pass")),
        ("python --check-hash-based-pycs always train.py", Command("script", "train.py")),
        ("/opt/env/bin/python3.12", Command()),
        ("python -", Command()),
        ("python -c", Command("code", "")),
        ("python -m", Command("module", "")),
        ("ray::RayTrainWorker.go", Command("title", "ray::RayTrainWorker.go")),
        ("VLLM::Worker_TP0", Command("title", "VLLM::Worker_TP0")),
    ],
)
def test_what_an_interpreter_runs(line, command):
    assert python_command(tuple(line.split())) == command


def test_an_unknown_command_line_runs_nothing():
    assert python_command(None) == python_command(()) == Command()


def _python(line):
    return Process(9, 1, 5.0, 0, "python", "S", arguments=tuple(line.split()), executable="/usr/bin/python3.11")


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("python /env/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torchrun"),
        ("python /env/lib/torch/distributed/launch.py train.py", "torchrun"),
        ("python /env/bin/accelerate launch train.py", "accelerate"),
        ("python -m deepspeed.launcher.launch --world_info=x train.py", "deepspeed"),
        ("python /env/bin/deepspeed train.py", "deepspeed"),
        ("python deepspeed.py", ""),
        ("python deepspeed_train.py", ""),
        ("python torchrun_like.py", ""),
    ],
)
def test_launchers_in_python(line, launcher):
    assert agent_of(_python(line), is_python=True) == launcher


@pytest.mark.parametrize("name", ["slurmstepd", "orted", "prted", "mpirun", "hydra_pmi_proxy", "raylet"])
def test_launchers_that_are_programs(name):
    assert agent_of(Process(9, 1, 5.0, 0, name, "S"), is_python=False)


@pytest.mark.parametrize(
    ("line", "helper", "doctor"),
    [
        ("python /env/torch/_inductor/compile_worker/__main__.py --kind=fork", True, False),
        ("python -m tensorboard.main --logdir x", True, False),
        ("python /env/ray/dashboard/agent.py", True, False),
        ("python -m ipykernel_launcher -f x.json", False, False),
        ("python wandb.py", False, False),
        ("python /env/bin/doctor attach", True, True),
        ("python -m doctor attach", True, True),
        ("python doctor.py", False, False),
    ],
)
def test_helpers(line, helper, doctor):
    assert (is_helper(_python(line)), is_doctor(_python(line))) == (helper, doctor)


def test_text_for_facts_is_bounded_printable_and_masked():
    assert plain("a\x1b[2J\nb\u202e") == "a\ufffd[2J\ufffdb\ufffd"
    assert len(plain("x" * 10_000)) == 200
    assert "hf_" not in plain("hf_" + "aB3dE5gH7jK9" * 3)
