"""Names and values of variables."""

from __future__ import annotations

import pytest

from doctor.knowledge import environment_variables, variable_values
from doctor.knowledge.releases import release
from tests.lab.cases import each_case


@each_case(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_DISABLE_IB", "NCCL_IB_DISABLE"),
        ("NCCL_DEBUG_SUBSYSTEM", "NCCL_DEBUG_SUBSYS"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE"),
        ("NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("nccl_debug", "NCCL_DEBUG"),
        ("NCCL_DEBUG ", "NCCL_DEBUG"),
        ("NCCL_BUFFER_SIZE", "NCCL_BUFFSIZE"),
        ("NCCL_TEAM_COLOUR", None),
        ("NCCL_IB", None),
        ("NCCL_FOO", None),
    ],
)
def test_nearest(name: str, meant: str | None) -> None:
    assert environment_variables.nearest(name) == meant


@each_case(
    "name",
    [
        "NCCL_VERSION",
        "NCCL_HOME",
        "NCCL_ROOT",
        "NCCL_LIB_DIR",
        "NCCL_INCLUDE_DIR",
        "NCCL_FASTRAK_CTRL_DEV",
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS",
        "NCCL_PLUGIN_P2P",
        "NCCL_UCX_RNDV_THRESH",
        "NCCL_USE_SNAP",
        "NCCL_GPUVIZ_READ_INTERVAL_IN_MICROSECONDS",
        "NCCL_NET_PLUGIN_TELEMETRY_MODE",
        "NCCL_TEST",
        "NCCL_RINGS_REMAP",
        "NCCL_NCHANNELS_PER_PEER",
        "NCCL_COLLTRACE",
        "NCCL_MIN_ZCOPY_SIZE",
        "NCCL_FAST_SOCKET_ENABLE",
        "NCCL_IB_IS_GLOBAL",
        "NCCL_GIN_PROXY_NTHREADS",
        "NCCL_RESHARD_MAX_CTA",
        "NCCL_CHECKPOINT_KVS_PATH",
    ],
)
def test_others_names_are_left_alone(name: str) -> None:
    assert environment_variables.is_foreign(name)


@pytest.mark.parametrize(
    "name", ["RCCL_MSCCL_ENABLE", "OFI_NCCL_PROTOCOL", "HCCL_DEBUG", "CCL_LOG_LEVEL", "OMP_NUM_THREADS"]
)
def test_what_is_not_nccls(name: str) -> None:
    assert not environment_variables.concerns_nccl(name)


def test_no_known_name_counts_as_foreign_by_its_prefix() -> None:
    clashing = {
        name
        for name, info in environment_variables.table().items()
        if environment_variables.is_foreign(name) and info.reader == "nccl"
    }
    assert clashing == {"NCCL_PROFILER_PLUGIN"}


@pytest.mark.parametrize(
    ("name", "everywhere"),
    [
        ("NCCL_IB_GDR_LEVEL", True),  # since NCCL 2.4
        ("NCCL_BLOCKING_WAIT", True),  # since torch 2.2
        ("NCCL_MNNVL", False),  # since NCCL 2.21: torch 2.4 comes with 2.20
        ("NCCL_SHM_USE_CUDA_MEMCPY", False),  # since NCCL 2.30
        ("NCCL_SOCKET_IFNAME", False),
    ],
)
def test_superseded_in_every_supported_release(name: str, everywhere: bool) -> None:
    info = environment_variables.known(name)
    assert info is not None
    assert info.is_superseded_everywhere is everywhere


def test_the_table_is_sound() -> None:
    for name, info in environment_variables.table().items():
        assert info.grammar in variable_values._RULES, name
        assert all(release(text) for text in (info.first, info.last, info.superseded) if text), name
        assert info.peers in ("", "agree", "may differ"), name
        replacement = (info.replaced_by or "").partition("=")[0]
        assert not replacement or environment_variables.known(replacement), name
        assert info.still_read or info.superseded is None or info.last or info.reader == "nccl", name
        if info.default is not None:
            assert variable_values.fault(name, info.default) is None, name


@pytest.mark.parametrize(
    ("one", "other", "distance"), [("abcd", "abcd", 0), ("abcd", "abdc", 1), ("ab", "abcd", 2), ("a", "xyz", 3)]
)
def test_slips(one: str, other: str, distance: int) -> None:
    assert environment_variables.slips(one, other, 2) == distance


@each_case(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "true"),
        ("NCCL_P2P_DISABLE", "2"),
        ("NCCL_P2P_DISABLE", "1 # on"),
        ("NCCL_BUFFSIZE", "8M"),
        ("NCCL_BUFFSIZE", "1e6"),
        ("NCCL_IB_TIMEOUT", "099"),
        ("NCCL_IB_TIMEOUT", "32"),
        ("NCCL_NTHREADS", "100"),
        ("NCCL_ALGO", "Rings"),
        ("NCCL_ALGO", "tree;ring"),
        ("NCCL_ALGO", "gather:ring"),
        ("NCCL_PROTO", "LL64"),
        ("NCCL_DEBUG", "DEBUG"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NETWORK"),
        ("NCCL_SOCKET_FAMILY", "ipv4"),
        ("NCCL_P2P_LEVEL", "nvl"),
        ("NCCL_COMM_ID", "10.0.0.1"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0"),
        ("NCCL_NETDEVS_POLICY", "MAX:0"),
        ("NCCL_CTA_POLICY", "FAST"),
        ("TORCH_NCCL_BLOCKING_WAIT", "on"),
        ("TORCH_NCCL_BLOCKING_WAIT", ""),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "many"),
        ("TORCH_DISTRIBUTED_DEBUG", "1"),
    ],
)
def test_wrong_values(name: str, value: str) -> None:
    found = variable_values.fault(name, value)
    assert found is not None
    assert found.problem
    assert found.expected


@each_case(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "0x1"),
        ("NCCL_IB_DISABLE", " 1"),
        ("NCCL_IB_DISABLE", ""),
        ("NCCL_CUMEM_ENABLE", "-2"),
        ("NCCL_IB_GID_INDEX", "-1"),
        ("NCCL_ALGO", "^NVLS,nvlstree"),
        ("NCCL_ALGO", "ring;allreduce:tree,ring;allgather:ring"),
        ("NCCL_PROTO", "simple"),
        ("NCCL_DEBUG", "Version"),
        ("NCCL_DEBUG", "NONE"),
        ("NCCL_P2P_LEVEL", "5"),
        ("NCCL_RAS_ADDR", "[::1]:28028"),
        ("NCCL_COMM_ID", "node0.cluster:1234"),
        ("NCCL_IB_ADDR_RANGE", "fd00::/64"),
        ("NCCL_NET", "AWS Libfabric"),
        ("NCCL_NET_PLUGIN", "none"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_CTA_POLICY", "ZERO|DEFAULT"),
        ("NCCL_DEBUG_TIMESTAMP_FORMAT", "%d"),
        ("TORCH_NCCL_BLOCKING_WAIT", "Y"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("NO_SUCH_VARIABLE", "x"),
    ],
)
def test_sound_values(name: str, value: str) -> None:
    assert variable_values.fault(name, value) is None


def test_rules_that_hang_on_the_release() -> None:
    assert variable_values.fault("NCCL_ALGO", "PAT", release="2.22.3") is not None
    assert variable_values.fault("NCCL_ALGO", "PAT", release="2.23.4") is None
    assert "ignores it" in variable_values.fault("NCCL_ALGO", "Rings", release="2.20.5").problem  # type: ignore[union-attr]
    assert "rejects" in variable_values.fault("NCCL_ALGO", "Rings", release="2.24.3").problem  # type: ignore[union-attr]
    assert variable_values.fault("NCCL_PROTO", "allreduce:LL", release="2.20.5") is not None
    assert variable_values.fault("NCCL_SET_THREAD_NAME", "true", release="2.30.7") is None
    assert variable_values.fault("NCCL_SET_THREAD_NAME", "true", release="2.28.9") is not None


def test_effective_values() -> None:
    assert (
        variable_values.effective("NCCL_CROSS_NIC", None) == variable_values.effective("NCCL_CROSS_NIC", "0x2") == "2"
    )
    assert (
        variable_values.effective("NCCL_IB_DISABLE", "true")
        == variable_values.effective("NCCL_IB_DISABLE", None)
        == "0"
    )
    assert variable_values.effective("NCCL_ALGO", "Ring") == variable_values.effective("NCCL_ALGO", "ring")
    assert variable_values.effective("NCCL_ALGO", None) is None
    assert variable_values.effective("TORCH_NCCL_BLOCKING_WAIT", "Yes") == "1"


def test_torchs_own_debug_level_agrees() -> None:
    """The rule for TORCH_DISTRIBUTED_DEBUG, against the torch that is installed."""
    pytest.importorskip("torch")
    import os
    import subprocess
    import sys

    for value in ("DETAIL", "verbose"):
        code = subprocess.run(
            [sys.executable, "-c", "import torch.distributed"],
            env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": value},
            capture_output=True,
            check=False,
        ).returncode
        assert (code != 0) == (variable_values.fault("TORCH_DISTRIBUTED_DEBUG", value) is not None)
