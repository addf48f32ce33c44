"""Work on hostile values grows with their size and no faster: counted in steps or compared with a reference."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from doctor.analysis.launch_origin import MAX_HOSTS, expand_hosts
from doctor.cluster.hostlist import as_hostlist
from doctor.knowledge import environment_variables
from doctor.lint.engine import project_requirements
from doctor.lint.python.project.starts import other_starts

LIMIT = 20
"""Times that four times the size may take of the time for one: sixteen is quadratic work, and small sizes are noisy."""


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return best


def test_thousands_of_unknown_variables_are_cheap() -> None:
    """Edit distances, of which each name took one for nearly every known name before."""
    calls = 0
    distance = environment_variables.slips

    def counted(one: str, other: str, limit: int) -> int:
        nonlocal calls
        calls += 1
        return distance(one, other, limit)

    names = [f"NCCL_{letter}{number:04}_UNKNOWN_{letter * 3}" for number in range(1500) for letter in "QX"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment_variables, "slips", counted)
        for name in names:
            environment_variables.nearest.__wrapped__(name)
    assert calls <= 20 * len(names)


@pytest.mark.parametrize(
    "text",
    [
        ",".join(["h0x0[0-65000]"] * 320),
        "[" * 50_000,
        "a[" * 50_000,
        "n[1]" * 20_000,
        "n[0-1]" * 64,
        "n[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]",
        "n[" + "1," * 100_000 + "]",
        "n" * 100_000 + "[0-65000]",
        "n[0-999999999]",
    ],
)
def test_damaged_node_lists_are_given_up(text: str) -> None:
    assert len(expand_hosts(text)) <= MAX_HOSTS
    assert sum(map(len, expand_hosts(text))) <= 32 << 20


def test_node_lists_are_expanded() -> None:
    assert expand_hosts("gpu[01-03,7],login1") == ("gpu01", "gpu02", "gpu03", "gpu7", "login1")
    assert expand_hosts("r[1-2]n[08-09]x") == ("r1n08x", "r1n09x", "r2n08x", "r2n09x")
    assert len(expand_hosts("n[0-65535]")) == MAX_HOSTS
    assert expand_hosts("n[0-65536]") == ()
    assert expand_hosts(None) == expand_hosts("") == ()


def test_names_of_any_length_are_folded() -> None:
    names = ["node1", "node2", "9" * 6000, "9" * 6000 + "x"]
    assert as_hostlist(names) == ",".join(sorted(["9" * 6000, "9" * 6000 + "x", "node[1-2]"]))
    small, large = ("9" * size + "x" for size in (20_000, 80_000))
    assert seconds(lambda: as_hostlist([large])) < LIMIT * max(seconds(lambda: as_hostlist([small])), 1e-5)


def _arguments(count: int) -> str:
    return "".join(f"ARG A{number}=b\n" for number in range(count)) + "FROM $A1\n"


def _variables(count: int) -> str:
    return "".join(f"torchrun $n{number}.py\n" for number in range(count))


@pytest.mark.parametrize(
    ("work", "made"),
    [
        pytest.param(project_requirements._with_arguments, _arguments, id="arguments of an image"),
        pytest.param(lambda text: [*other_starts._lines_with_stems(text)], _variables, id="variables of commands"),
        pytest.param(lambda text: [*other_starts._commands(text)], "srun ".__mul__, id="commands on a line"),
        pytest.param(other_starts._apart, "srun ".__mul__, id="launchers on a line"),
        pytest.param(
            project_requirements._bound_of_cuda,
            lambda count: "cudatoolkit=11.3 channels:\n - pytorch\n" + "dependencies:" * count,
            id="a conda environment",
        ),
    ],
)
def test_texts_of_projects_are_read_a_few_times(work: Callable[[str], object], made: Callable[[int], str]) -> None:
    small, large = made(200), made(3200)
    assert seconds(lambda: work(large)) < 3 * LIMIT * max(seconds(lambda: work(small)), 1e-5)
