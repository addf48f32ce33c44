"""The names of rich that reports use; importing rich draws from ``random`` (rich/style.py)."""

from __future__ import annotations

from doctor.core.random_state import random_state_kept

with random_state_kept():
    from rich.console import Console, Group, RenderableType
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

__all__ = ["Console", "Group", "Padding", "RenderableType", "Rule", "Table", "Text"]


def from_markdown(text: str) -> RenderableType:
    """Return Markdown to print; only pages of the playbook need its parser, which takes long to import."""
    with random_state_kept():
        from rich.markdown import Markdown
    return Markdown(text)
