"""The README as the page of a package index: no files are beside it there, so relative links would lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[[^\]\n]*\]\((?!https?:)[^)\s]+\)\n+")
_LINK = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<path>(?!https?:|mailto:|#)[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the field ``readme``; a wheel is built from the source distribution with the same result."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called once per build."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}


def without_relative_links(text: str) -> str:
    """Return Markdown that names the files of the checkout instead of linking them, and lacks pictures of it."""

    def named(link: re.Match[str]) -> str:
        return f"`{link['path']}`" if link["text"] in link["path"] else f"{link['text']} (`{link['path']}`)"

    return _LINK.sub(named, _PICTURE.sub("", text))
