"""Prepares a lint request: selected rules, known ids and releases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from doctor.core.errors import UnusableError
from doctor.core.settings import Settings, is_built_in, suggestion
from doctor.lint.engine.registry import Rulebook, choose_rules, load_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest

if TYPE_CHECKING:
    from doctor.core.check_registry import CheckRegistry


def lint_request(
    settings: Settings,
    *,
    typed: Sequence[str] = (),
    lightning: str | None = None,
    processors: int | None = None,
    strict: bool = False,
) -> LintRequest:
    """The lint request. ``typed``: selections of the command line, which must name rules.

    Raises:
        UnusableError: a plugin, a pattern or a release cannot be used.
    """
    book = load_rules(settings.plugins)
    _require_known(book, settings, typed)
    return LintRequest(
        book=choose_rules(book, settings.select),
        settings=settings,
        known={rule.id: rule.family for rule in book.rules},
        releases=_releases(lightning),
        processors=processors,
        strict=strict,
    )


def _require_known(book: Rulebook, settings: Settings, typed: Sequence[str]) -> None:
    """Reject patterns that match nothing. Those of a settings file may name checks, also of plugins."""
    for pattern in typed:
        if not book.names(pattern):
            raise UnusableError(f"no rule or family is called {pattern}{suggestion(pattern, list(book.ids()))}")
    strange = [one for one in settings.to_be_known() if not book.names(one) and not is_built_in(one)]
    if strange:
        from doctor.core.check_registry import load_registry
        from doctor.core.settings import require_known_patterns

        require_known_patterns(load_registry(settings.plugins), strange)


def _releases(lightning: str | None) -> Releases:
    """The releases, with the given one of Lightning under both of its names."""
    if lightning is None:
        return Releases({})
    from packaging.version import InvalidVersion, Version

    try:
        Version(lightning)
    except InvalidVersion:
        raise UnusableError(f"{lightning} is not a release of Lightning, such as 2.4.0") from None
    return Releases({"lightning": lightning, "pytorch-lightning": lightning})


def selected_checks_and_rules(settings: Settings) -> tuple[CheckRegistry, Rulebook]:
    """The checks and the rules that the settings select, as ``doctor list`` shows them.

    Raises:
        UnusableError: a plugin, a pattern or a limit cannot be used.
    """
    from doctor.core.check_registry import CheckRegistry, load_registry, matches
    from doctor.core.settings import require_known_limits, require_known_patterns

    catalog, book = load_registry(settings.plugins), load_rules(settings.plugins)
    require_known_limits(settings, catalog)
    patterns = settings.select or ("ALL",)
    require_known_patterns(catalog, [one for one in settings.to_be_known() if not book.names(one)])
    checks = [one for one in catalog.checks if any(matches(one.id, one.family, pattern) for pattern in patterns)]
    rules = [one for one in book.rules if any(matches(one.id, one.family, pattern) for pattern in patterns)]
    return CheckRegistry(tuple(checks), catalog.broken), Rulebook(tuple(rules), book.broken)
