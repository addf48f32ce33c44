"""Findings about the temporary directories and caches of compilers, launchers and data workers.

Sources: tempfile of Python (candidates of gettempdir), c10/util/tempfile.cpp (TMPDIR without a fallback if it is set),
torch/lib/libshm/manager.cpp (``torch-shm-dir-XXXXXX/manager.sock``), torch/_inductor/runtime/cache_dir_utils.py,
triton/runtime/cache.py, torch/utils/cpp_extension.py; Linux mmap(2): EPERM for PROT_EXEC on a noexec mount.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

import msgspec

from doctor.api import Finding, Job, LocalRanks, Severity, merge
from doctor.core.text import HERE
from doctor.facts import Directory, StorageFacts

_LOADS_CODE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
"""Variables of caches whose libraries are loaded into the process; a model cache is often read-only on purpose."""

_SOCKET_SUFFIX = len("/torch-shm-dir-XXXXXX/manager.sock")
_LONGEST_SOCKET = 107
"""Characters of a Unix socket's path (sockaddr_un.sun_path without its final zero)."""


class _ScratchFault(msgspec.Struct, frozen=True):
    words: str
    severity: Severity
    effect: str
    fix: str


class _ScratchClaim(msgspec.Struct, frozen=True):
    """A fault of directories, and what a summary calls them."""

    subject: str
    fault: _ScratchFault
    folders: list[Directory]


def scratch_findings(job: Job, least: float) -> Iterator[Finding]:
    """Findings about the temporary directory and the caches of each host; ``least``: bytes that must be free."""
    found = [
        (local, claim)
        for local in job.by_host()
        if (storage := local.find(StorageFacts)) is not None
        for claim in (*_of_named(storage, least), *_of_defaults(storage, least))
    ]
    hosts = Counter((claim.subject, claim.fault) for _, claim in found)
    yield from merge(
        _finding(
            claim, local, f" on {local.name}" if job.is_multi_host and hosts[claim.subject, claim.fault] == 1 else ""
        )
        for local, claim in found
    )


def _of_named(storage: StorageFacts, least: float) -> Iterator[_ScratchClaim]:
    for folder in storage.directories:
        if folder.role == "temporary" or (folder.role == "cache" and folder.source):
            name = f"{folder.source}={folder.path}" if folder.source else f"Temporary directory {folder.path}"
            for fault in _faults(folder, least):
                # The path is in the evidence if its length is the fault.
                subject = f"The path in {folder.source or 'TMPDIR'}" if fault.words == _TOO_LONG else name
                yield _ScratchClaim(subject, fault, [folder])


def _of_defaults(storage: StorageFacts, least: float) -> Iterator[_ScratchClaim]:
    """One finding per fault for all caches in their default places, which a job may not use."""
    groups: dict[_ScratchFault, list[Directory]] = {}
    for folder in storage.directories:
        if folder.role == "cache" and not folder.source:
            for fault in _faults(folder, least):
                groups.setdefault(msgspec.structs.replace(fault, severity=Severity.INFO, effect="", fix=""), []).append(
                    folder
                )
    for fault, folders in groups.items():
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        names = dict.fromkeys(_DEFAULTS[end] for folder in folders for end in _DEFAULTS if folder.path.endswith(end))
        elsewhere = "\n".join(f"export {name}=/tmp/$USER/{name.partition('_')[0].lower()}" for name in names)
        whole = msgspec.structs.replace(fault, fix=elsewhere, effect=_cache_effect(*names))
        yield _ScratchClaim(f"Default cache {folders[0].path}{more}", whole, folders)


_DEFAULTS = {
    "/torch_extensions": "TORCH_EXTENSIONS_DIR",
    "/.triton/cache": "TRITON_CACHE_DIR",
    "/huggingface": "HF_HOME",
}
"""The ends of the default places of caches -> the variables that move them."""

_WRITERS = {
    "TORCH_EXTENSIONS_DIR": "the build of a C++ extension",
    "TORCHINDUCTOR_CACHE_DIR": "torch.compile",
    "TRITON_CACHE_DIR": "the compilation of a Triton kernel",
    "HF_HOME": "a download from the Hugging Face Hub",
    "CUDA_CACHE_PATH": "the JIT compilation of a CUDA kernel",
}


def _cache_effect(*names: str) -> str:
    writers = [_WRITERS[name] for name in names if name in _WRITERS] or ["a program that uses the cache"]
    words = ", ".join(writers[:-1]) + f"{' or ' if len(writers) > 1 else ''}{writers[-1]}"
    return f"{words[:1].upper()}{words[1:]} fails when it writes to the cache."


def _finding(claim: _ScratchClaim, local: LocalRanks, place: str) -> Finding:
    """``place``: the host, if no other host has the same fault."""
    subject, fault, folders = claim.subject, claim.fault, claim.folders
    first = folders[0]
    return Finding(
        f"{subject}{place} {fault.words}",
        ranks=local.ranks,
        severity=fault.severity,
        evidence={
            "paths": [folder.path for folder in folders],
            "named_by": first.source,
            "filesystem": first.filesystem,
            "free_bytes": first.free,
            "free_inodes": first.free_inodes,
            "error": first.error,
        },
        effect=fault.effect,
        fix=fault.fix.replace(f" on {HERE}", place),
    )


def _faults(folder: Directory, least: float) -> Iterator[_ScratchFault]:
    path = shlex.quote(folder.path) if folder.path.isprintable() else "PATH"
    effect = _TEMPORARY_EFFECT if folder.role == "temporary" else _cache_effect(folder.source or "")
    full = _FULL_EFFECT if folder.role == "temporary" else effect
    severity = Severity.INFO if folder.source == "HF_HOME" else Severity.WARNING
    if folder.exists is None or folder.error:
        if folder.error:
            yield _ScratchFault(f"cannot be used: {folder.error}", severity, effect, _another(folder))
        return
    if folder.role == "temporary" and not folder.exists:
        yield _ScratchFault("does not exist", severity, effect, f"mkdir -p {path}")
        return
    if folder.writable is False:
        words = "is not writable" if folder.exists else "cannot be created: no write permission"
        yield _ScratchFault(words, severity, effect, _another(folder))
    elif folder.free is not None and folder.free < least:
        words = f"is full: less than {int(least) >> 20} MiB free"
        yield _ScratchFault(
            words,
            severity,
            full,
            f"Delete the largest files in {folder.path} on {HERE}, which the first command lists:\n"
            f"du -xsh {path}/* | sort -h | tail\ndf -h {path}",
        )
    elif folder.free_inodes == 0:
        yield _ScratchFault(
            "is full: no inodes left",
            severity,
            full,
            f"Delete files in {folder.path} on {HERE} until this command shows free inodes:\ndf -i {path}",
        )
    if folder.noexec and (folder.role == "temporary" or folder.source in _LOADS_CODE):
        mild = Severity.INFO if folder.role == "temporary" else Severity.WARNING
        effect = _NOEXEC_EFFECT.format(_BUILDERS.get(folder.source or "", "torch.compile, Triton and cpp_extension"))
        yield _ScratchFault("is on a noexec mount", mild, effect, _another(folder))
    if folder.role == "temporary" and len(folder.path) + _SOCKET_SUFFIX > _LONGEST_SOCKET:
        effect = "None with `num_workers=0`. Otherwise, DataLoader workers may fail with `AF_UNIX path too long`."
        yield _ScratchFault(_TOO_LONG, Severity.INFO, effect, "export TMPDIR=/tmp")


_TOO_LONG = "is too long for the socket paths of DataLoader workers"
_TEMPORARY_EFFECT = (
    "Python silently uses another temporary directory, and programs without such a fallback fail, for example "
    "torch_shm_manager with `could not generate a random directory`."
)
_FULL_EFFECT = (
    "Launchers, compilers and DataLoader workers that create temporary files fail with `No space left on device`."
)
_NOEXEC_EFFECT = "Libraries that {} would build there fail to load with `failed to map segment from shared object`."
_BUILDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torch.compile",
    "TRITON_CACHE_DIR": "Triton",
    "TORCH_EXTENSIONS_DIR": "torch.utils.cpp_extension",
}
"""Variables of caches -> what builds libraries in them; TMPDIR serves all of these."""


def _another(folder: Directory) -> str:
    if folder.role == "temporary":
        return 'export TMPDIR="$HOME/tmp"\nmkdir -p "$TMPDIR"' if folder.noexec else "export TMPDIR=/tmp"
    name = folder.source or "TRITON_CACHE_DIR"
    again = "Use another directory, to which models are then downloaded again:\n" if name == "HF_HOME" else ""
    return again + (
        f'export {name}="$HOME/.cache/{name.partition("_")[0].lower()}"'
        if folder.noexec and not folder.path.startswith("/home/")
        else f"export {name}=/tmp/$USER/{name.partition('_')[0].lower()}"
    )
