"""The settings in effect in each process, with their origin and the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

from doctor.core.facts import EnvironmentFacts, NcclFacts, Section, Setting, SoftwareFacts
from doctor.core.job import Group, Job
from doctor.core.section_table import IdenticalRanks

A = TypeVar("A", bound=Section)
K = TypeVar("K", bound=Hashable)


class EffectiveSetting(msgspec.Struct, frozen=True):
    """A setting and the ranks in which it is in effect."""

    setting: Setting
    ranks: tuple[int, ...]

    @property
    def origin(self) -> str:
        """``environment``, or the file with its line: ``/etc/nccl.conf:4``."""
        setting = self.setting
        if setting.layer == "environment":
            return setting.layer
        return setting.source if setting.line is None else f"{setting.source}:{setting.line}"


_STATED: WeakKeyDictionary[Job, tuple[EffectiveSetting, ...]] = WeakKeyDictionary()


def effective_settings(job: Job) -> tuple[EffectiveSetting, ...]:
    """Every distinct setting of the job by name: all environment variables, and those that NCCL's files add."""
    if job not in _STATED:
        ranks: dict[Setting, list[int]] = {}
        for environment, same in job.each(EnvironmentFacts, also=(NcclFacts,)):
            settings = {variable.name: Setting(variable.name, variable.value) for variable in environment.variables}
            nccl = same.find(NcclFacts)
            settings |= {setting.name: setting for setting in (nccl.settings if nccl else ())}
            for setting in settings.values():
                ranks.setdefault(setting, []).extend(same.ranks)
        ordered = sorted(ranks.items(), key=lambda item: (item[0].name, item[1]))
        _STATED[job] = tuple(EffectiveSetting(setting, tuple(numbers)) for setting, numbers in ordered)
    return _STATED[job]


def group_by_value(
    job: Job, section: type[A], key: Callable[[A, IdenticalRanks], K], *, also: tuple[type[Section], ...] = ()
) -> list[Group[K]]:
    """Ranks by ``key`` of a section and of the optional sections ``also``, in the order of their lowest rank."""
    groups: dict[K, list[int]] = {}
    for facts, same in job.each(section, also=also):
        groups.setdefault(key(facts, same), []).extend(same.ranks)
    ordered = [Group(value, tuple(sorted(ranks))) for value, ranks in groups.items()]
    return sorted(ordered, key=lambda group: group.ranks[0])


def only_nccl(job: Job) -> str | None:
    """The release of NCCL that all ranks load; ``None`` if it differs or is unknown."""
    return _only({software.nccl for software, _ in job.facts(SoftwareFacts)})


def only_torch(job: Job) -> str | None:
    """The release of torch on all ranks; ``None`` if it differs or is unknown."""
    return _only({software.torch.version if software.torch else None for software, _ in job.facts(SoftwareFacts)})


def _only(values: set[str | None]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None
