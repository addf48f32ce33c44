"""The sections of facts that checks judge, by name: :mod:`doctor.core.facts`, which collectors and readers fill."""

from doctor.core.facts import *  # noqa: F403
from doctor.core.facts import __all__ as __all__
