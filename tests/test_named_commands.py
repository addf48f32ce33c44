"""Every command, option, id and family that a text of ours names exists, and blocks of commands can be pasted."""

import ast
import functools
import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest

from doctor.cli.main import app
from doctor.core.check import FAMILIES
from doctor.core.check_registry import builtin_checks
from doctor.lint.engine.registry import builtin_rules
from tests.lab.cases import assert_each
from tests.lab.shell import fault_of_fix, shell_fault

ROOT = Path(__file__).parents[1]
MANUALS = (
    "README.md",
    "CONTRIBUTING.md",
    "PLUGINS.md",
    "tests/README.md",
    "docs/how-to/my-job-hangs-now.md",
    "docs/how-to/run-without-an-edit.md",
)
PAGES = [
    *sorted((ROOT / "playbooks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in MANUALS),
]
SOURCES = [*sorted((ROOT / "doctor").rglob("*.py")), *sorted((ROOT / "checks").rglob("*.py"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix not in (".png", ".pyc", ""))
CODE = re.compile(r"^```.*?^```|(?<!`)`[^`\n]+`(?!`)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"""(?:^|(?<!from)[\s`"'/(}])"?\$?doctor"? +(?P<rest>[^`\n|;&#<>…)]*)""", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
IDS = {check.id for check in builtin_checks()} | {rule.id for rule in builtin_rules()}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ (?P<command>.*(?:\\\n.*)*)$", re.MULTILINE)
KNOWN = {name.upper() for name in (*IDS, *FAMILIES, *FAMILIES.values(), "ALL")}
SELECTION = re.compile(r"--(?:select|ignore)[ =]+[\"']?(?P<words>[A-Za-z0-9,]+)")

pytestmark = pytest.mark.skipif(not (ROOT / "playbooks").is_dir(), reason="needs a checkout")


@functools.cache
def code_in(path):
    """The parts of a text that are commands: code of Markdown, strings of Python, and lines of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        return "\n".join(span for one in strings if isinstance(one, str) for span in CODE.findall(one))
    if path.suffix == ".md":
        return "\n".join(CODE.findall(text))
    return "\n".join(line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))


def wrong_in(code):
    """The commands named in ``code`` that do not exist, or lack an option that they are given."""
    for match in COMMAND.finditer(code):
        words = words_of(match["rest"])
        if not words or not re.fullmatch(r"[a-z]+|--?[a-z-]+", words[0]):
            continue
        name = words[0]
        command = app if name.startswith("-") else app.get_command(click.Context(app), name)
        if command is None:
            yield f"doctor {name}"
            continue
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help", "-h"}
        if "--" in words:  # those that follow are another command's
            words = words[: words.index("--")]
        given = [found[0] for word in words if (found := OPTION.match(word))]
        strange = [option for option in given if option not in known]
        yield from (f"doctor {name} {option}" for option in strange)


def words_of(text):
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def labeled(paths):
    return [(str(path.relative_to(ROOT)), (path,)) for path in paths]


def test_named_commands_and_options_exist():
    assert_each(_names_existing_commands, labeled([*PAGES, *EXAMPLES, *SOURCES]))


def _names_existing_commands(path):
    assert list(wrong_in(code_in(path))) == []


def test_named_ids_and_families_exist():
    assert_each(_names_existing_ids, labeled([*PAGES, *EXAMPLES]))


def _names_existing_ids(path):
    selections = SELECTION.finditer(path.read_text(encoding="utf-8"))
    words = {word.upper() for match in selections for word in match["words"].split(",")}
    # ACME001 is the README's check of somebody else, and IDS stands for any.
    assert words - KNOWN - {"ACME001", "IDS"} == set()


def test_recipes_use_the_script():
    assert_each(_uses_the_script, labeled([*PAGES, *EXAMPLES]))


def _uses_the_script(path):
    """``python -m doctor`` looks for modules in the working directory before any line of ours runs."""
    assert not re.search(r"-m +(rank)?doctor(?![.\w])", path.read_text(encoding="utf-8"))


def test_blocks_of_commands_can_be_pasted():
    assert_each(_has_valid_blocks, labeled(path for path in PAGES if path.suffix == ".md"))


def _has_valid_blocks(path):
    assert list(faults_of_blocks(path.read_text(encoding="utf-8"), unlabeled="## What you see")) == []


def faults_of_blocks(text, unlabeled):
    """Faults of blocks of commands; the blocks that may lack a language are those below the heading ``unlabeled``."""
    for block in FENCE.finditer(text):
        where = f"\n{text[: block.start()]}".rpartition("\n## ")[2].partition("\n")[0]
        if block["language"] in ("bash", "sh", "shell") and (fault := shell_fault(textwrap.dedent(block["body"]))):
            yield f"{where}: {fault}"
        if block["language"] == "console":
            yield from filter(None, (shell_fault(match["command"]) for match in PROMPT.finditer(block["body"])))
        if block["language"] == "python" and not _is_python(block["body"]):
            yield f"{where}: not valid Python: {block['body'].strip()}"
        if not block["language"] and f"## {where}" != unlabeled:
            yield f"{where}: a block without a language"


def _is_python(text):
    try:
        return bool(ast.parse(textwrap.dedent(text)))
    except SyntaxError:
        return False


def test_faulty_blocks_are_found():
    wrong = "## Fix\n```bash\nkill <pid>\n```\n```bash\nsrun ...\n```\n```sh\nif true\n```\n"
    wrong += "```console\n$ echo 'x\n$ ls\n```\n```\nls\n```\n```python\nelse:\n```\n"
    faults = [fault.partition("\n")[0] for fault in faults_of_blocks(wrong, "## See")]
    assert faults[:2] == [
        "Fix: '<pid>' is a placeholder: write a name in capitals",
        "Fix: '...' is a placeholder: write a name in capitals",
    ]
    assert "syntax error" in faults[2]
    assert "matching" in faults[3]
    assert faults[4:] == ["Fix: a block without a language", "Fix: not valid Python: else:"]
    assert list(faults_of_blocks("## See\n```\nkill <pid>\n```\n```bash\nkill PID  # or: ls\n```\n", "## See")) == []
    assert "syntax error" in fault_of_fix("Run these commands:\nunset A\nif true\nthen")
    assert fault_of_fix("unset A") == fault_of_fix("Set the value, not `kill <pid>`.") == ""


def test_the_search_sees_what_it_has_to():
    """The sentences that once were wrong, and commands in each of the places where they stand."""
    wrong = "`doctor runs` names what grows\n```\nsrun doctor check --no-such\n```\n`torchrun --no-python doctor chekc`"
    assert list(wrong_in("\n".join(CODE.findall(wrong)))) == ["doctor runs", "doctor check --no-such", "doctor chekc"]
    assert list(wrong_in('"$doctor" check --selekt HOST')) == ["doctor check --selekt"]
    assert list(wrong_in("    run: doctor check --format github --fail-on x $OPTIONS")) == []
    assert sum(len(list(COMMAND.finditer(code_in(path)))) for path in [*PAGES, *EXAMPLES, *SOURCES]) > 60
