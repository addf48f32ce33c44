"""Kind of the container or virtual machine, and the image."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.collectors.base import Machine, read_pairs, read_text
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, INITIAL_UTS_NAMESPACE, is_initial
from doctor.collectors.storage.mounts import mount_of, read_mounts

_BY_VARIABLE = (
    ("KUBERNETES_SERVICE_HOST", "kubernetes"),
    ("APPTAINER_CONTAINER", "apptainer"),
    ("APPTAINER_NAME", "apptainer"),
    ("SINGULARITY_CONTAINER", "apptainer"),
    ("SINGULARITY_NAME", "apptainer"),
)
_BY_GROUP = (("kubepods", "kubernetes"), ("libpod", "podman"), ("/docker", "docker"), ("/lxc", "lxc"))
_BY_WORD = {
    "docker": "docker",
    "podman": "podman",
    "lxc": "lxc",
    "lxc-libvirt": "lxc",
    "apptainer": "apptainer",
    "singularity": "apptainer",
    "enroot": "enroot",
}
"""Values of the variable ``container`` that container managers set for the first process (interface of systemd)."""

_IMAGE_VARIABLES = (
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image",
    "SLURM_CONTAINER",
)

_BY_DMI = (
    ("qemu", "kvm"),
    ("kvm", "kvm"),
    ("amazon ec2", "nitro"),
    ("google compute engine", "google"),
    ("vmware", "vmware"),
    ("virtual machine", "hyper-v"),
    ("virtualbox", "virtualbox"),
    ("openstack", "kvm"),
    ("xen", "xen"),
    ("alibaba cloud", "kvm"),
)


def read_container(machine: Machine) -> str | None:
    """Return the kind of container, ``unknown`` if only its existence is known, ``None`` without any sign."""
    return next(_container_signs(machine), None)


def _container_signs(machine: Machine) -> Iterator[str]:
    root, proc = machine.etc.parent, machine.proc
    yield from (kind for variable, kind in _BY_VARIABLE if machine.environ.get(variable))
    # A machine that was booted from a container image keeps the mark; its namespaces are the initial ones.
    owns_machine = is_initial(proc, "pid", INITIAL_PID_NAMESPACE) and is_initial(proc, "uts", INITIAL_UTS_NAMESPACE)
    if (root / ".dockerenv").exists() and not owns_machine:
        yield "docker"
    if (root / "run" / ".containerenv").exists():
        yield "podman"
    # Enroot sets no variable, but the root file system is in its data folder or in that of Pyxis.
    mount = mount_of("/", read_mounts(machine))
    origin = "" if mount is None else f"{mount.root} {mount.options} {mount.source}"
    if "enroot" in origin or "pyxis" in origin:
        yield "enroot"
    groups = "\n".join(read_text(proc / one / "cgroup") or "" for one in ("1", "self"))
    yield from (kind for word, kind in _BY_GROUP if word in groups)
    entries = (read_text(proc / "1" / "environ") or "").split("\0")
    words = [entry.removeprefix("container=") for entry in entries if entry.startswith("container=")]
    words += [machine.environ.get("container", ""), read_text(root / "run" / "systemd" / "container") or ""]
    yield from (_BY_WORD.get(word, "unknown") for word in words if word)


def read_image(machine: Machine) -> str | None:
    """Return the image: a file or reference from the container manager, else product and build of the vendor."""
    environ = machine.environ
    named = next((environ[name] for name in _IMAGE_VARIABLES if environ.get(name)), None)
    podman = read_pairs(machine.etc.parent / "run" / ".containerenv", "=").get("image", "").strip('"')
    if named or podman:
        return named or podman
    # Images of NVIDIA have variables with the product, its version, and the number of the build.
    product = environ.get("NVIDIA_PRODUCT_NAME")
    version = environ.get(f"NVIDIA_{product.upper()}_VERSION") if product else None
    build = environ.get("NVIDIA_BUILD_ID")
    words = [product or "", version or "", f"build {build}" if build else ""]
    return " ".join(word for word in words if word) or None


def read_hypervisor(machine: Machine) -> str | None:
    """Return kvm, xen, hyper-v, vmware, nitro, google, virtualbox or ``unknown``; ``None`` on bare metal.

    x86 guests have the ``hypervisor`` flag (CPUID leaf 1); without it, as on ARM, only firmware tables and
    /sys/hypervisor show it, and vendors that also sell bare metal under the same name are ignored.
    """
    if (kind := read_text(machine.sys / "hypervisor" / "type")) is not None:
        return kind or "unknown"
    folder = machine.sys / "class" / "dmi" / "id"
    words = " ".join(read_text(folder / name) or "" for name in ("product_name", "sys_vendor", "bios_vendor")).lower()
    firmware = next((kind for word, kind in _BY_DMI if word in words), None)
    flags = read_pairs(machine.proc / "cpuinfo", ":", 1 << 16).get("flags")
    if flags is None:
        return firmware if firmware not in ("nitro", "google") else None
    return (firmware or "unknown") if "hypervisor" in flags.split() else None
