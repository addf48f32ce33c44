"""The CUDA context as NVML counts it, against the fake library: no GPU is here."""

import subprocess
import sys

import pytest

from tests.lab.nvml import FakeNvml

MIB = 1 << 20
PROGRAM = """
import os, sys
from pathlib import Path
from doctor.probes.devices.gpu_context import context_bytes
conf = Path(os.environ["FAKE_NVML_CONF"])
own = conf.with_name(f"own-{os.getpid()}.conf")
own.write_text(conf.read_text().replace("OWN", str(os.getpid())))
os.environ["FAKE_NVML_CONF"] = str(own)
print(context_bytes(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
"""


def context_of(fake, tmp_path, uuid, *lines, initial=True, reserved=2 * MIB):
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026531836]" if initial else "pid:[4026532000]")
    command = [sys.executable, "-c", PROGRAM, uuid, str(reserved), str(tmp_path)]
    done = subprocess.run(
        command, env=fake.environ("eight_h100", *lines), capture_output=True, text=True, timeout=60, check=True
    )
    return None if done.stdout.strip() == "None" else int(done.stdout)


def uuid_of(index):
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


@pytest.mark.parametrize(
    ("lines", "initial", "expected"),
    [
        (("gpu.1.procs=OWN:522,77:9000",), True, 520 * MIB),
        (("gpu.1.procs=77:9000",), True, None),
        (("gpu.1.procs=OWN:-",), True, None),
        (("gpu.1.procs=OWN:1",), True, None),
        (("gpu.1.procs=4711:522",), False, 520 * MIB),
        (("gpu.1.procs=4711:522,77:9000",), False, None),
        (("gpu.0.procs=OWN:522",), True, None),
        ((), True, None),
    ],
    ids=["own", "others", "size hidden", "less than torch", "container", "container, two", "other GPU", "none"],
)
def test_what_this_process_holds_beside_torch(fake_nvml: FakeNvml, tmp_path, lines, initial, expected):
    assert context_of(fake_nvml, tmp_path, uuid_of(1), *lines, initial=initial) == expected


def test_a_gpu_that_nvml_does_not_know(fake_nvml: FakeNvml, tmp_path):
    assert context_of(fake_nvml, tmp_path, "GPU-other", "gpu.*.procs=OWN:522") is None
