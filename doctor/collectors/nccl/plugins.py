"""Plugin libraries of NCCL: which are requested, and which the loader would find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from doctor.collectors.software.dynamic_loader import DynamicLoader
from doctor.collectors.software.elf import ElfError, exported_symbols
from doctor.core.facts import NcclPlugin
from doctor.core.text import lazy_compile

KINDS = {
    "net": "NCCL_NET_PLUGIN",
    "tuner": "NCCL_TUNER_PLUGIN",
    "profiler": "NCCL_PROFILER_PLUGIN",
    "env": "NCCL_ENV_PLUGIN",
}
"""Variable of each kind; the library of a kind is called libnccl-<kind>.so (src/plugin/plugin_open.cc)."""

INTERFACES = lazy_compile(rb"nccl(?:(?:Net|CollNet|Gin|Tuner|Env)Plugin|Profiler)_v\d+")
"""Symbols that NCCL looks up in a plugin (src/plugin/*/*_v*.cc)."""


def read_plugins(settings: Mapping[str, str], loader: DynamicLoader) -> Iterator[NcclPlugin]:
    """Yield the plugins that settings request, found or not, and those that NCCL loads by default if found."""
    for kind, variable in KINDS.items():
        requested = settings.get(variable)
        if requested is None:
            plugin = _plugin(kind, "", loader)
            if plugin.path is not None:
                yield plugin
            continue
        names = requested.split(",") if kind == "net" else [requested]
        # "none" disables plugins, and STATIC_PLUGIN is linked into the program.
        yield from (_plugin(kind, name, loader) for name in names if name.lower() not in ("none", "static_plugin"))


def _plugin(kind: str, requested: str, loader: DynamicLoader) -> NcclPlugin:
    names = library_names(kind, requested)
    found = next(((name, path) for name in names if (path := loader.find(name)) is not None), None)
    if found is None:
        return NcclPlugin(kind, names[-1], requested, error=f"not found by the loader: {', '.join(names)}")
    name, path = found
    symbols, error = _symbols(path)
    return NcclPlugin(kind, name, requested, str(path), symbols, error)


def library_names(kind: str, requested: str) -> tuple[str, ...]:
    """Return what NCCL passes to dlopen, in order (src/plugin/plugin_open.cc openPluginLib; 2.27 and newer).

    Older releases try the name with prefix and suffix first, which finds the same library unless both exist.
    """
    prefix = f"libnccl-{kind}"
    if not requested:
        return (f"{prefix}.so",)
    if "/" in requested or (requested.startswith("lib") and requested.endswith(".so")):
        return (requested,)
    return requested, f"{prefix}-{requested}.so"


def _symbols(path: Path) -> tuple[tuple[str, ...], str | None]:
    try:
        return exported_symbols(path, INTERFACES), None
    except ElfError as error:
        return (), str(error)
    except OSError as error:
        return (), error.strerror or str(error)
