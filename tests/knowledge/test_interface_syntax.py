"""The grammars of NCCL and Gloo, case by case as their sources read them."""

import importlib.util
import subprocess
import sys

import pytest

from doctor.knowledge.interface_syntax import (
    gloo_names,
    looks_like_nccl_syntax,
    nccl_device_list,
    nccl_interface_list,
    nccl_socket_family,
    parse_nccl_integer,
    parse_nccl_list,
)
from tests.lab.cases import each_case
from tests.lab.speed import patience

NAMES = ("lo", "docker0", "docker_gwbridge", "eth0", "eth1", "eth10", "Eth0", "ib0", "virbr0")


def _selected(text):
    return [name for name in NAMES if parse_nccl_list(text).selects(name)]


@each_case(
    ("text", "expected"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("eth0,ib", ["eth0", "ib0"]),
        ("=eth0,ib", ["eth0"]),
        ("^docker,lo,virbr", ["eth0", "eth1", "eth10", "Eth0", "ib0"]),
        ("^=docker0", ["lo", "docker_gwbridge", "eth0", "eth1", "eth10", "Eth0", "ib0", "virbr0"]),
        ("=^eth0", []),
        ("eth0,^lo", ["eth0"]),
        (" eth0", []),
        ("eth0 ", []),
        ("ib0, eth0", ["ib0"]),
        ("ETH0", []),
        (",,eth0,", ["eth0"]),
        (",,", list(NAMES)),
        ("^=", []),
        ("eth0:1", ["eth0"]),
    ],
)
def test_list_of_interfaces(text, expected):
    assert _selected(text) == expected


def test_only_sixteen_entries_are_read():
    text = ",".join(f"x{number}" for number in range(16)) + ",eth0"
    assert not parse_nccl_list(text).selects("eth0")


@pytest.mark.parametrize("text", [None, "", "e", "^"])
def test_less_than_two_characters_is_unset(text):
    assert nccl_interface_list(text) is None


@pytest.mark.parametrize(
    ("text", "name", "port", "expected"),
    [
        ("mlx5_1", "mlx5_10", 1, True),
        ("=mlx5_1", "mlx5_10", 1, False),
        ("mlx5_0:1", "mlx5_0", 1, True),
        ("mlx5_0:1", "mlx5_0", 2, False),
        ("=mlx5_0:1,mlx5_1:2", "mlx5_1", 2, True),
        ("^mlx5_0:1", "mlx5_0", 2, True),
        ("mlx5_0:-1", "mlx5_0", 7, True),
        ("mlx5_0:one", "mlx5_0", 1, False),
        ("", "mlx5_3", 1, True),
        (None, "mlx5_3", 1, True),
        ("^", "mlx5_3", 1, False),
    ],
)
def test_list_of_devices(text, name, port, expected):
    assert nccl_device_list(text).selects(name, port) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("AF_INET", "inet"), ("AF_INET6", "inet6"), ("af_inet", None), ("IPv4", None), ("", None), (None, None)],
)
def test_family(text, expected):
    assert nccl_socket_family(text) == expected


@each_case(
    ("text", "expected"),
    [
        ("1", 1),
        (" 1", 1),
        ("0x10", 16),
        ("010", 8),
        ("08", 0),
        ("-2", -2),
        ("+3", 3),
        ("7days", 7),
        ("true", 0),
        ("yes", 0),
        ("", 5),
        (None, 5),
        ("99999999999999999999", 5),
        ("9223372036854775807", 9223372036854775807),
        ("-9223372036854775809", 5),
    ],
)
def test_integer(text, expected):
    assert parse_nccl_integer(text, 5) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("", ()),
        ("e", ()),
        ("eth0", ("eth0",)),
        ("eth0,eth1", ("eth0", "eth1")),
        ("eth0,", ("eth0",)),
        ("eth0,,eth1", ("eth0", "", "eth1")),
        (" eth0", (" eth0",)),
        ("^lo", ("^lo",)),
    ],
)
def test_names_for_gloo(text, expected):
    assert gloo_names(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("^lo", True), ("=eth0", True), ("eth0,^lo", True), ("eth0", False), ("eth", False), ("", False)],
)
def test_signs(text, expected):
    assert looks_like_nccl_syntax(text) is expected


_ASK_GLOO = """
import datetime, os, sys, torch.distributed as d
for text in {texts!r}:
    os.environ["GLOO_SOCKET_IFNAME"] = text
    try:
        store = d.HashStore()
        d.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=5))
        d.destroy_process_group()
        print("ok")
    except RuntimeError as error:
        print("refused")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_gloo_itself_agrees():
    """Real Gloo: it takes a value just where every name in it, as read here, is an interface."""
    texts = ["l", "lo", "lo,", "lo,lo", "lo,eth9", "lo,,lo", "^lo", "=lo", " lo", "lo:1", "lO"]
    script = _ASK_GLOO.format(texts=texts)
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(100))
    expected = ["ok" if all(name == "lo" for name in gloo_names(text)) else "refused" for text in texts]
    assert answer.stdout.split() == expected, answer.stderr[-500:]
