"""Jobs that hang, and jobs that make progress: what ``doctor attach`` has to find in each, and whether it does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from doctor.core.text import ranks_in_words
from tests.attach.jobs import Attached, TrainingJob, running
from tests.attach.places import PLACES


class AttachScene(NamedTuple):
    """A job, and what ``doctor attach`` has to find in it.

    ``check``: the id of the only finding above ``info``; with ``severity`` ``info`` one that is not an alarm; empty:
    any remarks. ``launch``: the program that starts the ranks; empty: each is started with the plain variables.
    ``needs``: modules of the program. ``place``: where the ranks are for the process that attaches, one of
    :data:`tests.attach.places.PLACES`; empty: it sees them and may read them. ``refused``: the reason why the stacks of
    ``ranks`` cannot be read, if no verdict is right."""

    name: str
    check: str = ""
    ranks: tuple[int, ...] = ()
    severity: str = "error"
    launch: str = ""
    world: int = 3
    needs: tuple[str, ...] = ()
    place: str = ""
    refused: str = ""

    @property
    def title(self) -> str:
        """The name with the launcher or the place."""
        launch = f" under {self.launch}" if self.launch else ""
        return f"{self.name}{launch} ({self.place})" if self.place else f"{self.name}{launch}"

    @property
    def is_alarm(self) -> bool:
        """Whether attaching finds a problem."""
        return bool(self.check) and self.severity != "info"

    @property
    def finding(self) -> str:
        """What attaching finds, in words."""
        ranks = ", ".join(map(str, self.ranks))
        if self.refused:
            return f"exit 3, rank {ranks}: {self.refused}"
        return f"{self.check} {self.severity}, rank {ranks}" if self.check else "no alarm"

    @property
    def code(self) -> int:
        """The exit code."""
        return 3 if self.refused else int(self.is_alarm)


HANGS = (
    AttachScene("sleeps", "RUN001", (2,)),
    AttachScene("ddp-sleeps", "RUN001", (2,)),
    AttachScene("gathers", "RUN006", (2,)),
    AttachScene("waits-for-a-lock", "RUN001", (2,)),
    AttachScene("holds-the-interpreter", "RUN016", (2,)),
    AttachScene("is-stopped", "RUN001", (2,)),
    AttachScene("leaves", "RUN001", (2,)),
    AttachScene("ddp-uneven", "DATA010", (2,)),
    AttachScene("fsdp-uneven", "DATA010", (2,)),
    AttachScene("stops-at-a-breakpoint", "RUN010", (2,)),
    AttachScene("differs", "RUN002", (0, 1), world=2),
    AttachScene("crosses", "RUN015", (0, 1)),
    AttachScene("row-never-comes", "RUN010", (2,)),
    AttachScene("pool-loses-a-child", "RUN010", (0,)),
    AttachScene("pool-deadlocks", "RUN001", (0,)),
    AttachScene("killed", "RUN004", (2,)),
    AttachScene("killed-at-start", "RUN004", (2,)),
    AttachScene("joins-late", "RUN001", (1,), world=2),
    AttachScene("receives", "RUN001", (2,)),
    AttachScene("fsdp-sleeps", "RUN001", (2,)),
    AttachScene("accelerate-sleeps", "RUN001", (2,), needs=("accelerate",)),
    AttachScene("lightning-sleeps", "RUN001", (1,), launch="Lightning", world=2, needs=("lightning.pytorch",)),
    AttachScene("sleeps", "RUN001", (1,), launch="torchrun", world=2),
    AttachScene("sleeps", "RUN001", (1,), launch="mpirun", world=2),
    AttachScene("sleeps", "RUN001", (1,), launch="torch.multiprocessing", world=2),
    AttachScene("sleeps", "RUN001", (2,), place="own PID namespaces"),
    AttachScene("sleeps", "RUN001", (2,), place="hosts over --share"),
    AttachScene("gathers", "RUN006", (3,), place="srun --overlap", world=4),
    AttachScene("sleeps", "RUN001", (1,), place="Ray Train", world=2, needs=("ray", "pandas")),
    AttachScene("sleeps", "RUN001", (2,), place="seccomp filter"),
    AttachScene("is-stopped", "RUN001", (2,), place="another user"),
    AttachScene("is-stopped", "RUN001", (2,), place="PR_SET_DUMPABLE 0"),
    AttachScene("is-stopped", "RUN001", (2,), place="no CAP_SYS_PTRACE"),
)
"""Jobs that hang."""
REFUSED = (
    AttachScene("sleeps", ranks=(0, 1, 2), place="another user", refused="The process belongs to uid"),
    AttachScene("sleeps", ranks=(0, 1, 2), place="PR_SET_DUMPABLE 0", refused="PR_SET_DUMPABLE is 0"),
    AttachScene("sleeps", ranks=(0, 1, 2), place="no CAP_SYS_PTRACE", refused="without the capability CAP_SYS_PTRACE"),
    AttachScene("sleeps", ranks=(0, 1, 2), place="seccomp filter, PR_SET_DUMPABLE 0", refused="PR_SET_DUMPABLE is 0"),
)
"""Jobs whose stacks the kernel refuses to show, and that look the same without them."""
HEALTHY = (
    AttachScene("moves"),
    AttachScene("ddp-moves"),
    AttachScene("fsdp-moves"),
    AttachScene("fsdp-even"),
    AttachScene("passes-breakpoints"),
    AttachScene("accelerate-moves", needs=("accelerate",)),
    AttachScene("lightning-moves", launch="Lightning", world=2, needs=("lightning.pytorch",)),
    AttachScene("row-moves"),
    AttachScene("slow-steps"),
    AttachScene("computes"),
    AttachScene("saves"),
    AttachScene("row-is-long"),
    AttachScene("validates"),
    AttachScene("loads-first", "RUN001", (2,), "info"),
    AttachScene("exchanges-much"),
    AttachScene("tokenizes", "RUN010", (0,), "info"),
    AttachScene("tokenizes-in-pool", "RUN010", (0,), "info"),
    AttachScene("tokenizes-in-threads", "RUN010", (0,), "info"),
    AttachScene("packs", "RUN010", (0,), "info"),
    AttachScene("downloads", "RUN010", (0,), "info"),
    AttachScene("moves", place="own PID namespaces"),
    AttachScene("moves", place="hosts over --share"),
    AttachScene("moves", place="srun --overlap", world=4),
)
"""Jobs that make progress, on one rank at least."""
SCENES = (*HANGS, *REFUSED, *HEALTHY)


def play(scene: AttachScene, folder: Path, *arguments: object) -> list[str]:
    """Start the job of a scene, attach to it, and return what is wrong about the result or the job afterwards."""
    (wrong,) = play_shared(scene, folder, 1, *arguments)
    return wrong


def play_shared(scene: AttachScene, folder: Path, times: int, *arguments: object) -> list[list[str]]:
    """Attach to one job of a scene as many times; return what is wrong each time."""
    with job_of(scene, folder) as job:
        return [_attach(scene, job, *arguments) for _ in range(times)]


def job_of(scene: AttachScene, folder: Path) -> AbstractContextManager[TrainingJob]:
    """A context with the job of a scene."""
    if scene.place:
        return PLACES[scene.place](scene.name, folder, scene.world)
    return running(scene.name, folder, scene.world, scene.launch, scene.needs)


def _attach(scene: AttachScene, job: TrainingJob, *arguments: object) -> list[str]:
    before = job.states()
    attached = job.attach(*arguments)
    after = job.states()
    expected = (scene.check, [*scene.ranks], scene.severity)
    alarms = [finding for finding in attached.findings if finding[2] != "info"]
    wrong = []
    if alarms != [expected] * scene.is_alarm or (scene.check and expected not in attached.findings):
        wrong.append(f"found {attached.findings}, expected {expected if scene.check else 'no alarm'}")
    if attached.code != scene.code:
        wrong.append(f"exit code {attached.code}: {attached.report.get('outcome')} {attached.stderr.strip()}")
    if scene.refused:
        wrong.extend(_wrong_refusal(scene, attached))
    if before != after:
        wrong.append(f"the processes of the job were {before} and are {after}")
    return wrong


def _wrong_refusal(scene: AttachScene, attached: Attached) -> list[str]:
    """What is wrong about the reason for which ranks could not be read, and about the way to read them."""
    outcome = attached.report.get("outcome") or {}
    reason, remedies = outcome.get("reason", ""), outcome.get("collect", ())
    read = f"the stacks of {ranks_in_words(scene.ranks)} could not be read: "
    is_right = reason.startswith(read) and scene.refused in reason and len(remedies) == 1
    return [] if is_right else [f"refused as {reason!r}, remedies {remedies}"]
