"""Comments that ignore findings: a reason is needed, and those of no use are told."""

import pytest

from doctor.lint.engine.suppressions import Suppressions, comments_in

KNOWN = {"CODE001": "code", "CODE003": "code", "ENV010": "launch"}


class OfRule:
    def __init__(self, rule_id):
        self.id, self.family = rule_id, KNOWN[rule_id]


def ignores(text, *, is_python=True):
    return Suppressions(comments_in(text, is_python=is_python))


def reason(text, rule_id, line, **how):
    found = ignores(text, **how).reason_for(OfRule(rule_id), (line,))
    return found and found[0]


@pytest.mark.parametrize(
    "text",
    [
        "load()  # doctor: ignore[CODE003] it is small",
        "load()  #doctor:ignore[code003] it is small",
        "load()  # doctor: ignore[CODE001, CODE003]: it is small",
        "load()  # doctor: ignore[code] it is small",
        "load()  # noqa  # doctor: ignore[CODE003] it is small",
        "# doctor: ignore[CODE003] it is small\nload()",
        "# doctor: ignore[CODE003] it is small\n# doctor: ignore[CODE001] that, too\nload()",
    ],
)
def test_the_line_and_the_one_below_are_ignored(text):
    assert reason(text, "CODE003", text.count("\n") + 1) == "it is small"


@pytest.mark.parametrize(
    "text",
    [
        "load()  # doctor: ignore[CODE003]",
        "load()  # doctor: ignore why not",
        "load()  # doctor: ignore[CODE001] another rule",
        "load('# doctor: ignore[CODE003] in quotes')",
        "load()\nx = 1  # doctor: ignore[CODE003] the line below",
        "x = 1  # doctor: ignore[CODE003] behind code, so not the next line\nload()",
    ],
)
def test_others_are_not(text):
    line = next(number for number, one in enumerate(text.split("\n"), 1) if one.startswith("load"))
    assert reason(text, "CODE003", line) is None


def test_comments_of_shell_and_yaml():
    text = "#SBATCH --ntasks=4\n#SBATCH --gpus=8 # doctor: ignore[ENV010] two are idle on purpose\n"
    assert reason(text, "ENV010", 2, is_python=False) == "two are idle on purpose"


def vain(text, judged=("CODE001", "CODE003"), used=()):
    comments = ignores(text)
    for rule_id, line in used:
        comments.reason_for(OfRule(rule_id), (line,))
    return [(hit.place.line, hit.summary) for hit in comments.unused(set(judged), KNOWN)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1  # doctor: ignore[CODE003]", "no reason"),
        ("x = 1  # doctor: ignore because", "names no rule"),
        ("x = 1  # doctor: ignore[CODE999] because", "no rule is called CODE999"),
        ("x = 1  # doctor: ignore[CODE003] because", "nothing is found here that CODE003 would ignore"),
    ],
)
def test_what_ignores_nothing_is_told(text, words):
    ((line, summary),) = vain(text)
    assert line == 1
    assert words in summary


def test_what_is_of_use_or_can_not_be_told_is_not():
    text = "load()  # doctor: ignore[CODE003] because"
    assert not vain(text, used=[("CODE003", 1)])
    assert not vain(text, judged=["CODE001"]), "the rule did not look"


def test_comments_end_where_a_file_can_not_be_read():
    assert comments_in("x = (  # doctor: ignore[CODE003] yes\n", is_python=True)[0].line == 1
