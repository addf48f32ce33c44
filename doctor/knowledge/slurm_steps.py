"""Special values of SLURM."""

from __future__ import annotations

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First step number that is not a step of srun: batch script, external and interactive step (slurm.h,
MAX_NORMAL_STEP_ID, SLURM_BATCH_SCRIPT and those next to it)."""

INTERACTIVE_JOBS = ("bash", "interactive")
"""SLURM job names that Lightning does not treat as a SLURM run (lightning/fabric/plugins/environments/slurm.py)."""
