"""Effective settings of NCCL: the environment overrides the file of the user, which overrides that of the system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from doctor.collectors.base import Machine, collector
from doctor.collectors.nccl.config_files import ConfEntry, ambiguous_home, conf_paths, read_conf, read_references
from doctor.collectors.nccl.plugins import read_plugins
from doctor.collectors.software.dynamic_loader import DynamicLoader
from doctor.core.facts import NcclFacts, Setting, SettingsFile
from doctor.core.masking import mask_value, readable

PREFIX = "NCCL_"


@collector(NcclFacts)
def collect_nccl(machine: Machine) -> NcclFacts:
    """Collect the settings that NCCL would find in this process, and the files and plugins they name."""
    files: list[SettingsFile] = []
    layers: list[tuple[SettingsFile, tuple[ConfEntry, ...]]] = []
    for path, layer, asked in conf_paths(machine):
        file, entries = read_conf(path, layer)
        layers.append((file, entries))
        if file.exists or asked:
            files.append(file)
    settings = tuple(effective_settings(machine.environ, layers))
    values = {setting.name: setting.value for setting in settings}
    return NcclFacts(
        settings=settings,
        files=tuple(files),
        references=tuple(read_references(values, machine)),
        plugins=tuple(read_plugins(values, DynamicLoader(machine.environ, machine.etc))),
        hidden=ambiguous_home(machine),
    )


def effective_settings(
    environ: Mapping[str, str], layers: Iterable[tuple[SettingsFile, tuple[ConfEntry, ...]]]
) -> Iterator[Setting]:
    """Yield each setting once, by name. ``layers``: files with their entries, highest priority first.

    NCCL passes every entry to setenv() without overwriting: a variable of the environment, even an empty one, and an
    entry that was read before keep their value.
    """
    from_files: dict[str, list[tuple[SettingsFile, ConfEntry]]] = {}
    for file, entries in layers:
        for entry in entries:
            from_files.setdefault(entry.name, []).append((file, entry))
    names = {name for name in environ if name.startswith(PREFIX)}
    for name in sorted(names | {name for name in from_files if name not in environ}):
        set_in = from_files.get(name, [])
        stated = [f"{file.path}:{entry.line}={mask_value(name, entry.value)}" for file, entry in set_in]
        if name in environ:
            yield Setting(readable(name), mask_value(name, environ[name]), overrides=tuple(stated))
            continue
        file, entry = set_in[0]
        value = mask_value(name, entry.value)
        yield Setting(readable(name), value, file.layer, file.path, entry.line, tuple(stated[1:]))
