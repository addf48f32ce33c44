"""Environments that clouds and computing centers publish for their systems, by the name of the profile.

Values are those of ``source``; alternatives are other values that the same provider publishes. Variables that only
change what is logged are left out, and so are paths to a release of a library that the system's modules set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import msgspec

from doctor.knowledge.data_files import read
from doctor.knowledge.variable_values import effective


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recommended value of one variable, and when it applies.

    ``alternatives``: other values that are as good. ``required``: the job does not work as intended without it.
    ``gpus``: only with GPUs of these models; ``multi_host``: only in jobs on several hosts. ``why``: the reason that
    the source gives, as a sentence. ``batch_option``: an option of sbatch without which the value has no effect.
    """

    value: str
    alternatives: tuple[str, ...] = ()
    required: bool = False
    gpus: tuple[str, ...] = ()
    multi_host: bool = False
    why: str = ""
    batch_option: str = ""

    def is_met_by(self, name: str, value: str) -> bool:
        """Whether ``value`` of the variable ``name`` has the same effect as one of the recommended values."""
        if name == "LD_LIBRARY_PATH":
            folders = {folder.rstrip("/") for folder in value.split(":")}
            return folders.issuperset(self.value.split(":"))
        return effective(name, value) in {effective(name, one) for one in (self.value, *self.alternatives)}


class SiteProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published environment: ``title`` names the system, ``source`` is the address."""

    title: str
    source: str
    variables: dict[str, str | Recommendation]

    def recommendations(self) -> Iterator[tuple[str, Recommendation]]:
        """Yield the names of the variables and what is recommended for each."""
        for name, one in self.variables.items():
            yield name, one if isinstance(one, Recommendation) else Recommendation(one)


@functools.cache
def site_profiles() -> Mapping[str, SiteProfile]:
    """Return all profiles by name."""
    return read("sites/profiles.json", dict[str, SiteProfile])
