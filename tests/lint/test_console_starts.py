"""Findings about several ranks are infos where a project shows starts of one process, also by its own commands."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE032"))
MODULE = """\
from accelerate import Accelerator


class Teacher:
    def __init__(self, model, optimizer, loader, accumulated=8):
        self.accelerator = Accelerator()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.accumulated = accumulated

    def train(self):
        for _ in range(1000):
            for _ in range(self.accumulated):
                loss = self.model(next(self.loader))
                self.accelerator.backward(loss / self.accumulated)
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
COMMAND = "import fire\nfrom dreams.teacher import Teacher\n\ndef main():\n    fire.Fire(Teacher)\n"
SETTINGS = '[project]\nname = "dreams"\n\n[project.scripts]\ndreams = "dreams.command:main"\n'
LEARN = "from dreams.teacher import Teacher\n\nTeacher(1, 2, 3).train()\n"
PROJECT = {
    "pyproject.toml": SETTINGS,
    "dreams/__init__.py": "",
    "dreams/teacher.py": MODULE,
    "dreams/command.py": COMMAND,
}


def pages(*lines):
    return {"README.md": "\n".join(("# Dreams", "```bash", "$ pip install dreams", *lines, "```", ""))}


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        (pages("$ dreams train --steps 8"), "info"),
        (pages("CUDA_VISIBLE_DEVICES=0 uv run dreams train"), "info"),
        (pages("dreams \\\\", "  train"), "info"),
        (
            {**pages("uv run learn.py"), "learn.py": LEARN},
            "info",
        ),
        (pages(), "warning"),
        (pages("$ dreams train", "$ accelerate launch -m dreams.command"), "warning"),
        (pages("$ dreams train  # on all GPUs"), "warning"),
        ({**pages("$ dreams train"), "run.sh": "accelerate launch -m dreams.command\n"}, "warning"),
        ({**pages("$ dreams train"), "pyproject.toml": SETTINGS.replace("dreams.command", "other.main")}, "warning"),
        ({**pages("$ dreams train"), "dreams/command.py": f"{COMMAND}import subprocess\n"}, "warning"),
    ],
)
def test_a_module_behind_a_command(tmp_path, files, severity):
    assert severities_in(tmp_path, {**PROJECT, **files}, BOOK, preview=True) == [("CODE032", severity)]


@pytest.mark.parametrize(("start", "severity"), [("$ dreams", "info"), ("$ torchrun -m dreams.command", "warning")])
def test_a_program_that_a_command_runs(tmp_path, start, severity):
    program = f'{MODULE}\n\ndef main():\n    Teacher(1, 2, 3).train()\n\n\nif __name__ == "__main__":\n    main()\n'
    files = {"pyproject.toml": SETTINGS, "dreams/__init__.py": "", "dreams/command.py": program, **pages(start)}
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE032", severity)]
