"""Merges the sections of one process that were measured in several steps."""

from __future__ import annotations

import msgspec

from doctor.core.facts import Missing, Section
from doctor.core.job import Sections


def merge_sections(earlier: Sections, later: Sections) -> Sections:
    """Return the sections of both; lists are joined, and the later one of two values is kept."""
    both = earlier.keys() & later.keys()
    return {**earlier, **later, **{key: merge_section(earlier[key], later[key]) for key in both}}


def merge_section(earlier: Section | Missing, later: Section | Missing) -> Section | Missing:
    """Merge two results of one section; a result counts before a missing one."""
    if isinstance(later, Missing) or isinstance(earlier, Missing):
        return earlier if isinstance(later, Missing) and not isinstance(earlier, Missing) else later
    changes = {}
    for name in type(later).__struct_fields__:
        old, new = getattr(earlier, name), getattr(later, name)
        if isinstance(new, tuple):
            changes[name] = tuple(dict.fromkeys((*old, *new)))
        elif new is None:
            changes[name] = old
    return msgspec.structs.replace(later, **changes)
