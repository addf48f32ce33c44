"""Full probes over hosts of the lab: some faults, on few hosts; the benchmark plays all of them, again and again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.full_probes import main
from tests.faults.live.full_scenes import IN_TESTS, SCENES, SECONDS, SUM_HOSTS, TEST_HOSTS, scenes
from tests.faults.live.scenes import LiveScene, score
from tests.faults.live.stage import perform

REASON = f"15 to 25 s: benchmarks/full_probes.py plays it; {len(IN_TESTS)} of {len(SCENES)} are played here"
BY_BENCHMARK = "wrong sum"
"""The scene of ``benchmarks/full_probes.py --part``."""
LEFT_OUT = pytest.mark.skip(reason=REASON)


@pytest.mark.timeout(300)  # two plays, which the machine may be too busy for
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(scene, id=scene.title, marks=() if kind in IN_TESTS else LEFT_OUT)
        for kind, scene in scenes(TEST_HOSTS).items()
        if kind != BY_BENCHMARK
    ],
)
def test_scene(scene: LiveScene) -> None:
    result = score(scene)
    assert not result.complaints, "\n".join(result.complaints)


@pytest.mark.timeout(300)
def test_a_wrong_sum_by_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """Found on the right hosts, with no other alarm, and none about the same job without the fault."""
    main(["--part"])  # its exit code depends on how busy the machine is
    out, errors = capsys.readouterr()
    scene = scenes(SUM_HOSTS)[BY_BENCHMARK]
    if "skipped" in out:
        pytest.skip("the machine can't make hosts")
    assert f"\n| {scene.title.partition(' ')[2]} | {scene.id} | 1 | 1 | 1 | 0 | " in out, out + errors
    assert "\n| nothing: healthy |  | 1 |  |  | 0 | " in out, out + errors


@pytest.mark.timeout(300)
def test_all_options_at_once(tmp_path: Path) -> None:
    """One host of four is slow, and asked: who it is, along which groups, what would mend it, and whom to exclude."""
    excluded = tmp_path / "bad-hosts"
    slow = scenes(TEST_HOSTS)["slow host"].faulty
    options = ("--mesh", "dp=2,tp=2:1MiB", "--why", "--exclude-list", str(excluded))
    outcome = perform(replace(slow, options=(*slow.options, *options), seconds=2 * SECONDS))
    assert outcome.report is not None
    said = outcome.stderr(0)
    assert "dp (2 of 2, messages up to 25 MiB), tp (2 of 2, messages up to 1 MiB)" in said
    [finding] = [one for one in outcome.report.findings("NET014") if one["hosts"] == ["node2"]]
    assert {"restored by", "not restored by", "measured again", "not tried"} & {*finding["evidence"]}
    assert excluded.read_text().split() == ["node2"]
