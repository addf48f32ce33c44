"""What SLURM's own numbers mean."""

from __future__ import annotations

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are no steps of srun: batch script, external and interactive step
(slurm.h, MAX_NORMAL_STEP_ID, SLURM_BATCH_SCRIPT and its neighbours)."""

INTERACTIVE_JOBS = ("bash", "interactive")
"""SLURM job names that Lightning does not take for a SLURM run (lightning/fabric/plugins/environments/slurm.py)."""
