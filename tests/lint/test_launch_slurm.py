"""What sbatch is asked for, and what srun gives."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.launch.process_launches import starts_of
from doctor.lint.launch.shell.reader import read_shell
from doctor.lint.launch.slurm_batch import gpus_of, gres_of, read_headers, read_late_headers
from tests.lab.cases import each_case
from tests.lint.linted import severities_in


def headers(*options):
    return read_headers("#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options))


def step(srun, *options):
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + f"{srun} python train.py\n"
    (start,) = starts_of(read_shell("job.sbatch", text))
    return start.step


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:4", 4),
        ("gpu:a100:4", 4),
        ("gpu:a100_80gb:2(S:0-1)", 2),
        ("gpu", 1),
        ("gpu:a100:1,gpu:v100:2", 3),
        ("gres/gpu=8", 8),
        ("shard:2", None),
        ("nvme:1,gpu:2", 2),
        ("none", None),
        ("4", None),
    ],
)
def test_gpus_among_other_things(text, count):
    assert gres_of(text) == count


@pytest.mark.parametrize(("text", "count"), [("4", 4), ("a100:4", 4), ("a100:1,v100:2", 3), ("all", None), ("", None)])
def test_gpus_by_number(text, count):
    assert gpus_of(text) == count


@each_case(
    ("options", "numbers"),
    [
        ((), (1, 1, 1, None)),
        (("--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8"), (2, 16, 8, 8)),
        (("-N 2 -n 16", "-G 16"), (2, 16, 8, 8)),
        (("--ntasks=8",), (None, 8, None, None)),
        (("--nodes=1", "--ntasks=3"), (1, 3, 3, None)),
        (("--nodes=2", "--ntasks=3"), (2, 3, None, None)),
        (("--nodes=2-4",), (None, None, 1, None)),
        (("--nodes=2-2",), (2, 2, 1, None)),
        (("--ntasks-per-node=4", "--gpus-per-task=1"), (1, 4, 4, 4)),
        (("--nodes=1", "--ntasks-per-gpu=1", "--gpus=4"), (1, None, None, 4)),
        (("--nodes=2  # two", "--ntasks-per-node=4 # each"), (2, 8, 4, None)),
        (("--nodelist=a,b",), (None, None, 1, None)),
    ],
)
def test_numbers_of_a_job(options, numbers):
    job = headers(*(options or ("--time=1:00",)))
    assert (job.nodes, job.tasks, job.tasks_per_node, job.gpus_per_node) == numbers


def test_headers_end_at_the_first_command():
    job = read_headers("#!/bin/bash\n#SBATCH -N 2\n##SBATCH -N 8\n\n# text\n#SBATCH -c 4\necho\n#SBATCH -N 16\n")
    assert (job.nodes, job.number("cpus-per-task")) == (2, 4)
    assert (job.line("nodes"), job.line("cpus-per-task")) == (2, 6)
    assert read_headers("#!/bin/bash\ntorchrun train.py\n") is None


def test_headers_behind_the_first_command_are_known_to_be_passed_over():
    text = "#SBATCH -N 2\ncd x\n#SBATCH --gres=gpu:4\ncat <<E\n#SBATCH -n 3\nE\necho '\n#SBATCH -n 4\n'\n"
    assert read_late_headers(text) == {3: {"gres": "gpu:4"}}


def test_of_a_job_of_several_parts_nothing_is_concluded():
    job = headers("--nodes=1 --gres=gpu:4", "hetjob", "--nodes=3")
    assert (job.nodes, job.tasks, job.gpus_per_node) == (None, None, None)


@pytest.mark.parametrize(
    ("srun", "numbers"),
    [
        ("srun", (2, 16, 8)),
        ("srun --ntasks=1", (1, 1, 1)),
        ("srun -N1 -n1", (1, 1, 1)),
        ("srun --ntasks=2 --ntasks-per-node=1", (2, 2, 1)),
        ("srun --ntasks=$N", (2, None, None)),
        ("srun --ntasks-per-node=1", (2, None, None)),
        ("srun --nodes=1", (1, None, None)),
        ("srun $ARGS", (None, None, None)),
        ("srun --nodes=2 --ntasks-per-node=8", (2, 16, 8)),
    ],
)
def test_a_step_inherits_what_it_does_not_say_itself(srun, numbers):
    given = step(srun, "--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8")
    assert (given.nodes, given.tasks, given.tasks_per_node) == numbers


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        (("--gpus-per-task=1",), True),
        (("--gpus-per-task=1", "--gpu-bind=none"), False),
        (("--gpus-per-node=4", "--gpu-bind=closest"), True),
        (("--gpus-per-node=4",), False),
    ],
)
def test_who_sees_which_gpus(options, splits):
    assert step("srun", *options).splits_gpus is splits


@pytest.mark.parametrize(
    ("array", "beside"), [("0-7", True), ("0-7%1", False), ("3", False), ("1,5", True), ("0-7%4", True)]
)
def test_jobs_of_an_array_that_run_together(array, beside):
    assert headers(f"--array={array}").runs_beside_itself is beside


def test_slurm_tells_the_script_its_numbers():
    told = headers("--nodes=2", "--ntasks-per-node=8", "--gres=gpu:4", "--cpus-per-task=3").variables()
    assert told == {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "16",
        "SLURM_NPROCS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_GPUS_ON_NODE": "4",
    }
    assert "SLURM_NTASKS" not in headers("--nodes=2").variables()


ALONE = "import numpy\n\nnumpy.save('matrices.npy', numpy.eye(4))\n"
JOB = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --ntasks-per-node=2
srun python /home/author/project/generate.py
"""


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tools/generate.py": ALONE}, []),
        ({"tools/generate.py": f"import torch.distributed\n{ALONE}"}, [("ENV010", "warning")]),
        ({"tools/generate.py": ALONE, "data/generate.py": ALONE}, [("ENV010", "warning")]),
        ({"tools/other.py": ALONE}, [("ENV010", "warning")]),
    ],
)
def test_a_program_at_a_path_of_its_author(tmp_path, files, found):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "ENV010"))
    assert severities_in(tmp_path, {"job.sh": JOB, **files}, book) == found


TURNS = """\
import os

import torch
import torch.distributed as dist

RANK = int(os.environ["SLURM_PROCID"])
dist.init_process_group("gloo", rank=RANK, world_size=int(os.environ["SLURM_NTASKS"]))  # not nccl: only a barrier
gpus = torch.cuda.device_count()
with torch.cuda.device(int(os.environ["SLURM_LOCALID"]) % gpus):
    encode(RANK)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (TURNS, "info"),
        (TURNS.replace('"gloo"', '"nccl"'), "warning"),
        (TURNS.replace('"gloo", rank=RANK, world_size=int(os.environ["SLURM_NTASKS"])', ""), "warning"),
        (TURNS.replace(" % gpus", ""), "warning"),
    ],
)
def test_tasks_that_share_gpus_on_purpose(tmp_path, text, severity):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "ENV010"))
    files = {"job.sh": JOB.replace("/home/author/project", "tools"), "tools/generate.py": text}
    assert severities_in(tmp_path, files, book, preview=True) == [("ENV010", severity)]
    assert len(severities_in(tmp_path, files, book)) == (severity == "warning")


@pytest.mark.parametrize(
    ("page", "severity"), [("```\nbash job.sh\n```\n", "info"), ("```\nsbatch job.sh\n```\n", "warning")]
)
def test_a_shell_ignores_all_lines_for_slurm(tmp_path, page, severity):
    batch = "#!/bin/bash\n#SBATCH --nodes=1\nset -e\n#SBATCH --gres=gpu:8\ntorchrun train.py\n"
    (tmp_path / ".git").mkdir()
    files = {"job.sh": batch, "train.py": "import torch\n", "README.md": page}
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "ENV010"))
    assert severities_in(tmp_path, files, book, preview=True) == [("ENV010", severity)]


BY_TASK = """\
#!/bin/bash
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
srun bash -c 'LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID python train.py'
"""
CHOOSES = """\
import os
import torch
local_rank = int(os.environ["LOCAL_RANK"])
visible = torch.cuda.device_count()
if visible == 1:
    device_id = 0
else:
    device_id = local_rank
torch.cuda.set_device(device_id)
"""
CHOOSES_AT_ONCE = """\
import os
import torch
device = 0 if torch.cuda.device_count() == 1 else int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)
"""


@each_case(
    ("program", "severities"),
    [
        (CHOOSES, []),
        (CHOOSES_AT_ONCE, []),
        (CHOOSES.replace("visible == 1", "visible == 8"), ["error"]),
        (CHOOSES.replace("device_id = 0", "print(visible)"), ["error"]),
        (CHOOSES.replace("visible = torch.cuda.device_count()", "visible = int(os.environ['N'])"), ["error"]),
        (CHOOSES + "torch.cuda.set_device(local_rank)\n", ["error"]),
    ],
)
def test_a_program_that_takes_the_only_gpu_that_it_sees(tmp_path, program, severities):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "ENV011"))
    found = severities_in(tmp_path, {"job.sh": BY_TASK, "train.py": program}, book, preview=True)
    assert [severity for _, severity in found] == severities
