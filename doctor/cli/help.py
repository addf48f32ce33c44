"""``doctor help``: the help of a command, as ``doctor COMMAND --help`` prints it."""

from __future__ import annotations

import difflib

import click
from click.shell_completion import CompletionItem


def _group(ctx: click.Context) -> tuple[click.Context, click.Group]:
    parent = ctx.parent
    if parent is None or not isinstance(parent.command, click.Group):
        raise click.UsageError("help is a command of doctor.", ctx)
    return parent, parent.command


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    parent, group = _group(ctx)
    return [CompletionItem(name) for name in group.list_commands(parent) if name.startswith(incomplete)]


@click.command("help", short_help="Show the help of a command.")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=_complete)
@click.pass_context
def command(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of doctor.

    Example: doctor help diagnose
    """
    parent, group = _group(ctx)
    if name is None:
        click.echo(parent.get_help())
        return
    found = group.get_command(parent, name)
    if found is None:
        close = difflib.get_close_matches(name, group.list_commands(parent), n=1)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"No such command {name!r}{meant}", parent)
    with click.Context(found, info_name=name, parent=parent, **found.context_settings) as own:
        click.echo(found.get_help(own))
