"""The Python environment of this process, from its files: only modules of the interpreter are imported."""

from __future__ import annotations

import platform
import sys

from doctor.collectors.base import Machine, collector
from doctor.collectors.nccl.libraries import NcclSearch, read_maps
from doctor.collectors.software.dynamic_loader import DynamicLoader
from doctor.collectors.software.packages import find_distributions, requirements_of
from doctor.collectors.software.torch_build import find_torch, read_torch_build
from doctor.core.facts import Package, SoftwareFacts

BOUND_TO_TORCH = (
    "lightning",
    "pytorch-lightning",
    "lightning-fabric",
    "torchmetrics",
    "torchvision",
    "torchaudio",
    "accelerate",
)
"""Distributions whose requirement on torch is read."""


@collector(SoftwareFacts, deadline=10.0)
def collect_software(machine: Machine) -> SoftwareFacts:
    """Collect packages, torch and NCCL libraries as the interpreter of this process would find them."""
    paths = list(sys.path)
    distributions = find_distributions(paths)
    torch = find_torch(paths)
    loader = DynamicLoader(machine.environ, machine.etc)
    search = NcclSearch(
        loader=loader,
        torch=torch,
        paths=paths,
        distributions=distributions,
        maps=read_maps(machine.proc),
    )
    bound = [distributions[name] for name in BOUND_TO_TORCH if name in distributions]
    of_torch = [distributions["torch"]] if "torch" in distributions else []
    requirements = [one for package in bound for one in requirements_of(package, ("torch",)) if one.requires == "torch"]
    requirements += [one for package in of_torch for one in requirements_of(package, ("nvidia-nccl",))]
    return SoftwareFacts(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        prefix=sys.prefix,
        packages=tuple(Package(one.name, one.version) for _, one in sorted(distributions.items())),
        requirements=tuple(requirements),
        torch=read_torch_build(torch, distributions.get("torch")) if torch else None,
        nccl_libraries=search.libraries(),
        preloads_missing=loader.preloads_missing,
    )
