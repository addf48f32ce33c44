"""Settings of NCCL, Gloo, torch and the launch that a process carries by mistake."""

from __future__ import annotations

from tests.faults.scenes import CUDA, HEALTHY, Scene, allocation_environ, alone

NETWORK = ("net", "mount", "uts")
"""Namespaces of a host with a network and a name of its own."""

NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"
"""Without it every interface that is up has a link-local address, which NCCL takes."""

CPU_213 = ("torch==2.13.0",)
LIGHTNING = (*CPU_213, "lightning==2.5.0", "pytorch-lightning==2.5.0")


def interface(name: str, address: str = "", up: bool = True) -> str:
    """An interface with another end that nobody listens on: a cable into a switch."""
    lines = [f"ip link add {name} type veth peer name p{name}", f"ip link set p{name} up"]
    lines += [f"ip addr add {address} dev {name}"] if address else []
    return "; ".join([*lines, f"ip link set {name} {'up' if up else 'down'}"])


def setting(**environ: str) -> dict[str, str]:
    """A process that talks to itself: rank 0 of 1."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **environ}


VALUES = (
    Scene(
        "a word where NCCL reads a number",
        "NCCL002",
        alone(NCCL_IB_DISABLE="true"),
        alone(NCCL_IB_DISABLE="1"),
        says=("NCCL_IB_DISABLE",),
    ),
    Scene(
        "a level that does not exist",
        "NCCL002",
        alone(NCCL_P2P_LEVEL="NVLINK"),
        alone(NCCL_P2P_LEVEL="NVL"),
        says=("NCCL_P2P_LEVEL",),
    ),
    Scene(
        "an algorithm that does not exist",
        "NCCL002",
        alone(NCCL_ALGO="Rings"),
        alone(NCCL_ALGO="Ring,Tree"),
        says=("NCCL_ALGO",),
    ),
    Scene(
        "a wrong value in the file of NCCL_CONF_FILE",
        "NCCL002",
        alone(setup="printf 'NCCL_IB_TIMEOUT=22\\nNCCL_IB_DISABLE=yes\\n' > conf", NCCL_CONF_FILE="conf"),
        alone(setup="printf 'NCCL_IB_TIMEOUT=22\\nNCCL_IB_DISABLE=1\\n' > conf", NCCL_CONF_FILE="conf"),
        says=("NCCL_IB_DISABLE", "conf", "2"),
    ),
    Scene(
        "settings from a file of the user",
        "NCCL005",
        alone(setup="echo NCCL_IB_TIMEOUT=22 > ~/.nccl.conf"),
        HEALTHY,
        severity="info",
        says=(".nccl.conf",),
    ),
    Scene(
        "a variable that is no longer read",
        "NCCL004",
        alone(NCCL_IB_GDR_LEVEL="3"),
        alone(NCCL_NET_GDR_LEVEL="PHB"),
        severity="warning",
        says=("NCCL_NET_GDR_LEVEL",),
    ),
    Scene(
        "a variable of torch by its old name",
        "NCCL004",
        alone(NCCL_ASYNC_ERROR_HANDLING="1"),
        alone(TORCH_NCCL_ASYNC_ERROR_HANDLING="3"),
        severity="info",
        says=("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Scene(
        "a variable that nothing reads",
        "NCCL001",
        alone(NCCL_MY_PLUGIN_TUNING="1"),
        HEALTHY,
        severity="info",
    ),
    Scene(
        "TORCH_DISTRIBUTED_DEBUG=DETAIL under a torch that it breaks",
        "NCCL007",
        alone(packages=CPU_213, **setting(TORCH_DISTRIBUTED_DEBUG="DETAIL")),
        alone(packages=CPU_213, **setting(TORCH_DISTRIBUTED_DEBUG="INFO")),
        says=("DETAIL",),
    ),
    Scene(
        "every call of NCCL traced",
        "NCCL007",
        alone(NCCL_DEBUG="TRACE", NCCL_DEBUG_SUBSYS="CALL"),
        alone(NCCL_DEBUG="WARN"),
        severity="info",
    ),
    Scene(
        "errors of NCCL not handled",
        "NCCL011",
        alone(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
        alone(TORCH_NCCL_ASYNC_ERROR_HANDLING="3"),
        severity="warning",
        says=("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Scene(
        "a topology file that is not there",
        "NCCL014",
        alone(NCCL_TOPO_FILE="/nonexistent/topology.xml"),
        alone(setup="echo '<system version=\"1\"></system>' > topology.xml", NCCL_TOPO_FILE="topology.xml"),
        severity="warning",
    ),
)

NAMES = (
    Scene(
        "NCCL's grammar in Gloo's variable",
        "NET011",
        alone(GLOO_SOCKET_IFNAME="^lo"),
        alone(GLOO_SOCKET_IFNAME="lo"),
        says=("^lo",),
    ),
    Scene(
        "Gloo's interface is not there",
        "NET007",
        alone(GLOO_SOCKET_IFNAME="ib7"),
        alone(GLOO_SOCKET_IFNAME="lo"),
        says=("GLOO_SOCKET_IFNAME",),
    ),
    Scene(
        "the selected interface is down",
        "NET008",
        alone(spaces=NETWORK, setup=interface("eth0", "10.7.0.1/24", up=False), NCCL_SOCKET_IFNAME="eth0"),
        alone(spaces=NETWORK, setup=interface("eth0", "10.7.0.1/24"), NCCL_SOCKET_IFNAME="eth0"),
        says=("eth0",),
    ),
    Scene(
        "the selected interface has no address",
        "NET008",
        alone(spaces=NETWORK, setup=f"{NO_IPV6}; {interface('eth0')}", NCCL_SOCKET_IFNAME="eth0"),
        alone(spaces=NETWORK, setup=interface("eth0", "10.7.0.1/24"), NCCL_SOCKET_IFNAME="eth0"),
        says=("eth0",),
    ),
    Scene(
        "MASTER_ADDR without an address",
        "NET004",
        alone(spaces=NETWORK, setup=interface("eth0", "10.7.0.1/24"), **setting(MASTER_ADDR="node0.nowhere.invalid")),
        alone(spaces=NETWORK, setup=interface("eth0", "10.7.0.1/24"), **setting(MASTER_ADDR="10.7.0.1")),
        says=("node0.nowhere.invalid",),
    ),
    Scene(
        "the host's own name without an address",
        "NET001",
        alone(spaces=NETWORK, setup="hostname nameless.invalid"),
        alone(
            spaces=NETWORK,
            setup=f"{interface('eth0', '10.7.0.1/24')}; hostname named; echo '10.7.0.1 named' > h; "
            "mount --bind h /etc/hosts",
        ),
        severity="info",
        hosts=("nameless.invalid",),
    ),
)

LAUNCH = (
    *(
        Scene(
            f"MASTER_PORT={port}",
            "ENV007",
            alone(**setting(MASTER_PORT=port)),
            alone(**setting(MASTER_PORT="23456")),
            says=(port,),
        )
        for port in ("0", "99999", "abc")
    ),
    Scene("RANK without WORLD_SIZE", "ENV001", alone(RANK="0"), alone(**setting()), says=("WORLD_SIZE",)),
    Scene(
        "RANK that no shell expanded",
        "ENV001",
        alone(**setting(RANK="$SLURM_PROCID")),
        alone(**setting()),
        says=("$SLURM_PROCID",),
    ),
    Scene("LOCAL_RANK of an earlier run", "ENV009", alone(LOCAL_RANK="1"), HEALTHY, says=("LOCAL_RANK",)),
    Scene("NODE_RANK of another job", "ENV009", alone(NODE_RANK="2"), alone(NODE_RANK="0"), says=("NODE_RANK",)),
    Scene(
        "python under salloc, which Lightning takes for a task",
        "ENV014",
        alone(**allocation_environ(4, 4)),
        alone(**{**allocation_environ(4, 4), "SLURM_JOB_NAME": "interactive"}),
        says=("srun",),
    ),
    Scene(
        "more devices than tasks a node",
        "ENV010",
        alone(**allocation_environ(1, 1), SLURM_PROCID="0", PL_TRAINER_DEVICES="8"),
        alone(**allocation_environ(1, 1), SLURM_PROCID="0", PL_TRAINER_DEVICES="1"),
        says=("devices=8",),
    ),
)

DUMPS = {
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "dumps/rank_",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}

SURROUNDINGS = (
    Scene(
        "a folder for dumps that is not there",
        "HOST004",
        alone(**{**DUMPS, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/nonexistent/dumps/rank_"}),
        alone(setup="mkdir dumps", **DUMPS),
        says=("/nonexistent/dumps",),
        also=("NCCL011",),
    ),
    Scene(
        "a lock that a killed build left",
        "HOST008",
        alone(
            setup="L=~/.cache/torch_extensions/py311_cpu/fused; mkdir -p $L; touch -d '2 days ago' $L/lock",
            packages=CPU_213,
        ),
        alone(setup="mkdir -p ~/.cache/torch_extensions/py311_cpu/fused", packages=CPU_213),
    ),
    Scene(
        "two Lightnings of different releases",
        "VER005",
        alone(packages=(*CPU_213, "lightning==2.5.0", "pytorch-lightning==1.9.5")),
        alone(packages=LIGHTNING),
        severity="warning",
        says=("1.9.5", "2.5.0"),
    ),
    Scene(
        "a torch that Lightning does not take",
        "VER004",
        alone(packages=(*CPU_213, "lightning==2.1.0 torch<2.2,>=1.12", "pytorch-lightning==2.1.0")),
        alone(packages=("torch==2.1.2", "lightning==2.1.0 torch<2.2,>=1.12", "pytorch-lightning==2.1.0")),
        severity="warning",
        says=("2.13.0",),
    ),
    Scene(
        "LD_LIBRARY_PATH leads to an older NCCL",
        "NCCL010",
        alone(
            packages=CUDA,
            setup="python -m tests.faults.wheels old 2.18.5",
            shell="export LD_LIBRARY_PATH=$PWD/old",
        ),
        alone(packages=CUDA),
        says=("2.18.5", "2.27.3"),
    ),
    Scene(
        "a Trainer's argument that is gone",
        "VER006",
        alone(packages=LIGHTNING, PL_TRAINER_GPUS="2"),
        alone(packages=LIGHTNING, PL_TRAINER_DEVICES="2"),
        says=("gpus",),
    ),
)

SCENES = (*VALUES, *NAMES, *LAUNCH, *SURROUNDINGS)
