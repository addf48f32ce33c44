"""What shells complete besides commands, options and files: ids, names and families of checks, and site profiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_check(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what ``doctor explain`` takes: the ids of all checks and rules and their names, and families."""
    from doctor.core.check import FAMILIES
    from doctor.report.playbook import all_pages

    pages = list(all_pages())
    names = (*FAMILIES.values(), *(page.name for page in pages))
    return _starting_with(incomplete, (*FAMILIES, *(page.id for page in pages), *names))


def complete_checks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what ``--select`` and ``--ignore`` take, after the last comma: ids, families and ALL."""
    from doctor.core.check import FAMILIES
    from doctor.report.playbook import all_pages

    before, comma, last = incomplete.rpartition(",")
    return _starting_with(last, ("ALL", *FAMILIES, *(page.id for page in all_pages())), before + comma)


def complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of site profiles."""
    from doctor.knowledge.sites.profiles import site_profiles

    return _starting_with(incomplete, ("list", *site_profiles()))


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a file, for arguments that are files among others."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _starting_with(start: str, names: Iterable[str], before: str = "") -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(before + name) for name in names if name.lower().startswith(start.lower())]
