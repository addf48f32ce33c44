"""Faults that only a measurement finds, as ``--probe full`` does it: slow and lossy paths, processors, storage, sums.

All hosts but those at fault are alike; they share the processors of this machine, so what is usual varies. Scenes of
full probes take 15 to 25 seconds each: tests play those of :data:`IN_TESTS`, ``benchmarks/full_probes.py`` plays all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.live.healthy_jobs import everywhere
from tests.faults.live.network_scenes import add_interface, job
from tests.faults.live.scenes import LiveScene
from tests.faults.live.stage import Act, Play, Stage, among, on, ranks
from tests.lab.hosts import LabHost
from tests.lab.load import busy_processor
from tests.lab.needs import clean_environ
from tests.lab.network import rate, token_bucket
from tests.lab.quality import heed_loss, intermittent, lossy, packet_by_packet, second_switch, slow_boundary, slow_link
from tests.lab.sample import ALL
from tests.lab.storage import disk, own_directory, small_directory

FULL = ("--probe", "full")
SECONDS = 90.0
"""After which a play of full probes is killed: torch is loaded once for each rank, on two processors at worst."""
SLOW = "10mbit"
WRONG_SUM = Path(__file__).parent / "wrong_sum"
"""A plug-in of torch on PYTHONPATH; see its wrong_sum.py."""
OWN_BACK_END = {
    "PYTHONPATH": f"{WRONG_SUM}:{clean_environ(Path())['PYTHONPATH']}",
    "PL_TRAINER_PROCESS_GROUP_BACKEND": "wrong_sum",
}
"""A job that asks for it."""
LAST_PROCESSOR = max(os.sched_getaffinity(0))

BUSY_HOSTS = 3
"""Where all share two processors, one that is busy stands out among few ranks alone."""
SPINNERS = 12
"""Programs that have a processor beside a rank that is bound to it, while matrix products are measured: beside so many
all of its life, a rank would need half a minute to load torch."""
TEST_HOSTS = 4
SUM_HOSTS = 2
"""Every rank knows the right sum, so that the wrong one needs no majority."""
IN_TESTS = ("wrong sum", *(("slow card",) if ALL else ()))
"""What tests play, with :data:`TEST_HOSTS`; a slow host is played with all options, and a slow card with
DOCTOR_LONG_TESTS=1. Left to the benchmark: half of so few hosts is no boundary that could be told from slow hosts, a
host that is slow at times needs more rounds, and a busy processor does not stand out where other tests keep all of them
busy. Tests of the stages themselves lose packets, and have full and unshared disks."""


def full(count: int, *before: Act, **environ: str) -> Play:
    """One rank on each of so many hosts, full probes between them."""
    return fully(job(count, *before, **environ))


def fully(play: Play) -> Play:
    """The same with full probes."""
    return replace(play, options=(*play.options, *FULL), seconds=SECONDS)


def bound(count: int, odd: int) -> Play:
    """The rank of the host ``odd`` is bound to one processor of the machine, which the others may use too."""
    groups = tuple(
        ranks(number, shell=f"taskset --pid --cpu-list {LAST_PROCESSOR} $$ >&2" if number == odd else "")
        for number in range(count)
    )
    return fully(Play(count, groups))


def now_and_then(host: LabHost) -> object:
    """10 Mb/s for a second of every one and a half: in some rounds of a measurement, and not in others."""
    return intermittent(host, SLOW, slow=1.0, well=0.5)


def path_scenes(count: int) -> dict[str, LiveScene]:
    """Faults of paths in a job of so many hosts; the odd one is neither the first nor the last."""
    odd, half = count - 2, tuple(range(count // 2, count))
    name, well = f"node{odd}", full(count)
    on_cables = (everywhere(count, heed_loss), everywhere(count, packet_by_packet))
    return {
        "loss": LiveScene(
            f"one of {count} hosts loses 5 % of its packets",
            "NET015",
            full(count, *on_cables, on(odd, lossy, 5)),
            full(count, *on_cables),
            severity="warning",
            ranks=(odd,),
            hosts=(name,),
            exclude=(name,),
            also=("NET014", "NET027"),
        ),
        "slow host": slow_path(
            f"one of {count} hosts at 10 Mb/s",
            full(count, on(odd, rate, SLOW)),
            full(count, everywhere(count, rate, "100mbit")),
            odd,
            exclude=True,
        ),
        "slow link": slow_path(
            f"one link between two of {count} hosts at 10 Mb/s",
            full(count, among((1, odd), slow_link, SLOW)),
            well,
            1,
            odd,
        ),
        "slow boundary": slow_path(
            f"the boundary between two halves of {count} hosts at 10 Mb/s",
            full(count, among(half, slow_boundary, SLOW)),
            full(count, among(half, second_switch)),
            *range(count),
        ),
        "intermittent host": slow_path(
            f"one of {count} hosts at 10 Mb/s intermittently",
            full(count, on(odd, now_and_then)),
            well,
            odd,
            exclude=True,
        ),
    }


def card_scenes(count: int) -> dict[str, LiveScene]:
    """A card that carries the collectives alone, as InfiniBand does beside an Ethernet on which all else goes: here a
    back end over Gloo uses ``eth1``, and the bandwidth is measured over ``eth0``."""
    odd = count - 2
    cards = tuple(on(number, add_interface, "eth1", f"10.30.0.{number + 1}/24") for number in range(count))
    name = f"node{odd}"

    def play(*more: Act) -> Play:
        return full(count, *cards, *more, NCCL_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth1", **OWN_BACK_END)

    slow = LiveScene(
        f"one of {count} hosts with a slow card for the backend of the job",
        "NET014",
        play(on(odd, slow_card, "eth1", SLOW)),
        play(),
        severity="warning",
        ranks=(odd,),
        hosts=(name,),
        exclude=(name,),
        also=("NET027",),
    )
    return {"slow card": slow}


def slow_card(host: LabHost, name: str, limit: str) -> None:
    """A second interface of the host carries ``limit`` in each direction."""
    host.sh(f"tc qdisc replace dev {name} root {' '.join(token_bucket(limit))}")
    host.switch.run("tc", "qdisc", "replace", "dev", f"{host.port}-{name}", "root", *token_bucket(limit))


def slow_path(title: str, faulty: Play, twin: Play, *numbers: int, exclude: bool = False) -> LiveScene:
    """A path that is slow by the fault of the hosts with these ``numbers``. What a narrow place can't take it drops
    (NET015), and collectives wait for it (NET027)."""
    names = tuple(f"node{number}" for number in numbers)
    return LiveScene(
        title,
        "NET014",
        faulty,
        twin,
        severity="warning",
        ranks=numbers,
        hosts=names,
        exclude=names if exclude else (),
        also=("NET015", "NET027"),
    )


@dataclass(frozen=True)
class Spinning:
    """For :attr:`Play.during`: :data:`SPINNERS` programs of ``host`` spin while matrix products are measured."""

    host: int

    def __call__(self, stage: Stage) -> None:
        """Have them ready, and wait for the moments of their beginning and end."""
        with busy_processor(stage.hosts[self.host], LAST_PROCESSOR, SPINNERS, waiting=True) as begin:
            self._until(stage, "matrix products")
            begin()
            self._until(stage, "groups:")

    def _until(self, stage: Stage, words: str) -> None:
        """These are said, or all is over."""
        count = len(stage.play.started)
        stage.until(lambda: stage.says(words) or len(stage.ended()) == count, stage.play.seconds)


def busy_scenes(count: int) -> dict[str, LiveScene]:
    """A rank that shares its processor with programs that spin."""
    odd = count - 2
    busy = LiveScene(
        f"one of {count} ranks on a busy processor",
        "GPU024",
        replace(bound(count, odd), during=Spinning(odd)),
        bound(count, odd),
        severity="warning",
        ranks=(odd,),
        hosts=(f"node{odd}",),
        also=("NET027",),
    )
    return {"busy processor": busy}


def storage_scenes(count: int) -> dict[str, LiveScene]:
    """Faults of a directory that doctor.toml names on every host."""
    odd = count - 2
    well = full(count, everywhere(count, name_directory, "checkpoint"))
    dumps = full(count, everywhere(count, name_directory, "flight-recorder"))

    def unfit(title: str, twin: Play, fault: Callable[[LabHost], object], severity: str = "error") -> LiveScene:
        return LiveScene(
            f"the {title} of {count} hosts",
            "HOST004",
            replace(twin, before=(*twin.before, on(odd, fault))),
            twin,
            severity=severity,
            ranks=(odd,),
            hosts=(f"node{odd}",),
        )

    return {
        "unshared storage": unfit("checkpoint directory is another one on one", well, another_directory),
        "full storage": unfit("checkpoint directory is full on one", well, full_directory),
        "slow storage": unfit("directory for dumps is slow on one", dumps, slow_directory, "warning"),
    }


def directory_of(host: LabHost) -> Path:
    """Where all hosts have the directory that they name."""
    return host.folder.parent / "runs"


def name_directory(host: LabHost, role: str) -> None:
    """The host's doctor.toml names the directory, which is there."""
    directory_of(host).mkdir(exist_ok=True)
    (host.folder / "doctor.toml").write_text(f'directories = {{ {role} = "{directory_of(host)}" }}\n')


def another_directory(host: LabHost) -> None:
    """What the host writes there no other host sees."""
    own_directory(host, directory_of(host))


def full_directory(host: LabHost) -> object:
    """There is room for a megabyte."""
    return small_directory(host, directory_of(host))


def slow_directory(host: LabHost) -> object:
    """The host has a disk of its own there, which takes 2 MB a second."""
    return disk((host,), directory_of(host), bandwidth=2_000_000)


def sum_scenes(count: int) -> dict[str, LiveScene]:
    """A collective that gives one rank another result, by a back end made for that."""
    odd = count - 1
    wrong = LiveScene(
        f"a wrong sum on one of {count} hosts",
        "NET025",
        full(count, **OWN_BACK_END, WRONG_SUM_RANK=str(odd)),
        full(count, **OWN_BACK_END),
        ranks=(odd,),
        hosts=(f"node{odd}",),
    )
    return {"wrong sum": wrong}


def scenes(count: int) -> dict[str, LiveScene]:
    """All of them by kind, of so many hosts where it matters."""
    every = (
        path_scenes(count) | card_scenes(count) | busy_scenes(BUSY_HOSTS) | storage_scenes(count) | sum_scenes(count)
    )
    return {kind: replace(scene, overtime=SECONDS - scene.faulty.timeout) for kind, scene in every.items()}


def twins_of(chosen: Sequence[LiveScene]) -> tuple[Play, ...]:
    """Their healthy twins, each once."""
    return tuple(dict.fromkeys(scene.twin for scene in chosen))


SCENES = tuple(scenes(8).values())
"""What the benchmark plays."""
