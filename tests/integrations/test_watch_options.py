"""What a user may say to the callback."""

from pathlib import Path

import pytest

from doctor.monitor.watch_options import WatchOptions


def test_the_defaults_are_the_documented_ones():
    options = WatchOptions()
    assert (options.on_error, options.on_hang, options.hang_after, options.every_n_steps) == (
        "warn",
        "report",
        None,
        50,
    )
    assert options.folder(Path("/runs"), print).path == Path("/runs/rankdoctor")
    assert WatchOptions(dirpath="/there").folder(Path("/runs"), print).path == Path("/there")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"on_error": "explode"}, "'warn' or 'raise'"),
        ({"on_hang": "kill"}, "'report' or 'abort'"),
        ({"probe": "full"}, "'none' or 'light'"),
        ({"hang_after": 0}, "at least 1 s"),
        ({"hang_after": float("nan")}, "at least 1 s"),
        ({"every_n_steps": 0}, "at least 1"),
        ({"every_n_steps": 2.5}, "at least 1"),
        ({"prometheus_port": 70000}, "a port"),
        ({"html_report": "no"}, "True, False or None"),
        ({"otlp": "collector:4318"}, "http://collector:4318"),
        ({"select": "NET"}, "expected a list"),
        ({"select": ["NTE"]}, "NTE"),
        ({"ignore": ["MEM999"]}, "MEM999"),
    ],
)
def test_what_can_t_be_meant_is_refused_in_words(said, words):
    with pytest.raises(ValueError, match=words):
        WatchOptions(**said)


def test_ids_and_families_are_known():
    WatchOptions(select=["NET", "mem001"], ignore=("progress",))
