"""The messages of other software: the form of the data, and how they are recognized."""

import pytest

from doctor.core.check_registry import builtin_checks
from doctor.knowledge.software_messages import (
    CAUSE,
    CONSEQUENCE,
    HARMLESS,
    LEAST_LETTERS,
    SoftwareMessage,
    components,
    messages_of,
)
from doctor.postmortem.logs.scanner import read_lines
from tests.lab.sample import ONE_OF_PATTERNS

CLASSES = {*(check.id for check in builtin_checks()), CAUSE, CONSEQUENCE, HARMLESS}


@pytest.mark.parametrize("component", components(), ids=lambda one: one.file)
def test_every_message_has_a_known_class_and_a_pattern(component):
    messages = messages_of(component.file)
    assert {one.about for one in messages} <= CLASSES
    assert len({one.text for one in messages}) == len(messages)
    for message in messages[::ONE_OF_PATTERNS]:
        if message.letters >= LEAST_LETTERS:
            text = message.text.replace("%d", "7").replace("%x", "7f").replace("%f", "1.5").replace("%%", "%")
            assert message.pattern.search(text)


def test_a_component_is_described_once():
    files = [one.file for one in components()]
    assert len(set(files)) == len(files)
    assert all("{message}" in one.line for one in components())
    assert all(any(cue in one.line for cue in one.cues) for one in components() if one.cues)


@pytest.mark.parametrize(
    ("text", "line", "matches"),
    [
        ("%s: Connect to %s failed : %s", "eth0: Connect to 10.0.0.1<7> failed : Connection refused", True),
        ("Active list loop at element %d", "Active list loop at  element 12", True),
        ("Active list loop at element %d", "Active list loop at element x", False),
        ("%d%% of %s", "20% of eth0", True),
        ("code (%x) at *", "code (0xff) at *", True),
    ],
)
def test_values_are_matched_by_their_kind(text, line, matches):
    assert (SoftwareMessage(text, CAUSE).pattern.search(line) is not None) is matches


def test_a_line_without_the_cue_of_a_component_is_not_its_message():
    said = "Active list loop at element 12"
    assert [one.kind for one in read_lines([f"n1:1:2 [0] NCCL WARN {said}"], "x")[0]][:1] == ["software.cause"]
    assert not [one for one in read_lines([said], "x")[0] if one.kind.startswith("software.")]


def test_what_a_run_survives_is_no_failure():
    from doctor.postmortem.job_assembly import sketch_of_lines

    said = "n1:1:2 [0] NCCL WARN Active list loop at element 12"
    steps = [f"step {number}: loss 0.5" for number in range(300)]
    for lines, kept in (([said], True), ([said, *steps], False), ([*steps, said], True)):
        _, evidence, _ = sketch_of_lines(lines, "x")
        assert bool(evidence.of("software.cause")) is kept


@pytest.mark.parametrize(
    ("file", "is_recognized"),
    [("/opt/site-packages/accelerate/launchers.py", True), ("/home/me/train.py", False), (None, True)],
)
def test_an_exception_of_another_package_is_not_that_of_a_component(file, is_recognized):
    frame = [f'  File "{file}", line 7, in run', "    start(options)"] if file else []
    raised = "ValueError: You need to use at least 2 processes to use `--multi_gpu`."
    events, _ = read_lines(["Traceback (most recent call last):", *frame, raised], "x")
    assert [one.value("component") for one in events if one.kind == "software.cause"] == ["Accelerate"] * is_recognized


def test_what_a_cpp_exception_says_is_recognized():
    lines = [
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  Tensors must be on distinct GPU devices",
    ]
    assert [one.value("about") for one in read_lines(lines, "x")[0] if one.kind == "software.check"] == ["GPU001"]
