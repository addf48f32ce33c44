"""A batch script and a manifest with planted faults, and their healthy twins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.lint.engine.registry import builtin_rules
from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.python.script import Script

RULES = [rule for rule in builtin_rules() if issubclass(rule.reads, EnvironmentSource) and rule.reads is not Script]

SICK_JOB = """\
#!/bin/bash
#SBATCH --job-name=llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=h100:8
module load cuda
export NCCL_SOKET_IFNAME=eth0
export NCCL_IB_DISABLE=false
export GLOO_SOCKET_IFNAME=^docker0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=295000
export RANK=$SLURM_PROCID
export WORLD_SIZE=8
srun python preprocess.py
srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:29500 train.py
"""
SICK_LINES = {
    7: {"NCCL001"},
    8: {"NCCL002"},
    9: {"NET011"},
    10: {"MEM007"},
    12: {"ENV007"},
    13: {"ENV004"},
    15: {"ENV003"},
    16: {"ENV009"},
}
WELL_JOB = """\
#!/bin/bash
#SBATCH --job-name=llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
module load cuda
export NCCL_SOCKET_IFNAME=eth0
export NCCL_IB_DISABLE=0
export GLOO_SOCKET_IFNAME=eth0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --nodes=1 --ntasks=1 python preprocess.py
srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 --rdzv-backend=c10d \\
  --rdzv-endpoint=$MASTER_ADDR:29500 train.py
"""
SICK_PODS = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  nprocPerNode: "8"
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              command: [torchrun, "--nnodes=4", "--nproc_per_node=8", train.py]
              env:
                - {name: MASTER_ADDR, value: localhost}
                - {name: NCCL_DEBUG, value: LOUD}
              resources:
                limits: {nvidia.com/gpu: 4}
"""
SICK_POD_LINES = {
    5: {"GPU002"},
    13: {"GPU002", "ENV003"},
    15: {"NET005"},
    16: {"NCCL002"},
    18: {"MEM010"},
}
WELL_PODS = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  nprocPerNode: "8"
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              command: [torchrun, train.py]
              env:
                - {name: NCCL_DEBUG, value: WARN}
              resources:
                limits: {nvidia.com/gpu: 8}
              volumeMounts:
                - {mountPath: /dev/shm, name: shm}
          volumes:
            - {name: shm, emptyDir: {medium: Memory}}
"""


def found(name, text):
    file = read_launch_file(name, text)
    lines = {}
    for rule in RULES:
        for hit in rule.violations(file) if isinstance(file, rule.reads) else ():
            lines.setdefault(hit.place.line, set()).add(rule.id)
    return lines


def violations(text, check):
    file = read_launch_file("run.sh", text)
    return [hit for rule in RULES if rule.id == check for hit in rule.violations(file)]


@pytest.mark.parametrize(
    ("name", "text", "lines"), [("job.sbatch", SICK_JOB, SICK_LINES), ("job.yaml", SICK_PODS, SICK_POD_LINES)]
)
def test_every_planted_fault_is_found_on_its_line_and_nothing_else(name, text, lines):
    assert found(name, text) == lines


@pytest.mark.parametrize(("name", "text"), [("job.sbatch", WELL_JOB), ("job.yaml", WELL_PODS)])
def test_the_healthy_twin_is_silent(name, text):
    assert found(name, text) == {}


def test_a_script_with_the_line_ends_of_windows_is_read_alike():
    assert found("job.sbatch", SICK_JOB.replace("\n", "\r\n")) == SICK_LINES


COUNT = st.sampled_from(["0", "1", "2", "8", "$N", "", "gpu", "-1", "1:2", "99999999999", "a,b", "$SLURM_NODEID"])
LINE = st.one_of(
    st.builds(
        "#SBATCH --{}={}".format, st.sampled_from(["nodes", "ntasks", "ntasks-per-node", "gres", "array"]), COUNT
    ),
    st.builds("#SBATCH --gpus-per-{}={}".format, st.sampled_from(["task", "node"]), COUNT),
    st.builds("export {}={}".format, st.sampled_from(["RANK", "WORLD_SIZE", "MASTER_PORT", "NCCL_DEBUG"]), COUNT),
    st.builds("CUDA_VISIBLE_DEVICES={} torchrun --nnodes={} --nproc_per_node={} t.py &".format, COUNT, COUNT, COUNT),
    st.builds("srun -N {} -n {} torchrun --nnodes={} --node_rank={} t.py".format, COUNT, COUNT, COUNT, COUNT),
    st.builds("srun python train.py trainer.devices={} trainer.num_nodes={}".format, COUNT, COUNT),
    st.builds("accelerate launch --num_processes {} --num_machines {} t.py".format, COUNT, COUNT),
    st.builds("mpirun -np {} deepspeed --num_gpus {} --include x:{} t.py".format, COUNT, COUNT, COUNT),
    st.sampled_from(["for i in 1 2; do", "done", "wait", "if true; then", "fi"]),
)


@settings(max_examples=100)
@given(st.lists(LINE, max_size=12))
def test_no_numbers_break_the_rules(text):
    for line in found("job.sbatch", "\n".join(["#!/bin/bash", *text, "torchrun x.py"])):
        assert 1 <= line <= len(text) + 2


@pytest.mark.parametrize(
    ("line", "check", "severity"),
    [
        ('export NCCL_SOCKET_IFNAME="eth0, eth1"', "NET007", "warning"),
        ("export NCCL_SOCKET_IFNAME=\"'eth0'\"", "NET007", None),
        ('export NCCL_IB_HCA="mlx5_0, mlx5_1"', "NET018", "warning"),
    ],
)
def test_a_list_with_another_valid_entry_is_a_warning(line, check, severity):
    (found,) = violations(f"{line}\ntorchrun train.py\n", check)
    assert found.severity == severity


def test_a_switch_that_is_on_by_default_is_removed_and_not_renamed():
    (found,) = violations("export NCCL_IB_CUDA_SUPPORT=1\ntorchrun train.py\n", "NCCL004")
    assert (found.fix, found.effect[:5]) == ("Remove `NCCL_IB_CUDA_SUPPORT`.", "None:")
    (off,) = violations("export NCCL_IB_CUDA_SUPPORT=0\ntorchrun train.py\n", "NCCL004")
    assert off.fix == "Replace `NCCL_IB_CUDA_SUPPORT` with `NCCL_NET_GDR_LEVEL`."


def test_the_longer_word_is_corrected():
    (found,) = violations("export NCCL_P2P_LEVEL=NVLINK\ntorchrun train.py\n", "NCCL002")
    assert found.fix == "Set `NCCL_P2P_LEVEL=NVL`."


@pytest.mark.parametrize(
    ("late", "severity"),
    [
        ("#SBATCH -N 2 --gres gpu:8", "info"),
        ("#SBATCH --nodes=2 --gres=gpu:4", "warning"),
        ("#SBATCH --cpus-per-task=8", "warning"),
    ],
)
def test_an_ignored_line_that_repeats_the_header_is_an_info(late, severity):
    job = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=8\nset -e\n"
    (found,) = violations(f"{job}{late}\necho start\n", "ENV010")
    assert (found.severity.value, found.preview) == (severity, severity == "info")
    assert ("same values" in found.effect) is (severity == "info")


@pytest.mark.parametrize(
    ("name", "severity", "fix"),
    [
        ("NCCL_CHECK_DISABLE", "info", "Remove `NCCL_CHECK_DISABLE`."),
        ("NCCL_CHECK_POINTER", None, "Replace `NCCL_CHECK_POINTER` with `NCCL_CHECK_POINTERS`."),
    ],
)
def test_a_name_near_to_one_that_nccl_ignores_is_removed(name, severity, fix):
    (found,) = violations(f"export {name}=1\ntorchrun train.py\n", "NCCL001")
    assert (found.severity, found.fix) == (severity, fix)
    assert found.effect.startswith("None:") is (severity == "info")
