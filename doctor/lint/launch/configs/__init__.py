"""Configurations of launchers and trainers: their kinds and their contradictions."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.lint.launch.configs import accelerate, deepspeed, llamafactory
from doctor.lint.launch.configs.contradiction import Contradiction
from doctor.lint.launch.configs.kinds import LauncherConfig, configs_in

__all__ = ["Contradiction", "LauncherConfig", "configs_in", "contradictions_in"]

_JUDGES = {
    "accelerate": accelerate.contradictions,
    "deepspeed": deepspeed.contradictions,
    "llamafactory": llamafactory.contradictions,
}


def contradictions_in(config: LauncherConfig) -> Iterator[Contradiction]:
    """The contradictions in one configuration."""
    yield from _JUDGES[config.kind](config.root)
