"""What the README shows to be copied works as it stands."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from doctor.core.check_registry import load_registry
from doctor.core.settings import Settings, choose, read_settings, require_known_limits
from doctor.facts import SoftwareFacts
from doctor.session import examine
from doctor.testing import healthy
from tests.lab.speed import patience

README = Path(__file__).parents[1] / "README.md"
PLUGINS = README.with_name("PLUGINS.md")

pytestmark = pytest.mark.skipif(not README.is_file(), reason="needs a checkout")


def block(heading, language):
    """The first block of code of that language below the heading."""
    section = README.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return textwrap.dedent(re.search(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1])


def test_it_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    assert max(map(len, text.splitlines())) <= 160
    assert len(text.encode()) <= 14_000


@pytest.mark.parametrize(
    ("python", "is_found"),
    [("3.9.18", True), ("3.10.2", True), ("3.11.0", False), ("3.11.7", False), ("3.12.1", False)],
)
def test_the_sample_of_a_check_compares_versions(tmp_path, python, is_found):
    """As text, 3.9 comes after 3.11."""
    path = tmp_path / "ours.py"
    path.write_text(block("Write a check", "python"))
    settings = Settings(plugins=(path,), select=("ACME001",))
    sketch = healthy(1, 2).alter(SoftwareFacts, ranks=(1,), python=python)
    everywhere = sketch.alter(SoftwareFacts, ranks=(0,), python="3.12.1")
    (result,) = examine(everywhere.job(), settings).results
    assert [(one.summary, one.ranks) for one in result.findings] == ([(f"Python {python}", (1,))] if is_found else [])


def test_the_sample_of_settings_is_read(tmp_path):
    path = tmp_path / "doctor.toml"
    path.write_text(block("Settings", "toml"))
    settings = read_settings(tmp_path, config=path)
    catalog = load_registry(plugins=False)
    assert choose(catalog, settings.select) == catalog
    require_known_limits(settings, catalog)
    assert settings.plugins == (tmp_path / "ours.py",)


def test_the_sample_of_a_plugin_passes_its_own_test(tmp_path):
    plugin, test, *_ = re.findall(
        r"^```python\n(.*?)^```", PLUGINS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "ours.py").write_text(plugin)
    (tmp_path / "test_ours.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={tmp_path}",
        "test_ours.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    settings = Settings(plugins=(tmp_path / "ours.py",), select=("ACME001",), limits={"ACME001.minor": 12})
    (result,) = examine(healthy(1, 2).alter(SoftwareFacts, python="3.11.9").job(), settings).results
    assert [one.ranks for one in result.findings] == [(0, 1)]
