"""Lookups over the table of launchers by name, variable and process, computed once."""

from __future__ import annotations

import importlib
from itertools import chain
from typing import Any

from doctor.knowledge.launchers import ENVIRONMENT, LAUNCHERS, UNRANKED

BY_NAME = {row.name: row for row in LAUNCHERS}
BY_PRECEDENCE = tuple(sorted((row for row in LAUNCHERS if row.precedence < UNRANKED), key=lambda row: row.precedence))
COUNTED = tuple((row, row.counts) for row in BY_PRECEDENCE if row.counts is not None)
"""The launchers that count the processes themselves, innermost first, and how."""
STEP = next(row for row, counts in COUNTED if counts.in_step)
"""The launcher whose step other launchers may run in."""

STEPLESS_MARKS = tuple(chain.from_iterable(row.marks for row in LAUNCHERS if row.ignores_step))
"""Marks of the launchers whose workers inherit a step that does not describe them."""
PLAIN_MARKS = tuple(chain.from_iterable(row.marks for row in LAUNCHERS if row.rank == ENVIRONMENT.rank))
"""Marks of the launchers that set the plain RANK themselves."""
SCRIPT_VARIABLES = tuple(zip(*(row.script_variables for row in LAUNCHERS if row.script_variables), strict=True))
"""The variables that user scripts read as the rank, and those that they read as the world size."""
PREFIXES = tuple(chain.from_iterable(row.prefixes for row in LAUNCHERS))
"""Beginnings of the names of variables that launchers set or read."""
VARIABLES = frozenset(
    chain.from_iterable(
        (*row.marks, *row.node_rank, *row.node_count, *row.variables, *row.job_variables)
        for row in (ENVIRONMENT, *LAUNCHERS)
    )
)
"""Single names of such variables."""

JOB_VARIABLES = tuple(chain.from_iterable(row.job_variables for row in LAUNCHERS))
"""Variables by which schedulers identify a job."""
JOB_NAMES = frozenset(chain.from_iterable(row.job_names for row in LAUNCHERS))
"""Variables with the name that the user gave the job."""
LOCAL_RANKS = tuple(dict.fromkeys(chain.from_iterable(row.local_rank for row in (ENVIRONMENT, *LAUNCHERS))))
"""Variables in which a process finds its rank on the host."""
PROCESSES = tuple(chain.from_iterable(row.processes for row in (ENVIRONMENT, *LAUNCHERS)))
"""Beginnings of the names of processes that start ranks."""
PARENTS = {parent: row.parent_program or row.title for row in LAUNCHERS for parent in row.parents}
"""Programs that start ranks inside a task or a batch script, by the name of the process."""
ENDING_OTHERS = frozenset(row.name for row in LAUNCHERS if row.ends_others)
"""Launchers whose agent ends the ranks of its host if one of them fails."""
LOG_PREFIXES = tuple(chain.from_iterable(row.log_prefixes for row in LAUNCHERS))
"""What launchers put before the lines of a rank, the most specific form first."""


COMMANDS = {row.command.program: row.command for row in LAUNCHERS if row.command is not None}
"""How launch files start the launchers, by the program's name in findings."""


def function_of(reference: str) -> Any:
    """The function that a row names as ``module:function``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
