"""Installed distributions by the names of their metadata folders; the metadata itself is read for few of them.

``importlib.metadata`` would open a file for each of the several hundred distributions of a training image, on a network
mount and on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from doctor.collectors.base import listed, read_text
from doctor.core.facts import Requirement
from doctor.core.text import lazy_compile

NAMES = frozenset(
    {
        "accelerate",
        "apex",
        "axolotl",
        "bitsandbytes",
        "colossalai",
        "composer",
        "datasets",
        "deepspeed",
        "fairscale",
        "flash-attn",
        "horovod",
        "hydra-core",
        "lightning",
        "lightning-fabric",
        "lightning-utilities",
        "litgpt",
        "llamafactory",
        "megatron-core",
        "mosaicml-streaming",
        "mpi4py",
        "msgspec",
        "nemo-toolkit",
        "numpy",
        "nvidia-ml-py",
        "peft",
        "psutil",
        "pynvml",
        "pytorch-lightning",
        "pytorch-triton",
        "rankdoctor",
        "ray",
        "sglang",
        "torch",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "torchtitan",
        "torchvision",
        "transformer-engine",
        "transformers",
        "triton",
        "trl",
        "vllm",
        "webdataset",
        "xformers",
    }
)
"""Distributions that can be relevant to a distributed training run."""

PREFIXES = ("nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn", "nvidia-nvshmem", "nvidia-cublas")

_BEYOND_NAME = lazy_compile(r"[^\w.-]")
_OF_AN_EXTRA = lazy_compile(r"""; *extra *== *(["'])[^"']+\1 *$""")
"""The whole marker of most requirements; parsing one takes a quarter of a millisecond."""
_METADATA_LIMIT = 1 << 18
_FOLDER = lazy_compile(r"(?P<name>[^-]+)-(?P<version>[0-9][^-]*)(?:-.*)?\.(?:dist|egg)-info")


class Distribution(msgspec.Struct, frozen=True):
    """An installed distribution: its normalized name, its version, and the folder or file with its metadata."""

    name: str
    version: str
    metadata: Path

    @property
    def location(self) -> Path:
        """The entry of sys.path that contains it."""
        return self.metadata.parent

    def text(self) -> str:
        """Return the headers of its METADATA or PKG-INFO; empty if unreadable."""
        return _metadata_text(self.metadata)


def normalized(name: str) -> str:
    """Return the name of a distribution as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_distributions(paths: Iterable[str]) -> dict[str, Distribution]:
    """Return the relevant distributions on a sys.path; of several with one name the first, as in Python."""
    found: dict[str, Distribution] = {}
    for path in dict.fromkeys(paths):
        folder = Path(path or ".")
        for entry in listed(folder):
            # A name that starts with "~" is what an interrupted pip leaves behind.
            if entry.endswith((".dist-info", ".egg-info")) and not entry.startswith("~"):
                distribution = _distribution(folder, entry)
                if distribution is not None:
                    found.setdefault(distribution.name, distribution)
    return found


def _distribution(folder: Path, entry: str) -> Distribution | None:
    match = _FOLDER.fullmatch(entry)
    name = match["name"] if match else entry.rsplit(".", 1)[0]
    if not _matters(normalized(name)):
        return None
    metadata = folder / entry
    text = _metadata_text(metadata)
    if not text:  # an interrupted uninstall leaves the folder without its METADATA: Python does not see it either
        return None
    if match:
        return Distribution(normalized(name), match["version"], metadata)
    version = _header(text, "Version")
    return Distribution(normalized(_header(text, "Name") or name), version, metadata) if version else None


def _matters(name: str) -> bool:
    return name in NAMES or name.startswith(PREFIXES)


def _metadata_text(metadata: Path) -> str:
    candidates = (metadata / "METADATA", metadata / "PKG-INFO", metadata)
    text = next((text for path in candidates if (text := read_text(path, _METADATA_LIMIT))), "")
    return text.split("\n\n", 1)[0]


def _header(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}:[ \t]*(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def requirements_of(distribution: Distribution, wanted: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield requirements, here and without extras, on distributions whose names start with ``wanted``."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Parsed

    headers, initials = distribution.text().splitlines(), {name[0] for name in wanted}
    for line in (header.partition(":")[2].strip() for header in headers if header.startswith("Requires-Dist:")):
        if line[:1].lower() not in initials:  # most of them; to normalize a name takes longer
            continue
        name = normalized(_BEYOND_NAME.split(line, maxsplit=1)[0])
        if not _matters(name) or not name.startswith(wanted) or _OF_AN_EXTRA.search(line):
            continue
        try:
            parsed = Parsed(line)
        except InvalidRequirement:
            continue
        if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
            yield Requirement(distribution.name, name, str(parsed.specifier))
