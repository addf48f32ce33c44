"""Configurations of launchers and trainers: told apart by what they hold, and what in them contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.lint.launch.configs import accelerate, deepspeed, llamafactory
from doctor.lint.launch.configs.contradiction import Contradiction
from doctor.lint.launch.configs.kinds import Config, configs_in

__all__ = ["Config", "Contradiction", "configs_in", "contradictions_in"]

_JUDGES = {
    "accelerate": accelerate.contradictions,
    "deepspeed": deepspeed.contradictions,
    "llamafactory": llamafactory.contradictions,
}


def contradictions_in(config: Config) -> Iterator[Contradiction]:
    """What can't hold together in one configuration, in the order in which it is looked for."""
    yield from _JUDGES[config.kind](config.root)
