"""Which variables are taken as settings of training."""

from doctor.collectors.base import Machine
from doctor.collectors.software.environment import collect_environment
from doctor.core.masking import REDACTED


def test_settings_by_name_and_nothing_else() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "OMP_NUM_THREADS": "8",
        "UCX_TLS": "tcp",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHINDUCTOR_CACHE_DIR": "/x",
        "HOME": "/home/user",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    facts = collect_environment(Machine(environ=environ))
    assert [variable.name for variable in facts.variables] == [
        "CUDA_VISIBLE_DEVICES",
        "NCCL_SOCKET_IFNAME",
        "OMPI_MCA_btl_tcp_if_include",
        "OMP_NUM_THREADS",
        "TORCH_DISTRIBUTED_DEBUG",
        "UCX_TLS",
    ]
    assert facts.get("CUDA_VISIBLE_DEVICES") == ""
    assert facts.get("NCCL_DEBUG") is None


def test_secrets_are_replaced() -> None:
    environ = {"FI_PROVIDER_TOKEN": "abc", "PYTHONPATH": "https://me:pw@example.org/x", "NCCL_IB_PKEY": "3"}
    facts = collect_environment(Machine(environ=environ))
    assert facts.get("FI_PROVIDER_TOKEN") == REDACTED
    assert facts.get("PYTHONPATH") == f"https://{REDACTED}@example.org/x"
    assert facts.get("NCCL_IB_PKEY") == "3"
