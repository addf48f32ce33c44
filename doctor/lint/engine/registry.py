"""Finds rules: built-ins by walking ``doctor_checks``, plugins by entry points ``doctor.rules`` and by file.

As :mod:`doctor.core.check_registry` does for checks: a plugin that fails to load is a crash in the report, and the
rest goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from doctor.core.check import FAMILIES
from doctor.core.check_registry import (
    RULE_FAMILY,
    RULE_PACKAGES,
    BrokenPlugin,
    builtin_package,
    entry_points,
    import_file,
    matches,
    modules_of,
    origin_of,
    sentence_of,
    walk_modules,
)
from doctor.core.errors import UnusableError
from doctor.core.settings import suggestion
from doctor.lint.engine.rule import Rule
from doctor.lint.engine.suppressions import UNUSED_SUPPRESSION

ENTRY_POINTS = "doctor.rules"


@dataclass(frozen=True)
class Rulebook:
    """Rules in report order, and the plugins that failed to load."""

    rules: tuple[Rule, ...]
    broken: tuple[BrokenPlugin, ...] = ()

    def ids(self) -> tuple[str, ...]:
        """All ids, each once."""
        return tuple(dict.fromkeys(rule.id for rule in self.rules))

    def names(self, pattern: str) -> bool:
        """Whether a pattern (an id, a family, ``ALL``) names one of them."""
        return pattern.upper() == "ALL" or any(matches(rule.id, rule.family, pattern) for rule in self.rules)


def load_rules(plugin_files: Iterable[Path] = (), *, plugins: bool = True) -> Rulebook:
    """Built-ins, installed plugins, and the rules in ``plugin_files``.

    Raises:
        UnusableError: a plugin file cannot be used, or claims an id that is taken.
    """
    broken: list[BrokenPlugin] = []
    rules = [UNUSED_SUPPRESSION, *builtin_rules(broken)]
    for entry in entry_points(ENTRY_POINTS, broken) if plugins else ():
        _add_plugin(rules, entry, broken)
    for path in plugin_files:
        found = [replace(rule, origin=str(path)) for rule in rules_in(import_file(path))]
        if taken := _taken(found, rules):
            raise UnusableError(f"the plugin {path} uses ids that are already taken: {', '.join(taken)}")
        rules += found
    return Rulebook(tuple(sorted(rules, key=_order)), tuple(broken))


def builtin_rules(broken: list[BrokenPlugin] | None = None) -> list[Rule]:
    """The rules of this distribution. Modules that fail to load are put into ``broken``.

    Raises:
        ValueError: two of them have the same id.
    """
    rules: list[Rule] = []
    for module in walk_modules(builtin_package(), broken, enters=lambda name: name in RULE_PACKAGES):
        found = rules_in(module)
        # Cut short by a full disk, a source file may still be valid Python.
        if broken is not None and not found:
            broken.append(BrokenPlugin(module.__name__, "built-in", "it defines no rule"))
        if taken := _taken(found, rules):
            raise ValueError(f"{module.__name__} claims {', '.join(taken)}, which is taken")
        rules += found
    return rules


def rules_in(module: ModuleType) -> list[Rule]:
    """The rules that a module holds at its top level."""
    return [value for value in vars(module).values() if isinstance(value, Rule)]


def _taken(found: list[Rule], rules: list[Rule]) -> list[str]:
    """Ids that would be claimed twice."""
    ids = [rule.id for rule in found]
    known = {rule.id for rule in rules}
    own = {rule.id for rule in found if rule.family == RULE_FAMILY or rule.origin != "built-in"}
    return sorted({name for name in own if name in known or ids.count(name) > 1})


def _add_plugin(rules: list[Rule], entry: EntryPoint, broken: list[BrokenPlugin]) -> None:
    origin = origin_of(entry)
    try:
        loaded = entry.load()
        found = [loaded] if isinstance(loaded, Rule) else [one for part in modules_of(loaded) for one in rules_in(part)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        broken.append(BrokenPlugin(entry.name, origin, sentence_of(error)))
        return
    found = [replace(rule, origin=origin) for rule in {id(rule): rule for rule in found}.values()]
    taken = _taken(found, rules)
    if taken or not found:
        reason = f"{', '.join(taken)} is taken" if taken else "it holds no rule"
        broken.append(BrokenPlugin(entry.name, origin, reason))
        return
    rules += found


def choose_rules(book: Rulebook, select: Iterable[str]) -> Rulebook:
    """The rules named by ``select`` (ids, families, ``ALL``; nothing: all).

    Raises:
        UnusableError: nothing that is named is a rule; with the nearest names there are.
    """
    patterns = list(select)
    if not patterns:
        return book
    chosen = [rule for rule in book.rules if any(matches(rule.id, rule.family, pattern) for pattern in patterns)]
    if not chosen:
        known = suggestion(patterns[0], list(book.ids()))
        raise UnusableError(f"no rule of doctor lint is called {', '.join(patterns)}{known}")
    return Rulebook(tuple(chosen), book.broken)


def _order(rule: Rule) -> tuple[int, str, str]:
    families = list(FAMILIES.values())
    return (families.index(rule.family) if rule.family in families else len(families), rule.id, rule.judge.__module__)
