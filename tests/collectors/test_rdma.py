"""RDMA devices from trees in sysfs's format, and damaged ones."""

from __future__ import annotations

import pytest

from doctor.collectors.base import NotPresent, NotVisible
from doctor.collectors.network.rdma import collect_rdma
from doctor.core.facts import Counter, Gid
from tests.collectors.recorded import machine_at, plant, put_parent

TREE = "h100-eight-ndr-one-roce"


def test_h100_host_has_nine_ports(tmp_path):
    facts = collect_rdma(plant(TREE, tmp_path))
    assert [device.name for device in facts.devices] == [f"mlx5_{n}" for n in (0, 1, 3, 4, 5, 6, 9, 10, 11)]
    ports = {device.name: device.ports[0] for device in facts.devices}
    ndr = [name for name, port in ports.items() if port.rate == 400.0]
    assert ndr == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    assert all(ports[name].state == "ACTIVE" and ports[name].link_layer == "InfiniBand" for name in ndr)
    assert (ports["mlx5_5"].state, ports["mlx5_5"].physical_state, ports["mlx5_5"].rate) == ("DOWN", "Disabled", 10.0)
    assert ports["mlx5_0"].lid == 0x1A
    assert facts.peer_memory == ("nvidia_peermem",)
    assert (facts.dma_buf, facts.hidden) == (True, ())


def test_infiniband_device(tmp_path):
    device = collect_rdma(plant(TREE, tmp_path)).named("mlx5_10")
    assert (device.board, device.firmware, device.driver) == ("MT_0000000838", "28.39.2048", "mlx5_core")
    assert (device.pci, device.numa_node, device.interfaces) == ("0000:ba:00.0", 1, ("ibp186s0",))
    assert device.has_uverbs is True
    assert device.ports[0].gids == (Gid(0, "fe80:0000:0000:0000:a088:c203:0006:8c1e", "IB"),)


def test_roce_device(tmp_path):
    device = collect_rdma(plant(TREE, tmp_path)).named("mlx5_1")
    port = device.ports[0]
    assert (port.link_layer, port.rate, port.lid) == ("Ethernet", 100.0, 0)
    mapped = "0000:0000:0000:0000:0000:ffff:0a0b:0c15"
    assert port.gids[2:] == (
        Gid(2, mapped, "RoCE v1", "ens6f0np0"),
        Gid(3, mapped, "RoCE v2", "ens6f0np0"),
    )
    assert len(port.gids) == 4
    assert device.interfaces == ("ens6f0np0",)


def test_error_counters_without_traffic(tmp_path):
    port = collect_rdma(plant(TREE, tmp_path)).named("mlx5_3").ports[0]
    counters = {counter.name: counter.value for counter in port.counters}
    assert counters["symbol_error"] == 41827
    assert counters["link_downed"] == 3
    assert counters["packet_seq_err"] == 12
    assert counters["VL15_dropped"] == 0
    assert not {"port_rcv_data", "port_xmit_data", "lifespan"} & set(counters)
    assert Counter("local_ack_timeout_err", 9) in port.counters


def test_container_without_device_files(tmp_path):
    machine = plant(TREE, tmp_path)
    for node in (tmp_path / "dev/infiniband").iterdir():
        node.unlink()
    assert [device.has_uverbs for device in collect_rdma(machine).devices] == [False] * 9


def test_device_files_of_a_shared_function_belong_to_one_device(tmp_path):
    machine = plant(TREE, tmp_path)
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").write_text("mlx5_77\n")
    devices = collect_rdma(machine)
    assert devices.named("mlx5_0").has_uverbs is False
    assert devices.named("mlx5_3").has_uverbs is True


def test_no_device_is_absent(tmp_path):
    machine = machine_at(tmp_path)
    (tmp_path / "sys/class").mkdir()
    with pytest.raises(NotPresent):
        collect_rdma(machine)
    (tmp_path / "sys/class/infiniband").mkdir()
    with pytest.raises(NotPresent):
        collect_rdma(machine)


def test_no_sysfs_is_not_visible(tmp_path):
    with pytest.raises(NotVisible):
        collect_rdma(machine_at(tmp_path))


def test_folders_in_the_place_of_files_are_survived(tmp_path):
    machine = plant(TREE, tmp_path)
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "dev":
            path.unlink()
            path.mkdir()
    facts = collect_rdma(machine)
    assert len(facts.devices) == 9
    assert facts.devices[0].ports[0].counters == ()


@pytest.mark.parametrize("garbage", ["", "\x00\xff", "4:", "Gb/sec", "9" * 400, "0x"])
def test_garbage_in_any_file_is_survived(tmp_path, garbage):
    machine = plant(TREE, tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_text(garbage)
    facts = collect_rdma(machine)
    assert len(facts.devices) == 9
    assert facts.dma_buf is None
    assert all(port.rate is None and port.lid is None for device in facts.devices for port in device.ports)


@pytest.mark.parametrize(
    ("release", "able"), [("5.4.0-150-generic", False), ("5.12.0", True), ("6.8.0", True), ("x", None)]
)
def test_dma_buf_by_release(tmp_path, release, able):
    machine = plant(TREE, tmp_path)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(release)
    assert collect_rdma(machine).dma_buf is able


def test_peer_memory_that_cannot_be_seen_is_hidden(tmp_path):
    machine = plant(TREE, tmp_path)
    (tmp_path / "proc/modules").unlink()
    facts = collect_rdma(machine)
    assert facts.peer_memory == ()
    assert facts.why_hidden("peer_memory") is not None


def test_verbs_library_is_found_as_the_loader_would(tmp_path):
    machine = plant(TREE, tmp_path, environ={"LD_LIBRARY_PATH": "/opt/rdma/lib:"})
    assert collect_rdma(machine).verbs_library is False
    named = put_parent(tmp_path / "opt/rdma/lib/libibverbs.so.1")
    named.write_text("")
    assert collect_rdma(machine).verbs_library is True
    named.unlink()
    put_parent(tmp_path / "opt/odd/libibverbs.so.1").write_text("")
    (tmp_path / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0/opt/odd/libibverbs.so.1\0")
    assert collect_rdma(machine).verbs_library is True
