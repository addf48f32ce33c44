"""NCCL's settings, files and plug-ins, against real files and compiled libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from doctor.collectors.base import Machine
from doctor.collectors.nccl import config_files
from doctor.collectors.nccl.config_files import ConfEntry, parse_conf, parse_graphs, parse_topology
from doctor.collectors.nccl.configuration import collect_nccl
from doctor.collectors.nccl.plugins import library_names
from doctor.core.facts import NcclPlugin, ReferencedFile, Setting, SettingsFile
from tests.lab.nvml import compiler
from tests.lab.speed import patience

DATA = Path(__file__).parents[1] / "data" / "nccl"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with an empty /etc and an empty home."""
    for name in ("etc", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(config_files, "_home", lambda: str(tmp_path / "home"))
    return Machine(environ={"HOME": str(tmp_path / "home")}, etc=tmp_path / "etc")


def having(place: Machine, **variables: str) -> Machine:
    return replace(place, environ={**place.environ, **variables})


def test_nothing_is_set(place: Machine) -> None:
    facts = collect_nccl(having(place, TORCH_NCCL_BLOCKING_WAIT="1", PATH="/bin"))
    assert (facts.settings, facts.files, facts.references, facts.plugins, facts.hidden) == ((), (), (), (), ())


def test_environment_over_user_file_over_system_file(place: Machine) -> None:
    user, system = place.etc.parent / "home/.nccl.conf", place.etc / "nccl.conf"
    user.write_text("# mine\nNCCL_DEBUG=INFO\nNCCL_IB_HCA=mlx5_0\nNCCL_IB_HCA=mlx5_9\n")
    system.write_text("NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5\nNCCL_SOCKET_IFNAME=^docker,lo\nOMP_NUM_THREADS=4\n")
    facts = collect_nccl(having(place, NCCL_DEBUG="", NCCL_ALGO="Ring"))
    assert facts.settings == (
        Setting("NCCL_ALGO", "Ring"),
        Setting("NCCL_DEBUG", "", overrides=(f"{user}:2=INFO", f"{system}:1=WARN")),
        Setting("NCCL_IB_HCA", "mlx5_0", "user file", str(user), 3, overrides=(f"{user}:4=mlx5_9", f"{system}:2=mlx5")),
        Setting("NCCL_SOCKET_IFNAME", "^docker,lo", "system file", str(system), 3),
        Setting("OMP_NUM_THREADS", "4", "system file", str(system), 4),
    )
    assert facts.files == (
        SettingsFile(str(user), "user file", settings=3),
        SettingsFile(str(system), "system file", settings=4),
    )
    assert (facts.get("NCCL_IB_HCA"), facts.get("NCCL_PROTO")) == ("mlx5_0", None)


def test_named_file_takes_the_place_of_the_one_at_home(place: Machine, tmp_path: Path) -> None:
    (tmp_path / "home/.nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    named = tmp_path / "job.conf"
    named.write_text("NCCL_PROTO=Simple\n")
    facts = collect_nccl(having(place, NCCL_CONF_FILE=str(named)))
    assert [(one.name, one.layer) for one in facts.settings] == [
        ("NCCL_CONF_FILE", "environment"),
        ("NCCL_PROTO", "user file"),
    ]


def test_named_file_that_is_missing_and_a_tilde_that_nobody_expands(place: Machine, tmp_path: Path) -> None:
    (tmp_path / "home/job.conf").write_text("NCCL_PROTO=Simple\n")
    facts = collect_nccl(having(place, NCCL_CONF_FILE="~/job.conf"))
    assert facts.files == (SettingsFile("~/job.conf", "user file", exists=False),)
    assert facts.get("NCCL_PROTO") is None


def test_empty_name_of_a_file_counts_as_none(place: Machine, tmp_path: Path) -> None:
    (tmp_path / "home/.nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    assert collect_nccl(having(place, NCCL_CONF_FILE="")).get("NCCL_DEBUG") == "INFO"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_that_may_not_be_read(place: Machine) -> None:
    (place.etc / "nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    (place.etc / "nccl.conf").chmod(0)
    (file,) = collect_nccl(place).files
    assert file.exists
    assert file.error == "Permission denied"


def test_folder_in_the_place_of_a_file(place: Machine) -> None:
    (place.etc / "nccl.conf").mkdir()
    (file,) = collect_nccl(place).files
    assert file.error == "Is a directory"


def test_two_homes_are_said_to_be_two(place: Machine, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    facts = collect_nccl(having(place, HOME=str(other)))
    note = facts.why_hidden("files")
    assert note is not None
    assert "2.30" in note.reason
    assert facts.get("NCCL_DEBUG") == "INFO"


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("NCCL_DEBUG=INFO", [ConfEntry("NCCL_DEBUG", "INFO", 1)]),
        ("NCCL_DEBUG = INFO\n", [ConfEntry("NCCL_DEBUG ", " INFO", 1)]),
        (" # NCCL_DEBUG=INFO\n", [ConfEntry(" # NCCL_DEBUG", "INFO", 1)]),
        ("#NCCL_DEBUG=INFO\nexport NCCL_ALGO\n\n", []),
        ("NCCL_DEBUG=INFO # loud\r\n", [ConfEntry("NCCL_DEBUG", "INFO # loud", 1)]),
        ("NCCL_TOPO_FILE=a=b\nNCCL_ALGO=\n", [ConfEntry("NCCL_TOPO_FILE", "a=b", 1), ConfEntry("NCCL_ALGO", "", 2)]),
        ("=1\n", []),
        ("NCCL_A=1\0junk=2\nNCCL_B=é\n", [ConfEntry("NCCL_A", "1", 1), ConfEntry("NCCL_B", "é", 2)]),
        ("A=" + "x" * 2000, [ConfEntry("A", "x" * 1023, 1)]),
        ("A=" + "x" * 4093 + "B=2", [ConfEntry("A", "x" * 1023, 1), ConfEntry("B", "2", 1)]),
    ],
)
def test_lines_as_nccl_reads_them(text: str, entries: list[ConfEntry]) -> None:
    assert list(parse_conf(text.encode())) == entries


def test_windows_line_ends_are_pointed_out(place: Machine) -> None:
    (place.etc / "nccl.conf").write_bytes(b"NCCL_SOCKET_IFNAME=eth0\r\n")
    facts = collect_nccl(place)
    assert facts.get("NCCL_SOCKET_IFNAME") == "eth0"
    assert "CR" in (facts.files[0].error or "")


def test_binary_rubbish_is_no_error(place: Machine) -> None:
    (place.etc / "nccl.conf").write_bytes(bytes(range(256)) * 100)
    assert collect_nccl(place).files[0].exists


def test_passwords_do_not_get_in(place: Machine) -> None:
    facts = collect_nccl(having(place, NCCL_DEBUG_FILE="http://me:hunter2@host/log"))
    assert "hunter2" not in str(facts)


# ---- files that settings name ----


def test_topology_file(place: Machine) -> None:
    path = DATA / "topology_two_gpus.xml"
    (reference,) = collect_nccl(
        having(place, NCCL_TOPO_FILE=str(path), NCCL_TOPO_DUMP_FILE="/nowhere/x.xml")
    ).references
    assert reference == ReferencedFile(
        "NCCL_TOPO_FILE",
        str(path),
        exists=True,
        readable=True,
        gpus=("0000:1a:00.0", "0000:9a:00.0"),
        devices=("mlx5_0", "eth0"),
    )


def test_missing_graph_file(place: Machine) -> None:
    facts = collect_nccl(having(place, NCCL_GRAPH_FILE="/nowhere/graph.xml"))
    assert facts.references == (ReferencedFile("NCCL_GRAPH_FILE", "/nowhere/graph.xml", exists=False, readable=False),)


def test_topology_that_a_virtual_machine_provides(place: Machine) -> None:
    folder = place.etc.parent / "var/run/nvidia-topologyd"
    folder.mkdir(parents=True)
    (folder / "virtualTopology.xml").write_bytes((DATA / "topology_two_gpus.xml").read_bytes())
    (reference,) = collect_nccl(place).references
    assert (reference.variable, len(reference.gpus)) == ("NCCL_TOPO_FILE (default)", 2)
    assert collect_nccl(having(place, NCCL_TOPO_FILE="/nowhere")).references[0].path == "/nowhere"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not well-formed"),
        (b"<system><cpu></system>", "not well-formed"),
        (b"\x00\xff\xfe", "not well-formed"),
        (b"<!DOCTYPE s [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><system>&b;</system>", "document type"),
        (b"<!DOCTYPE s SYSTEM 'file:///etc/passwd'><system/>", "document type"),
        (b"<system>" + b" " * (4 << 20) + b"</system>", "larger than"),
    ],
)
def test_documents_that_are_no_topology(data: bytes, words: str) -> None:
    assert words in (parse_topology(data).error or "")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<system version='2'/>", "version 2"),
        (b"<system/>", "version none"),
        (b"<graphs version='1'/>", "<graphs>, not <system>"),
        (b"<system version='1'><cpu numaid='0' affinity='ffff'/></system>", "a <cpu> element has no arch attribute"),
        (b"<system version='1'><cpu numaid='0' arch='x86_64'/></system>", "no vendor attribute"),
        (b"<system version='1'><cpu arch='arm64'/></system>", "no numaid attribute"),
    ],
)
def test_topologies_that_nccl_refuses(data: bytes, words: str) -> None:
    assert words in (parse_topology(data).error or "")


def test_graphs() -> None:
    graph = "<graph id='0' pattern='4' crossnic='0' nchannels='1' speedintra='20' speedinter='20' samechannels='1'>"
    data = f"<graphs version='1'>{graph}<channel><gpu dev='0'/><gpu dev='a'/></channel></graph></graphs>".encode()
    assert (parse_graphs(data).error, parse_graphs(data).gpus) == (None, ["0", "10"])
    assert parse_graphs(data.replace(b"crossnic", b"x")).error == "a <graph> element has no crossnic attribute"
    assert "<system>, not <graphs>" in (parse_graphs(b"<system version='1'/>").error or "")


def test_what_was_read_before_the_break_is_kept() -> None:
    topology = parse_topology(b"<system><pci busid='0000:1A:00.0' class='0x030200'></pci><")
    assert topology.gpus == ["0000:1a:00.0"]
    assert topology.error


# ---- plug-ins ----


def build(path: Path, *symbols: str) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.parent / f".{path.name}.c"
    source.write_text("".join(f"int {symbol} = 1;\n" for symbol in symbols) + "extern int ncclNetPlugin_v99;\n")
    subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", path, source], check=True, timeout=patience(60))
    return path


def plugins(place: Machine, **variables: str) -> tuple[NcclPlugin, ...]:
    """Those of the folder of this test: a machine may have a default plug-in of its own."""
    found = collect_nccl(having(place, **variables)).plugins
    return tuple(one for one in found if one.requested or str(place.etc.parent) in (one.path or ""))


def test_plugin_by_suffix_on_the_library_path(place: Machine, tmp_path: Path) -> None:
    path = build(tmp_path / "lib/libnccl-net-aws-ofi.so", "ncclNetPlugin_v8", "ncclCollNetPlugin_v8", "helper")
    (plugin,) = plugins(place, NCCL_NET_PLUGIN="aws-ofi", LD_LIBRARY_PATH=str(path.parent))
    assert plugin == NcclPlugin(
        "net", "libnccl-net-aws-ofi.so", "aws-ofi", str(path), ("ncclCollNetPlugin_v8", "ncclNetPlugin_v8")
    )


def test_default_plugin_that_nobody_asked_for(place: Machine, tmp_path: Path) -> None:
    path = build(tmp_path / "lib/libnccl-net.so", "ncclNetPlugin_v10", "ncclTunerPlugin_v3")
    (plugin,) = plugins(place, LD_LIBRARY_PATH=str(path.parent))
    assert (plugin.kind, plugin.name, plugin.requested) == ("net", "libnccl-net.so", "")
    assert plugin.symbols == ("ncclNetPlugin_v10", "ncclTunerPlugin_v3")


def test_full_name_path_and_list(place: Machine, tmp_path: Path) -> None:
    by_name = build(tmp_path / "lib/libspecial.so", "ncclNetPlugin_v9")
    by_path = build(tmp_path / "far/tuner.so", "ncclTunerPlugin_v4")
    found = plugins(
        place,
        NCCL_NET_PLUGIN="libspecial.so,gone",
        NCCL_TUNER_PLUGIN=str(by_path),
        LD_LIBRARY_PATH=str(by_name.parent),
    )
    assert [(one.kind, one.name, one.path, one.symbols) for one in found] == [
        ("net", "libspecial.so", str(by_name), ("ncclNetPlugin_v9",)),
        ("net", "libnccl-net-gone.so", None, ()),
        ("tuner", str(by_path), str(by_path), ("ncclTunerPlugin_v4",)),
    ]
    assert "gone, libnccl-net-gone.so" in (found[1].error or "")


def test_plugin_that_is_no_library(place: Machine, tmp_path: Path) -> None:
    broken = tmp_path / "libnccl-profiler-x.so"
    broken.write_text("not a library")
    (plugin,) = plugins(place, NCCL_PROFILER_PLUGIN="x", LD_LIBRARY_PATH=str(tmp_path))
    assert (plugin.path, plugin.symbols) == (str(broken), ())
    assert plugin.error


def test_switched_off(place: Machine, tmp_path: Path) -> None:
    build(tmp_path / "libnccl-net.so", "ncclNetPlugin_v10")
    assert plugins(place, NCCL_NET_PLUGIN="None", NCCL_ENV_PLUGIN="none", LD_LIBRARY_PATH=str(tmp_path)) == ()


def test_plugin_that_a_file_asks_for(place: Machine) -> None:
    (place.etc / "nccl.conf").write_text("NCCL_NET_PLUGIN=somewhere-else\n")
    (plugin,) = plugins(place)
    assert (plugin.requested, plugin.path) == ("somewhere-else", None)


@pytest.mark.parametrize(
    ("kind", "requested", "names"),
    [
        ("net", "", ("libnccl-net.so",)),
        ("net", "ucx", ("ucx", "libnccl-net-ucx.so")),
        ("tuner", "libtuner.so", ("libtuner.so",)),
        ("tuner", "./tuner", ("./tuner",)),
        ("env", "libx.so.1", ("libx.so.1", "libnccl-env-libx.so.1.so")),
    ],
)
def test_names_that_nccl_tries(kind: str, requested: str, names: tuple[str, ...]) -> None:
    assert library_names(kind, requested) == names


def test_collector_on_this_machine() -> None:
    assert hash(collect_nccl(Machine())) is not None
