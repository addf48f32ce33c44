"""Packages, torch and NCCL libraries, against real files, compiled libraries and the real dynamic loader."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.nccl.libraries import NcclSearch, nccl_release
from doctor.collectors.software.dynamic_loader import DynamicLoader, read_cache
from doctor.collectors.software.elf import ElfError, exported_symbols, machine_of, read_library
from doctor.collectors.software.packages import find_distributions, requirements_of
from doctor.collectors.software.python_environment import collect_software
from doctor.collectors.software.torch_build import TorchFiles, find_torch, read_torch_build
from doctor.core.facts import NcclLibrary, Package, Requirement, SoftwareFacts, TorchBuild
from tests.lab.nvml import compiler
from tests.lab.speed import patience

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


# ---- distributions ----


def install(site: Path, name: str, version: str, *lines: str, kind: str = "dist-info") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.{kind}"
    folder.mkdir(parents=True)
    headers = (f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *lines)
    (folder / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
        "\n".join(headers) + "\n\nRequires-Dist: no\n"
    )


def test_only_packages_that_matter_and_the_first_of_two(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "torch", "2.8.0+cu128")
    install(first, "nvidia-nccl-cu12", "2.27.3")
    install(first, "requests", "2.32.0")
    install(second, "torch", "2.4.0")
    install(second, "Megatron.Core", "0.9.0")
    install(second, "apex", "0.1", kind="egg-info")
    found = find_distributions([str(first), str(second), str(first)])
    assert {name: one.version for name, one in found.items()} == {
        "torch": "2.8.0+cu128",
        "nvidia-nccl-cu12": "2.27.3",
        "megatron-core": "0.9.0",
        "apex": "0.1",
    }
    assert found["torch"].location == first


def test_leftovers_and_rubbish_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "~orch-2.1.0.dist-info").mkdir()
    (tmp_path / "torch-2.1.0.dist-info").mkdir()  # no METADATA: an interrupted uninstall
    (tmp_path / "lightning-2.5.0.dist-info").mkdir()
    (tmp_path / "lightning-2.5.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00Requires-Dist: torch\n")
    (tmp_path / "triton.dist-info").write_text("Name: triton\n")  # no version anywhere
    (tmp_path / "ray-.dist-info").mkdir()
    found = find_distributions([str(tmp_path), str(tmp_path / "gone"), "/dev/null"])
    assert {name: one.version for name, one in found.items()} == {"lightning": "2.5.0"}
    assert list(requirements_of(found["lightning"], ("torch",))) == []


def test_editable_install_without_a_version_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.1+git\n")
    assert find_distributions([str(tmp_path)])["deepspeed"].version == "0.15.1+git"


def test_requirements_that_hold_here(tmp_path: Path) -> None:
    install(
        tmp_path,
        "lightning",
        "2.5.0",
        "Requires-Dist: torch<4.0,>=2.1.0",
        "Requires-Dist: torchmetrics<3.0,>=0.7.0",
        "Requires-Dist: torch==1.0; platform_system == 'Plan9'",
        "Requires-Dist: torchvision>=0.16; extra == 'examples'",
        "Requires-Dist: torch ==> broken",
    )
    found = list(requirements_of(find_distributions([str(tmp_path)])["lightning"], ("torch",)))
    assert found == [
        Requirement("lightning", "torch", "<4.0,>=2.1.0"),
        Requirement("lightning", "torchmetrics", "<3.0,>=0.7.0"),
    ]


def test_the_environment_of_this_very_process() -> None:
    facts = collect_software(Machine())
    assert (facts.python, facts.prefix) == (platform.python_version(), sys.prefix)
    import msgspec

    assert facts.version("msgspec") == msgspec.__version__
    assert "nvidia-ml-py" in {package.name for package in facts.packages}


def test_torch_is_described_without_being_imported() -> None:
    pytest.importorskip("torch")
    program = (
        "import sys\n"
        "from doctor.collectors.base import Machine\n"
        "from doctor.collectors.software.python_environment import collect_software\n"
        "facts = collect_software(Machine())\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
        "import torch\n"
        "assert facts.torch.version == torch.__version__, facts.torch\n"
        "assert facts.torch.cuda == torch.version.cuda\n"
        "import torch.distributed as dist\n"
        "assert ('gloo' in facts.torch.backends) == dist.is_gloo_available()\n"
        "assert ('nccl' in facts.torch.backends) == dist.is_nccl_available()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=patience(100)
    )


# ---- torch trees, compiled ----


@dataclass
class Tree:
    """A site-packages folder with a torch of the layout of the CUDA wheels, and NCCLs to load."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        return self.root / "site"

    def compile(self, path: Path, text: str = "", *options: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = path.parent / f".{path.name}.c"
        source.write_text(f'const char *const text_of_{len(text)} = "{text}";\n' if text else "int nothing;\n")
        subprocess.run(
            [str(compiler()), "-shared", "-fPIC", "-o", path, source, *options], check=True, timeout=patience(60)
        )
        return path

    def nccl(self, folder: str, release: str) -> Path:
        text = f"NCCL version {release}+cuda12.8"
        return self.compile(self.root / folder / "libnccl.so.2", text, "-Wl,-soname,libnccl.so.2")

    def torch(self, *options: str, init: str = "", arch: str = "sm_80 sm_90") -> TorchFiles:
        package = self.site / "torch"
        (package / "lib").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(init)
        (package / "version.py").write_text(
            "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
        )
        self.compile(package / "lib/libtorch_python.so", f"ipc_h\\0{arch}\\0/pytorch")
        self.compile(package / "lib/libtorch_cpu.so")
        self.compile(package / "lib/libtorch_cuda.so", "", *options)
        return TorchFiles(package)

    def search(self, *, paths: tuple[str, ...] = ("site",), maps: str = "") -> NcclSearch:
        sites = [str(self.root / path) for path in paths]
        loader = DynamicLoader(self.environ, self.root / "etc")
        return NcclSearch(loader, find_torch(sites), sites, find_distributions(sites), maps)

    def really_loaded(self, program: str) -> str | None:
        """The libnccl that a real process has mapped after ``program``."""
        tail = "\nprint(next((l.split()[-1] for l in open('/proc/self/maps') if 'libnccl.so' in l), ''))"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("LD_")}
        environ = {**clean, **self.environ, "PYTHONPATH": str(self.site)}
        done = subprocess.run(
            [sys.executable, "-c", program + tail],
            env=environ,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip() or None


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    if compiler() is None:
        pytest.skip("no C compiler")
    return Tree(tmp_path)


def linked(tag: str, *directories: str) -> list[str]:
    """Options that link to libnccl with DT_RPATH (``disable-new-dtags``) or DT_RUNPATH (``enable-new-dtags``)."""
    paths = ":".join(directories)
    return ["-Wl,--no-as-needed", f"-Wl,--{tag}", *([f"-Wl,-rpath,{paths}"] if paths else [])]


WHEEL = "$ORIGIN/../../nvidia/nccl/lib"


SEARCHES = [
    (tag, directories, library_path, preload)
    for tag in ("disable-new-dtags", "enable-new-dtags")
    for directories in ((WHEEL,), ("$ORIGIN/nothing", "${ORIGIN}/../../nvidia/nccl/lib"), ())
    for library_path in (None, "{root}/other", "{root}/empty:{root}/other")
    for preload in (None, "{root}/preload/libnccl.so.2")
    if directories or library_path or preload  # without any of them it depends on the NCCL of this machine
]


@pytest.mark.parametrize(("tag", "directories", "library_path", "preload"), SEARCHES)
def test_chosen_is_what_the_real_loader_takes(
    tree: Tree, tag: str, directories: tuple[str, ...], library_path: str | None, preload: str | None
) -> None:
    wheel = tree.nccl("site/nvidia/nccl/lib", "2.27.3")
    tree.nccl("other", "2.18.1")
    tree.nccl("preload", "2.99.1")
    torch = tree.torch(*linked(tag, *directories), str(wheel))
    if library_path:
        tree.environ["LD_LIBRARY_PATH"] = library_path.format(root=tree.root)
    if preload:
        tree.environ["LD_PRELOAD"] = preload.format(root=tree.root)
    library = torch.library_folder / "libtorch_cuda.so"
    loaded = tree.really_loaded(f"import ctypes; ctypes.CDLL({str(library)!r})")
    search = tree.search()
    assert loaded is not None
    assert str((search.chosen() or Path()).resolve()) == str(Path(loaded).resolve())
    chosen = [one for one in search.libraries() if one.chosen]
    assert [one.version for one in chosen] == [nccl_release(Path(loaded))]


PRELOADING = """
import ctypes, glob, os, sys
def _preload_cuda_deps(err=None):
    libraries = [("cublas", "libcublas.so.*[0-9]"), ("nccl", "libnccl.so.*[0-9]")]
    for folder, name in libraries:
        found = [hit for path in sys.path for hit in glob.glob(os.path.join(path, "nvidia", folder, "lib", name))]
        if not found:
            raise ValueError(name)
        ctypes.CDLL(found[0])
here = os.path.join(os.path.dirname(__file__), "lib")
try:
    ctypes.CDLL(os.path.join(here, "libtorch_global_deps.so"))
    try:
        {always}
    except ValueError:
        pass
except OSError as err:
    _preload_cuda_deps(err)
ctypes.CDLL(os.path.join(here, "libtorch_cuda.so"))
"""


@pytest.mark.parametrize("always", ["_preload_cuda_deps()", "pass"])
@pytest.mark.parametrize(
    ("runtime_found", "complete"),
    [(True, True), (True, False), (False, True)],  # with neither, such a torch can't be imported
)
def test_library_that_torch_loads_by_itself(tree: Tree, always: str, runtime_found: bool, complete: bool) -> None:
    own = tree.nccl("site/nvidia/nccl/lib", "2.27.3")
    first = tree.nccl("early/nvidia/nccl/lib", "2.30.7")
    tree.environ["LD_LIBRARY_PATH"] = str(tree.root / "early/nvidia/nccl/lib")
    runtime = tree.compile(tree.root / "cuda/libcudart.so.12", "", "-Wl,-soname,libcudart.so.12")
    if complete:
        tree.compile(tree.site / "nvidia/cublas/lib/libcublas.so.12")
    init = PRELOADING.format(always=f"\n        {always}\n".strip())
    tree.torch(*linked("disable-new-dtags", WHEEL), str(own), init=init)
    path = "$ORIGIN/../../../cuda" if runtime_found else "$ORIGIN/gone"
    tree.compile(tree.site / "torch/lib/libtorch_global_deps.so", "", *linked("disable-new-dtags", path), str(runtime))
    paths = (str(tree.root / "early"), str(tree.site))
    program = f"import sys; sys.path[:0] = {list(paths)}; import torch"
    loaded = tree.really_loaded(program)
    expected = first if complete and (always != "pass" or not runtime_found) else own
    assert loaded == str(expected)
    chosen = tree.search(paths=("early", "site")).chosen()
    assert chosen is not None
    assert str(chosen.resolve()) == loaded


def test_all_libraries_are_listed_with_origin_and_version(tree: Tree) -> None:
    wheel = tree.nccl("site/nvidia/nccl/lib", "2.27.3")
    install(tree.site, "nvidia-nccl-cu12", "2.27.3")
    tree.torch(*linked("disable-new-dtags", WHEEL), str(wheel))
    numbered = tree.nccl("modules", "0.0.0").rename(tree.root / "modules/libnccl.so.2.18.5")
    (tree.root / "modules/libnccl.so.2").symlink_to(numbered.name)
    (tree.root / "again").symlink_to(tree.root / "modules")
    tree.environ["LD_LIBRARY_PATH"] = f"{tree.root}/modules:{tree.root}/again"
    listed = [one for one in tree.search().libraries() if str(tree.root) in one.path]
    assert listed == [
        NcclLibrary(f"{tree.root}/modules/libnccl.so.2", "2.18.5", "LD_LIBRARY_PATH"),
        NcclLibrary(str(wheel), "2.27.3", "wheel nvidia-nccl-cu12", chosen=True),
    ]


def test_two_wheels_in_one_place_are_told_apart_by_the_file(tree: Tree) -> None:
    wheel = tree.nccl("site/nvidia/nccl/lib", "2.21.5")
    install(tree.site, "nvidia-nccl-cu12", "2.27.3")
    install(tree.site, "nvidia-nccl-cu11", "2.21.5")
    tree.torch(*linked("disable-new-dtags", WHEEL), str(wheel))
    (library,) = [one for one in tree.search().libraries() if one.chosen]
    assert library.version == "2.21.5"
    assert "nvidia-nccl-cu11" in library.origin
    assert "nvidia-nccl-cu12" in library.origin


def test_nccl_that_is_built_into_torch(tree: Tree) -> None:
    torch = tree.torch()
    tree.compile(torch.library_folder / "libtorch_cuda.so", "NCCL version 2.19.4+cuda12.3")
    tree.nccl("other", "2.18.1")
    tree.environ["LD_LIBRARY_PATH"] = str(tree.root / "other")
    libraries = tree.search().libraries()
    assert [(one.version, one.origin) for one in libraries if one.chosen] == [("2.19.4", "torch")]
    assert ("2.18.1", False) in [(one.version, one.chosen) for one in libraries]


def test_nothing_is_chosen_where_torch_shows_no_nccl(tree: Tree) -> None:
    tree.torch()
    tree.nccl("other", "2.18.1")
    tree.environ["LD_LIBRARY_PATH"] = str(tree.root / "other")
    assert not any(one.chosen for one in tree.search().libraries())


def test_library_that_is_loaded_already_is_the_chosen_one(tree: Tree) -> None:
    wheel = tree.nccl("site/nvidia/nccl/lib", "2.27.3")
    other = tree.nccl("other", "2.18.1")
    tree.torch(*linked("disable-new-dtags", WHEEL), str(wheel))
    maps = f"7f00-7f01 r-xp 00000000 fd:00 12   {other}\n7f02-7f03 r--p 00000000 fd:00 12   {other}\n"
    search = tree.search(maps=maps)
    assert search.chosen() == other
    assert [one.version for one in search.libraries() if one.chosen] == ["2.18.1"]


def test_torch_build_from_its_files(tree: Tree) -> None:
    torch = tree.torch()
    install(tree.site, "torch", "2.8.0", 'Requires-Dist: nvidia-nccl-cu12==2.27.3; platform_system == "Linux"')
    build = read_torch_build(torch, find_distributions([str(tree.site)])["torch"])
    assert build == TorchBuild("2.8.0+cu128", "12.8", None, "2.27.3", ("gloo", "nccl"), ("sm_80", "sm_90"))


def test_one_architecture_alone(tree: Tree) -> None:
    build = read_torch_build(tree.torch(arch="sm_90a"), None)
    assert build is not None
    assert build.architectures == ("sm_90a",)


def test_damaged_torch_still_has_its_version(tree: Tree) -> None:
    torch = tree.torch()
    for name in ("libtorch_cuda.so", "libtorch_python.so"):
        whole = (torch.library_folder / name).read_bytes()
        (torch.library_folder / name).write_bytes(whole[: len(whole) // 2])
    build = read_torch_build(torch, None)
    assert build is not None
    assert (build.version, build.nccl, build.architectures) == ("2.8.0+cu128", None, None)
    assert tree.search().libraries() is not None


def test_version_file_that_is_code_is_not_run(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(1)\n")
    (package / "version.py").write_text("raise SystemExit(2)\n__version__ = compute()\n")
    torch = find_torch([str(tmp_path)])
    assert torch is not None
    assert read_torch_build(torch, None) is None


def test_no_torch(tmp_path: Path) -> None:
    assert find_torch([str(tmp_path)]) is None


# ---- ELF and the loader's cache ----


@needs_compiler
def test_elf_of_a_real_library(tree: Tree) -> None:
    path = tree.nccl("lib", "2.27.3")
    library = read_library(path)
    assert library.soname == "libnccl.so.2"
    assert read_library(Path(sys.executable).resolve()).needed
    assert library.machine == machine_of(Path(sys.executable))
    assert exported_symbols(path, re.compile(rb"text_of_.*")) == ("text_of_28",)


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_cut_elf_is_refused_or_read_but_never_breaks(tree: Tree, share: float) -> None:
    whole = tree.nccl("lib", "2.27.3").read_bytes()
    cut = tree.root / "cut.so"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with contextlib.suppress(ElfError):
        read_library(cut)
    assert nccl_release(cut) in (None, "2.27.3")


@needs_compiler
def test_damaged_elf_raises_nothing_but_its_own_error(tree: Tree) -> None:
    dice = random.Random(7)
    whole = tree.nccl("lib", "2.27.3").read_bytes()
    damaged = tree.root / "damaged.so"
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(20):
            # The header, the program headers and the section headers hold the numbers that can lead astray.
            place = dice.choice((dice.randrange(16, 700), dice.randrange(len(data) - 2000, len(data))))
            data[place] = dice.randrange(256)
        damaged.write_bytes(data)
        nccl_release(damaged)
        try:
            read_library(damaged)
        except ElfError:
            refused += 1
    assert refused > 0


def test_text_file_and_missing_file_are_no_library(tmp_path: Path) -> None:
    text = tmp_path / "libx.so"
    text.write_text("INPUT(libnccl.so.2)\n" * 10)
    with pytest.raises(ElfError):
        read_library(text)
    with pytest.raises(OSError):
        read_library(tmp_path / "gone.so")
    assert machine_of(text) is None


@needs_compiler
@pytest.mark.skipif(shutil.which("ldconfig", path="/sbin:/usr/sbin") is None, reason="no ldconfig")
def test_cache_of_the_real_ldconfig(tree: Tree) -> None:
    library = tree.nccl("system", "2.25.1")
    etc = tree.root / "etc"
    etc.mkdir()
    (etc / "ld.so.conf").write_text(f"{tree.root / 'system'}\n")
    program = str(shutil.which("ldconfig", path="/sbin:/usr/sbin"))
    subprocess.run(
        [program, "-X", "-C", etc / "ld.so.cache", "-f", etc / "ld.so.conf"], check=True, timeout=patience(60)
    )
    assert read_cache(etc / "ld.so.cache")[b"libnccl.so.2"] == [bytes(library)]
    assert DynamicLoader({}, etc).find("libnccl.so.2") == library
    tree.torch(*linked("enable-new-dtags"), str(library))
    assert [(one.version, one.origin) for one in tree.search().libraries() if one.chosen] == [("2.25.1", "system")]


def test_cache_that_is_cut_or_rubbish(tmp_path: Path) -> None:
    cache = tmp_path / "ld.so.cache"
    assert read_cache(cache) == {}
    cache.write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 10)
    assert read_cache(cache) == {}
    cache.write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 200)
    assert read_cache(cache) is not None


def test_library_of_another_machine_is_passed_over(tree: Tree) -> None:
    other = tree.nccl("other", "2.18.1")
    data = bytearray(other.read_bytes())
    data[18] ^= 0xFF  # e_machine
    other.write_bytes(data)
    good = tree.nccl("good", "2.19.1")
    loader = DynamicLoader({"LD_LIBRARY_PATH": f"{other.parent};{good.parent}"}, tree.root)
    assert loader.find("libnccl.so.2") == good


def test_collector_as_the_runner_calls_it() -> None:
    facts = collect_software(Machine())
    assert isinstance(facts, SoftwareFacts)
    assert Package("nvidia-ml-py", facts.version("nvidia-ml-py") or "") in facts.packages
    assert hash(facts) is not None


def test_preloads_that_are_not_there(tree: Tree) -> None:
    there = tree.nccl("preload", "2.27.3")
    tree.environ["LD_PRELOAD"] = f"{there} /nowhere/libnccl.so:libabsent.so.1 /usr/$LIB/libjemalloc.so.2"
    assert tree.search().loader.preloads_missing == ("/nowhere/libnccl.so", "libabsent.so.1")
