"""Environments of ranks as their launchers set them, for the tests of what is read from the environment alone."""

from __future__ import annotations

from tests import recorded_launches
from tests.recorded_launches import recorded

TORCHRUN = {
    **recorded_launches.TORCHRUN,
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STEP = recorded("slurm_step.env")
HEAD = "1611268096.0;tcp://192.0.2.2,198.51.100.7:35847;tcp6://[fd00::2]:53051"
"""OMPI_MCA_orte_hnp_uri as Open MPI 4 writes it (orte/mca/oob/tcp/oob_tcp_component.c)."""
OPEN_MPI = {**recorded("openmpi.env"), "OMPI_MCA_orte_hnp_uri": HEAD, "OMPI_MCA_orte_local_daemon_uri": HEAD}
