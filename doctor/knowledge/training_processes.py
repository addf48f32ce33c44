"""Processes and threads of a training job by their names: what a rank runs, and what runs beside it.

Sources: ``c10::setThreadName`` in torch/csrc/distributed/c10d, torch/utils/data/_utils/worker.py (names since torch
2.5), gloo/transport/tcp/loop.cc, multiprocessing/spawn.py, forkserver.py and resource_tracker.py of Python,
torch/_inductor/compile_worker, ray/_private/workers/default_worker.py and ``ray/_raylet.pyx`` (titles of workers),
ThreadRunner in ray/train/v2/_internal/execution/worker_group/thread_runner.py, and RunnerThread in
ray/air/_internal/util.py.
"""

from __future__ import annotations

from doctor.knowledge.launchers import LAUNCHERS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GROUP_THREADS = ("pt_nccl_", "pt_gloo_", "gloo_tcp", "pt_mpi_", "pt_ucc_")
"""Beginnings of the names of threads that a process has while it is a member of a process group."""
STORE_THREADS = ("pt_tcpstore",)
"""Beginnings of the names of the threads of a TCPStore server: rank 0, or the agent of torchrun."""
TORCH_THREADS = "pt_"
"""Beginning of the names of the threads of torch."""
TORCH_LIBRARIES = (b"/libtorch_python.so", b"/libtorch_cpu.so", b"/libc10.so")
"""Libraries of torch as they end a line of /proc/PID/maps."""
DATA_WORKER = "pt_data_worker"
"""Name of a process that a DataLoader started."""

SPAWNED = "spawn_main("
"""In the code of a process that multiprocessing started with the method ``spawn``."""
FORK_SERVER = "multiprocessing.forkserver import main"
"""In the code of the process that multiprocessing forks others from (``forkserver``)."""
HELPER_CODE = ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker", FORK_SERVER)
"""In the code (``python -c``) of processes that serve the interpreter of a rank."""
HELPER_MODULES = _words(
    "doctor tensorboard tensorboard.main wandb aim mlflow ray pip py_spy debugpy.adapter jupyter jupyterlab notebook "
    "jupyter_server torch.utils.bottleneck"
)
"""Modules (``python -m``) that serve a job or a user, and do not train."""
HELPER_SCRIPTS = _words(
    "doctor tensorboard wandb wandb-service aim mlflow ray pip conda mamba py-spy jupyter jupyter-lab "
    "jupyter-notebook jupyter-labhub jupyterhub-singleuser"
)
"""Names of scripts with the same meaning."""
HELPER_FOLDERS = (
    "/torch/_inductor/compile_worker/",
    "/ray/dashboard/",
    "/ray/autoscaler/",
    "/ray/_private/",
    "/wandb/",
    "/debugpy/adapter",
)
"""Folders of scripts with the same meaning."""

RAY_TITLE = "ray::"
"""Beginning of the title of a Ray worker; the class or the function that it runs follows."""
RAY_HELPERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::SPILL", "ray::RESTORE")
"""Beginnings of the titles of Ray's processes that run no task of the job."""
RAY_TRAINERS = ("TrainWorker",)
"""In the titles of the workers of Ray Train, which are ranks before they have loaded torch."""
TRAINING_THREAD = "TrainingThread("
"""Beginning of the name of the thread in which Ray Train runs the training function; the main one serves the actor."""
TRAINING_THREAD_STARTS = (
    ("ray/train/v2/_internal/execution/worker_group/thread_runner.py", "_run_target"),
    ("ray/air/_internal/util.py", "run"),
)
"""File and function that such a thread begins with; the second one before Ray Train V2."""
NIL_RAY_JOB = "ffffffff"
"""RAY_JOB_ID of a worker that Ray started before it belonged to a job."""

SHELLS = _words("bash sh zsh dash ash ksh tcsh csh fish")

_TRAINS_ITSELF = ("llamafactory",)
"""Launchers that train in their own process if the job has one rank."""
AGENT_SCRIPTS = {
    call.split()[0]: row.name
    for row in LAUNCHERS
    if row.command and row.name not in _TRAINS_ITSELF
    for call in row.command.calls
}
"""Launchers by the name of their script."""
AGENT_MODULES = {
    module: row.name
    for row in LAUNCHERS
    for module in (*(row.command.modules if row.command else ()), *row.agent_modules)
}
"""Launchers by the module that runs them (``python -m``)."""
AGENT_PROCESSES = {name: row.name for row in LAUNCHERS for name in row.processes if name != RAY_TITLE}
"""Launchers by the beginning of the names of their processes."""
