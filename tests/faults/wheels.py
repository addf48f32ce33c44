"""Packages as pip would leave them, as far as the doctor reads them: metadata, version files, shared libraries.

A package is ``name==version``, and may go on with what it requires: ``lightning==2.1.0 torch<2.2``.
``python -m tests.faults.wheels FOLDER VERSION`` puts a libnccl.so.2 into a folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab.nvml import compiler
from tests.lab.speed import patience


def install(folder: Path, packages: tuple[str, ...]) -> Path:
    """A folder for PYTHONPATH, below ``folder``, with ``packages`` in it."""
    site = folder / f"site-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"
    if not site.exists():
        site.mkdir()
        for package in packages:
            pinned, _, wanted = package.partition(" ")
            name, _, version = pinned.partition("==")
            _put_metadata(site, name, version, [wanted] if wanted else _requirements(name, packages))
            if name == "torch":
                _put_torch(site, version)
            elif name.startswith("nvidia-nccl-"):
                put_nccl(site / "nvidia/nccl/lib", version)
    return site


def _requirements(name: str, packages: tuple[str, ...]) -> list[str]:
    """A torch for CUDA asks for the very NCCL that it was built with."""
    return [package for package in packages if name == "torch" and package.startswith("nvidia-nccl-")]


def _put_metadata(site: Path, name: str, version: str, requirements: list[str]) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def _put_torch(site: Path, version: str) -> None:
    """torch's files; ``+cu128`` in its version makes it a build for CUDA 12.8 that is linked to libnccl."""
    package = site / "torch"
    (package / "lib").mkdir(parents=True)
    digits = version.partition("+cu")[2]
    cuda = f"{digits[:-1]}.{digits[-1]}" if digits else None
    (package / "__init__.py").write_text("raise RuntimeError('the doctor does not import torch')\n")
    (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = {cuda!r}\nhip = None\n")
    (package / "lib" / "libtorch_cpu.so").touch()
    if cuda:
        put_nccl(package / "stub", "2.0.0")
        # Absolute: the folder of the wheels is what torch's own libraries name relative to themselves.
        search = "-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"
        _compile(
            package / "lib" / "libtorch_cuda.so",
            "",
            f"-L{package / 'stub'}",
            search,
            "-Wl,--no-as-needed",
            "-l:libnccl.so.2",
        )
        _compile(package / "lib" / "libtorch_python.so", f'const char *list = "{_architectures(digits)}";')


def _architectures(digits: str) -> str:
    """What the wheels for a CUDA release were built for: ``torch.cuda.get_arch_list()`` of 1.7.1+cu102, 2.5.0+cu121 and
    2.8.0+cu128."""
    if digits.startswith("10"):
        return "sm_37 sm_50 sm_60 sm_70 sm_75"
    if int(digits) < 128:
        return f"sm_50 sm_60 sm_70 sm_75 sm_80 sm_86{' sm_90' if int(digits) >= 118 else ''}"
    return "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


def put_nccl(folder: Path, version: str) -> Path:
    """A libnccl.so.2 that calls itself ``version``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f'const char *version = "NCCL version {version}+cuda12.8";'
    return _compile(folder / "libnccl.so.2", text, "-Wl,-soname,libnccl.so.2")


def _compile(path: Path, text: str, *options: str) -> Path:
    if compiler() is None:
        raise FileNotFoundError("no C compiler for the libraries of the lab")
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write(text + "\n")
        source.flush()
        command = [str(compiler()), "-shared", "-fPIC", "-o", str(path), source.name, *options]
        subprocess.run(command, check=True, capture_output=True, timeout=patience(60))
    return path


if __name__ == "__main__":
    put_nccl(Path(sys.argv[1]), sys.argv[2])
