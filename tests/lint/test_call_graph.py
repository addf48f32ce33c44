"""Faults in code that no start of a project reaches: functions that nothing uses, old folders, imports that fail."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE005"))
HEAD = "import torch.distributed as dist\n\n"
MAIN = "\nif __name__ == '__main__':\n    dist.init_process_group('nccl')\n"
HANG = "if dist.get_rank() == 0:\n    dist.barrier()\n"


def indented(text, by=4):
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


WAIT = "def wait():\n" + indented(HANG)
METHOD = "class Run:\n    def wait(self):\n" + indented(HANG, 8)


def findings(folder, files):
    return [one for _, one in findings_in(folder, files, BOOK, preview=True)]


def found(folder, files):
    return [one.severity.value for one in findings(folder, files)]


def of_main(body, calls=""):
    return HEAD + body + MAIN + indented(calls)


NEVER = {
    "a function that nothing names": of_main(WAIT),
    "one that only itself names": of_main(WAIT + "    wait()\n"),
    "two that name each other": of_main("def first():\n    wait()\n\n" + WAIT + "    first()\n"),
    "one that only an unused one names": of_main(WAIT + "\ndef unused():\n    wait()\n"),
    "a method that nothing calls": of_main(METHOD, "Run()\n"),
    "a class that nothing makes": of_main(METHOD + "\n    def go(self):\n        self.wait()\n"),
    "a class of which there is only an annotation": of_main("class Base:\n    pass\n\n" + METHOD),
    "a function that is not returned": of_main("def outer():\n" + indented(WAIT) + "    return 1\n", "outer()\n"),
    "one that an unused import would need": of_main("def main():\n    from other import name\n    wait()\n\n" + WAIT),
}
REACHED = {
    "a function that is called": of_main(WAIT, "wait()\n"),
    "one that is called in a loop without end": of_main(WAIT, "while True:\n    wait()\n"),
    "one that is called under a condition": of_main(WAIT, "if False or args.wait:\n    wait()\n"),
    "one in the other branch": of_main(WAIT, "if False:\n    pass\nelse:\n    wait()\n"),
    "one that is passed on": of_main(WAIT, "run(wait)\n"),
    "one in a table": of_main(WAIT + "\nTABLE = {'wait': wait}\n"),
    "one that is registered": of_main("@register('wait')\n" + WAIT),
    "one that a used one calls": of_main(WAIT + "\ndef used():\n    wait()\n", "used()\n"),
    "one of two that call each other": of_main("def first():\n    wait()\n\n" + WAIT + "    first()\n", "first()\n"),
    "one that is found by its name": of_main(WAIT, "globals()[name]()\n"),
    "a method that is called": of_main(METHOD, "Run().wait()\n"),
    "a method that an own method calls": of_main(METHOD + "\n    def go(self):\n        self.wait()\n", "Run().go()\n"),
    "a method that is found by its name": of_main(METHOD, "getattr(Run(), kind)()\n"),
    "a method that a base may call": of_main(METHOD.replace("Run", "Run(Callback)"), "Run()\n"),
    "a method of torch": of_main(METHOD.replace("wait", "forward").replace("Run", "Run(nn.Module)"), "Run()(1)\n"),
    "a function that is returned": of_main("def outer():\n" + indented(WAIT) + "    return wait\n", "outer()()\n"),
    "a context manager": of_main("@contextlib.contextmanager\n" + WAIT + "    yield\n", "with wait():\n    pass\n"),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_nothing_reaches_is_an_info(tmp_path, name):
    assert found(tmp_path, {"train.py": NEVER[name], "net.py": "import torch\n"}) == ["info"]


@pytest.mark.parametrize("name", REACHED)
def test_what_may_be_reached_is_no_info(tmp_path, name):
    assert found(tmp_path, {"train.py": REACHED[name], "net.py": "import torch\n"}) in (["error"], ["warning"])


@pytest.mark.parametrize("name", NEVER)
def test_of_a_file_alone_nothing_is_known(tmp_path, name):
    assert found(tmp_path, {"train.py": NEVER[name]}) in (["error"], ["warning"])


USES = {
    "an import": {"run.py": "from train import wait\n\nwait()\n"},
    "a module": {"run.py": "import train\n\ntrain.wait()\n"},
    "a module with another name": {"run.py": "import train as job\n\njob.wait()\n"},
    "all names": {"run.py": "from train import *\n\nwait()\n"},
    "a path in a text": {"run.py": "import train\n\nstart('train:wait')\n"},
    "a command": {"run.sh": "#!/bin/bash\npython -c 'import train; train.wait()'\n"},
    "a setting": {"run.yaml": "job:\n  call: train.wait\n"},
    "a page": {"README.md": "```\nfrom train import wait\n```\n"},
    "a notebook": {
        "run.ipynb": '{"cells": [{"cell_type": "code", "source": ["from train import wait\\n", "wait()"]}], '
        '"metadata": {}, "nbformat": 4}'
    },
}
NO_USES = {
    "a function of the same name": {"run.py": "def wait():\n    pass\n\nwait()\n"},
    "an import of another module": {"run.py": "from process import wait\n\nwait()\n"},
    "a method of the same name": {"run.py": "import train\n\nprocess.wait()\n"},
    "a sentence": {"README.md": "- `wait(rank)` in train.py: unfinished\n"},
    "a module that cannot be imported": {
        "run.py": "from train import wait\nfrom tools import log, gone\n\nwait()\n",
        "tools.py": "def log():\n    pass\n",
    },
}


@pytest.mark.parametrize("name", USES)
def test_other_files_may_use_a_function(tmp_path, name):
    files = {"train.py": of_main(WAIT), "net.py": "import torch\n"} | USES[name]
    assert found(tmp_path, files) in (["error"], ["warning"])


@pytest.mark.parametrize("name", NO_USES)
def test_other_files_may_have_another_one(tmp_path, name):
    assert found(tmp_path, {"train.py": of_main(WAIT), "net.py": "import torch\n"} | NO_USES[name]) == ["info"]


CONSTANTS = {
    "one that is called under a constant": of_main(WAIT, "if False:\n    wait()\n"),
    "one that is called under a constant and a condition": of_main(WAIT, "if args.wait and not True:\n    wait()\n"),
    "one in the other branch of a constant": of_main(WAIT, "if 1:\n    pass\nelse:\n    wait()\n"),
    "one in a loop that is not entered": of_main(WAIT, "while 0:\n    wait()\n"),
}
DEAD_CALLERS = [
    "from train import wait\n\nif False:\n    wait()\n",
    "from train import wait\n\nif False:  # wait for the others\n    wait()\n",
    "import train\n\ndef _old():\n    train.wait()\n",
    "import train\n\ndef main():\n    return\n    train.wait()\n\nmain()\n",
]


@pytest.mark.parametrize("name", CONSTANTS)
def test_calls_that_a_constant_excludes(tmp_path, name):
    assert found(tmp_path, {"train.py": CONSTANTS[name], "net.py": "import torch\n"}) in ([], ["info"])


@pytest.mark.parametrize("text", DEAD_CALLERS)
def test_callers_in_other_modules_that_no_run_reaches(tmp_path, text):
    files = {"train.py": of_main(WAIT), "net.py": "import torch\n", "run.py": text}
    assert found(tmp_path, files) in ([], ["info"])
    files["more.py"] = "from train import wait\n\nwait()\n"
    assert found(tmp_path, files) in (["error"], ["warning"])


COPIES = {
    "lib/meter.py": HEAD + METHOD,
    "run.py": "from lib.meter import Run\n\nif __name__ == '__main__':\n    run = Run()\n",
    "copy/lib/meter.py": HEAD + METHOD,
    "copy/run.py": "from lib.meter import Run\n\nRun().wait()\n",
}


def test_a_method_of_a_copy_is_called_by_the_programs_of_that_copy(tmp_path):
    of_files = {one.source.file.rpartition(tmp_path.name)[2]: one for one in findings(tmp_path, COPIES)}
    assert {name: one.severity.value for name, one in of_files.items()} == {
        "/lib/meter.py": "info",
        "/copy/lib/meter.py": "warning",
    }


def test_a_program_beside_a_copy_may_call_a_method(tmp_path):
    files = COPIES | {"start.py": "from lib.meter import Run\n\nRun().wait()\n"}
    [of_both] = findings(tmp_path, files)
    assert (of_both.severity.value, len(of_both.evidence["also"])) == ("warning", 1)


SETUP = "import setuptools\n\nsetuptools.setup({})\n"
ENTRY = "entry_points={'console_scripts': ['go=lib.train:wait']}"
OFFERS = {
    "the package imports it": {"lib/__init__.py": "from lib.train import wait\n"},
    "the package imports all names": {"lib/__init__.py": "from .train import *\n"},
    "the package imports the module": {"lib/__init__.py": "from . import train\n"},
    "the module lists it": {"lib/train.py": of_main(WAIT + "\n__all__ = ['wait']\n")},
    "a page": {"README.md": "Call `wait()` before the first step.\n"},
    "a test": {"tests/test_train.py": "from lib.train import wait\n\ndef test_wait():\n    wait()\n"},
    "an example": {"examples/run.py": "from lib.train import wait\n\ndef main():\n    wait()\n"},
    "an entry point": {"setup.py": SETUP.format(ENTRY)},
    "a setting": {"run.yaml": "call: lib.train.wait\n"},
}
KEEPS = {
    "nothing": {},
    "a page in words": {"README.md": "The ranks wait for each other.\n"},
    "another function of the name": {
        "lib/__init__.py": "from lib.other import wait\n",
        "lib/other.py": "def wait():\n    pass\n",
        "README.md": "Call `wait()` before the first step.\n",
    },
    "an import that nothing uses": {"lib/use.py": "from lib.train import wait\n\ndef use():\n    wait()\n"},
}


@pytest.mark.parametrize(
    ("more", "is_info"),
    [*((one, False) for one in OFFERS.values()), *((one, True) for one in KEEPS.values())],
    ids=[*OFFERS, *KEEPS],
)
def test_what_an_installed_package_offers_may_be_called(tmp_path, more, is_info):
    files = {"lib/train.py": of_main(WAIT), "lib/__init__.py": "", "setup.py": SETUP.format("")}
    assert (found(tmp_path, files | more) == ["info"]) == is_info


@pytest.mark.parametrize(
    ("name", "other", "is_info"), [("own", "own", True), ("own", "more", False), ("lib", "own", False)]
)
def test_a_package_beside_the_one_that_is_named_offers_nothing(tmp_path, name, other, is_info):
    files = {
        "lib/train.py": of_main(WAIT),
        "lib/__init__.py": "from lib.train import wait\n",
        "setup.py": SETUP.format(f"\n    name='{name}',\n"),
        f"{other}/__init__.py": "",
    }
    assert (found(tmp_path, files) == ["info"]) == is_info


def test_others_may_call_all_public_methods_of_a_class_that_a_package_offers(tmp_path):
    files = {"lib/__init__.py": "from lib.train import Run\n", "setup.py": SETUP.format("")}
    assert found(tmp_path, {"lib/train.py": of_main(METHOD), **files}) == ["warning"]
    hidden = METHOD.replace("def wait", "def _wait")
    assert found(tmp_path, {"lib/train.py": of_main(hidden), **files}) == ["info"]


FIND = "from setuptools import find_packages, setup\n\nsetup(name='lib', packages=find_packages({}))\n"
DEEP = {"lib/part/train.py": of_main(WAIT), "lib/part/__init__.py": "from .train import wait\n", "net.py": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"setup.py": FIND.format("")}, ["info"]),
        ({"setup.py": FIND.format("exclude=['tests']")}, ["info"]),
        ({"setup.cfg": "[options]\npackages = find:\n"}, ["info"]),
        ({"setup.py": FIND.format(""), "lib/__init__.py": ""}, ["error"]),
        ({"setup.py": FIND.format("where='lib'")}, ["error"]),
        ({"setup.py": FIND.format("").replace("find_", "find_namespace_")}, ["error"]),
        ({"setup.py": FIND.format("").replace("))", ") + ['lib.part'])")}, ["error"]),
        ({"setup.cfg": "[options]\npackages = find_namespace:\n"}, ["error"]),
        ({"setup.py": FIND.format(""), "lib/setup.py": FIND.format("")}, ["error"]),
    ],
)
def test_a_package_that_setuptools_does_not_find_has_no_callers_elsewhere(tmp_path, files, expected):
    assert found(tmp_path, DEEP | files) == expected


RUN = "if __name__ == '__main__':\n    wait()\n"
PLAIN = "def wait():\n    pass\n"
EXPORT = "from lib.other import wait\n"


@pytest.mark.parametrize(
    "files",
    [
        {"lib/__init__.py": EXPORT, "run.py": f"from lib import wait\n\n{RUN}"},
        {"lib/__init__.py": EXPORT.replace("lib", ""), "run.py": f"from lib import wait\n\n{RUN}"},
        {"lib/__init__.py": "", "lib/use.py": f"from .other import wait\n\n{RUN}"},
        {"lib/__init__.py": "from .train import wait\n", "run.py": f"from lib.other import wait\n\n{RUN}"},
        {"lib/__init__.py": "from .train import wait\n\n__all__ = ['wait']\n"},
        {"lib/use.py": "from .train import wait\n\n\ndef use():\n    wait()\n"},
        {
            "lib/use.py": "from .train import wait\n\n\ndef use():\n    wait()\n",
            "run.py": f"from lib.other import wait\n\n{RUN}",
        },
    ],
)
def test_an_import_of_the_same_name_from_another_module_is_no_use(tmp_path, files):
    files = {"lib/train.py": of_main(WAIT), "lib/other.py": PLAIN} | files
    assert found(tmp_path, files) == ["info"]


@pytest.mark.parametrize(
    "files",
    [
        {"lib/__init__.py": "from lib.train import wait\n", "run.py": f"from lib import wait\n\n{RUN}"},
        {"lib/__init__.py": "from .train import wait\n", "run.py": "import lib\n\nlib.wait()\n"},
        {"lib/__init__.py": "from .train import wait\n", "run.py": f"from lib import *\n\n{RUN}"},
        {"lib/__init__.py": "from .train import wait as pause\n"},
        {"lib/__init__.py": "from .train import wait\n", "run.py": "import lib\n\ngetattr(lib, name)()\n"},
        {"lib/__init__.py": "from .train import wait\n", "run.py": "import_module(f'lib.{name}')\n"},
        {"lib/__init__.py": "from .train import wait\n", "README.md": "```\nfrom lib import wait\n```\n"},
        {"lib/__init__.py": "from .train import *\n", "run.py": f"from lib import wait\n\n{RUN}"},
        {"lib/__init__.py": "import lib.train\n", "run.py": "import lib\n\nlib.train.wait()\n"},
        {
            "lib/__init__.py": "",
            "tools.py": "from lib.train import wait\n",
            "run.py": f"from tools import wait\n\n{RUN}",
        },
        {"run.py": f"try:\n    from lib.other import wait\nexcept ImportError:\n    from lib.train import wait\n{RUN}"},
        {"restore.py": "import torch\nfrom lib.train import wait\n\ntorch.load('all.pt')\n"},
        {"lib/__init__.py": "from .gone import wait\n", "run.py": f"from lib import wait\n\n{RUN}"},
        {"other/lib/train.py": PLAIN, "run.py": f"from lib.train import wait\n\n{RUN}"},
    ],
)
def test_an_import_that_may_be_of_the_module_is_a_use(tmp_path, files):
    files = {"lib/train.py": of_main(WAIT), "lib/other.py": PLAIN} | files
    assert found(tmp_path, files) in (["error"], ["warning"])


def test_members_that_an_object_finds_by_name_are_no_names_of_its_module(tmp_path):
    own = "    def keep(self):\n        self.__dict__['kept'] = 1\n\n"
    files = {"train.py": of_main(METHOD.replace("    def", f"{own}    def", 1)), "net.py": "import torch\n"}
    assert found(tmp_path, files) == ["info"]


def test_of_a_part_of_a_repository_the_callers_are_unknown(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "part").mkdir()
    files = {"train.py": of_main(WAIT), "net.py": "import torch\n"}
    assert found(tmp_path / "part", files) == ["warning"]
    assert found(tmp_path, {}) == ["info"]


def test_the_reason_is_a_step_of_the_flow(tmp_path):
    (one,) = findings(tmp_path, {"train.py": of_main(WAIT), "net.py": "import torch\n"})
    assert one.evidence["flow"][-1]["note"] == "nothing that runs in the project uses wait"


STARTS = {
    "README.md": "```\ntorchrun --nproc-per-node=8 main.py\ntorchrun --nproc-per-node=8 <program>\n```\n",
    "main.py": of_main(""),
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"archive/train.py": of_main(HANG)}, ["info"]),
        ({"src/old_code/train.py": of_main(HANG)}, ["info"]),
        ({"useless_code/train.py": of_main(HANG)}, ["info"]),
        ({"retired_benchmarks/speech/train.py": of_main(HANG)}, ["info"]),
        ({"new_benchmarks/speech/train.py": of_main(HANG)}, ["error"]),
        ({"v1/failed-attempt/train.py": of_main(HANG)}, ["info"]),
        ({"elder/runner_elder/train.py": of_main(HANG)}, ["info"]),
        ({"model_old/train.py": of_main(HANG)}, ["info"]),
        ({"model_old/train.py": of_main(HANG), "run.sh": "#!/bin/bash\ntorchrun model_old/train.py\n"}, ["error"]),
        ({"golden/train.py": of_main(HANG)}, ["error"]),
        ({"four_year_older_data/train.py": of_main(HANG)}, ["error"]),
        ({"tools/bug_repros/hang/train.py": of_main(HANG)}, ["info"]),
        ({"bug_features/train.py": of_main(HANG)}, ["error"]),
        ({"net-original/main.py": of_main(HANG)}, ["info"]),
        ({"net-original/tools/train.py": of_main(HANG), "tools/train.py": "print()\n"}, ["info"]),
        ({"net-original/train.py": of_main(HANG), "tools/train.py": "print()\n"}, ["error"]),
        ({"net-original/main.py": of_main(HANG), "run.sh": "torchrun net-original/main.py\n"}, ["error"]),
        ({"archive/train.py": of_main(HANG), "use.py": "from archive import train\n"}, ["error"]),
        ({"archive/train.py": of_main(HANG), "run.sh": "#!/bin/bash\ntorchrun archive/train.py\n"}, ["error"]),
    ],
)
def test_programs_of_old_folders(tmp_path, files, expected):
    assert found(tmp_path, STARTS | files) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train_backup(2).py": of_main(HANG)}, ["info"]),
        ({"train copy.py": of_main(HANG)}, ["info"]),
        ({"train_gold.py": of_main(HANG)}, ["error"]),
        ({"train_old.py": of_main(HANG), "use.py": "from train_old import main\n"}, ["error"]),
        ({"train_old.py": of_main(HANG), "run.sh": "#!/bin/bash\ntorchrun train_old.py\n"}, ["error"]),
    ],
)
def test_old_copies_of_programs(tmp_path, files, expected):
    assert found(tmp_path, STARTS | files) == expected


COPIED = {"other/train.py": of_main(HANG), "other/net.py": "class Net:\n    pass\n", "other/LICENSE": "MIT\n"}
LAUNCHES = {"run.sh": "#!/bin/bash\ntorchrun --nproc-per-node=8 main.py\ntorchrun $@\n", "main.py": of_main("")}
IMPORTS = {"use.py": "from other.net import Net\n\nNet()\n"}
RUNS = "import os\n\ncommand = 'torchrun \\\n    --nproc-per-node={} use.py'.format(8)\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (STARTS | COPIED | IMPORTS, ["info"]),
        (COPIED | IMPORTS | {"run.sh": "#!/bin/bash\ntorchrun use.py\n"}, ["info"]),
        (COPIED | IMPORTS | {"other/run.sh": "#!/bin/bash\ntorchrun train.py\n"}, ["error"]),
        (COPIED | IMPORTS | LAUNCHES, ["info"]),
        (COPIED | {"use.py": "from .other.net import Net\n\nNet()\n"} | LAUNCHES, ["info"]),
        (COPIED | {"use.py": "from parts.nets.other import net\n\nnet.Net()\n"} | LAUNCHES, ["info"]),
        (COPIED | {"use.py": "from parts.nets.another import net\n\nnet.Net()\n"} | LAUNCHES, ["error"]),
        (COPIED | IMPORTS | {"jobs.py": RUNS + "os.system(command)\n"}, ["info"]),
        (COPIED | IMPORTS | {"jobs.py": RUNS + "print(command)\n"}, ["error"]),
        (COPIED | IMPORTS | {"jobs.py": RUNS.replace("command", "#") + "os.system(sys.argv[1])\n"}, ["error"]),
        (COPIED | IMPORTS | {"jobs.py": RUNS.replace("use.py", "other/train.py") + "os.system(command)\n"}, ["error"]),
        (COPIED | IMPORTS, ["error"]),
        (STARTS | COPIED, ["error"]),
        (STARTS | COPIED | IMPORTS | {"run.sh": "#!/bin/bash\ncd other && torchrun train.py\n"}, ["error"]),
        (STARTS | COPIED | IMPORTS | {"run.sh": "#!/bin/bash\ntorchrun -m other.train\n"}, ["error"]),
    ],
)
def test_programs_of_copied_projects_that_are_only_imported(tmp_path, files, expected):
    assert found(tmp_path, files) == expected


INSTALLED = {
    "libs/other-main/examples/example.py": of_main(HANG),
    "libs/other-main/other/__init__.py": "",
    "libs/other-main/setup.py": "from setuptools import setup\n\nsetup(packages=['other'])\n",
    "libs/other-main/LICENSE": "MIT\n",
    "use.py": "from other import Net\n\nNet()\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "```\npip install -e libs/other-main\n```\n"}, ["info"]),
        ({"README.md": "```\npip install -e ./libs/other-main/\n```\n"}, ["info"]),
        ({"install.sh": "#!/bin/bash\npip install 'libs/other-main[all]'\n"}, ["info"]),
        ({"README.md": "```\npip install other\n```\n"}, ["error"]),
        (
            {"README.md": "```\npip install -e libs/other-main\ntorchrun libs/other-main/examples/example.py\n```\n"},
            ["error"],
        ),
        (
            {
                "README.md": "```\npip install -e libs/other-main\n```\n",
                "eval.sh": "#!/bin/bash\ntorchrun $D/example.py\n",
            },
            ["error"],
        ),
    ],
)
def test_programs_beside_the_package_of_a_copied_project(tmp_path, files, expected):
    assert found(tmp_path, LAUNCHES | INSTALLED | files) == expected


NEEDS = {"nets/train.py": "from losses import Loss\n" + of_main(HANG), "common/losses.py": "class Loss:\n    pass\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["info"]),
        ({"nets/losses.py": "class Loss:\n    pass\n"}, ["error"]),
        ({"losses.py": "class Loss:\n    pass\n"}, ["error"]),
        ({"common/losses.py": "class Other:\n    pass\n"}, ["error"]),
        ({"run.sh": "#!/bin/bash\nexport PYTHONPATH=$PWD/common\n"}, ["error"]),
        ({"requirements.txt": "losses==1.2\n"}, ["error"]),
        ({"nets/run.sh": "#!/bin/bash\ntorchrun train.py\n"}, ["error"]),
        ({"nets/train.py": "import sys\nsys.path.append('common')\n" + NEEDS["nets/train.py"]}, ["error"]),
    ],
)
def test_modules_in_folders_that_are_not_on_the_path(tmp_path, files, expected):
    assert found(tmp_path, NEEDS | files) == expected


LACKS = {
    "train.py": "from tools.nce import Loss\nfrom tools.log import note\n" + of_main(HANG),
    "tools/__init__.py": "",
    "tools/log.py": "def note():\n    pass\n",
}
FROM_BELOW = {"jobs/train.py": LACKS["train.py"], "train.py": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["info"]),
        ({"train.py": "import tools.nce\n" + of_main(HANG)}, ["info"]),
        ({"train.py": "from tools import nce\n" + of_main(HANG)}, ["info"]),
        ({"train.py": "from tools.nce.loss import Loss\n" + of_main(HANG)}, ["info"]),
        (FROM_BELOW, ["info"]),
        (FROM_BELOW | {"jobs/train.py": "import tools.nce\n" + of_main(HANG)}, ["error"]),
        ({"tools/nce.py": "class Loss:\n    pass\n"}, ["error"]),
        ({"tools/nce/loss.py": "class Loss:\n    pass\n"}, ["error"]),
        ({"tools/nce.cpython-312-x86_64-linux-gnu.so": ""}, ["error"]),
        ({"tools/nce.pyx": ""}, ["error"]),
        ({"more/nce.py": ""}, ["error"]),
        ({"tools/__init__.py": "from tools.log import *\n"}, ["error"]),
        ({"tools/__init__.py": "__path__.append('/opt/tools')\n"}, ["error"]),
        ({"tools/__init__.py": "def __getattr__(name):\n    return name\n"}, ["error"]),
        ({".gitignore": "nce*\n"}, ["error"]),
        ({".gitignore": "tools/*\n"}, ["error"]),
        ({".gitignore": "*.pyc\n__pycache__/*\n"}, ["info"]),
        ({".gitmodules": '[submodule "nce"]\n\tpath = tools/nce\n'}, ["error"]),
        ({"make.py": "open('tools/nce.py', 'w').write('')\n"}, ["error"]),
        ({"make.py": "Extension('tools.nce', [])\n"}, ["error"]),
        ({"setup.py": "import setuptools\n"}, ["error"]),
        ({"README.md": "```\ntorchrun train.py\n```\n"}, ["error"]),
        ({"run.sh": "#!/bin/bash\ntorchrun train.py\n"}, ["error"]),
        ({"train.py": "import sys\nsys.path.insert(0, '/opt')\n" + LACKS["train.py"]}, ["error"]),
        ({"train.py": "try:\n    import tools.nce\nexcept ImportError:\n    pass\n" + of_main(HANG)}, ["error"]),
    ],
)
def test_modules_that_a_package_of_the_project_lacks(tmp_path, files, expected):
    assert found(tmp_path, LACKS | files) == expected


GONE = {
    "jobs/train.py": "import os, sys\nsys.path.insert(1, os.getcwd())\n"
    "from tables.shapes import OldShapes\n" + of_main(HANG),
    "tables/shapes.py": "from tables.more import *\n\nclass Shapes:\n    pass\n",
    "tables/more.py": "import os\n\ndef size():\n    pass\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["info"]),
        ({"tables/more.py": "class OldShapes:\n    pass\n"}, ["error"]),
        ({"tables/more.py": "from elsewhere import *\n"}, ["error"]),
        ({"requirements.txt": "tables==1.2\n"}, ["error"]),
        ({"README.md": "`torchrun jobs/train.py`\n"}, ["error"]),
        ({"jobs/train.py": GONE["jobs/train.py"].replace("os.getcwd()", "'/opt'")}, ["error"]),
    ],
)
def test_a_module_that_no_longer_has_the_only_name_that_is_imported(tmp_path, files, expected):
    assert found(tmp_path, GONE | files) == expected


def using(body, head="import tools.log as log\n", before=""):
    return head + HEAD + WAIT + f"\ndef main():\n{indented(body)}\n\nif __name__ == '__main__':\n{before}    main()\n"


STOPS = {
    "a call": using("log.join()\nwait()\n"),
    "a test": using("if log.is_main():\n    print()\nwait()\n"),
    "a branch before": using("if print():\n    log.note()\nlog.join()\nwait()\n"),
    "a function before": using("setup()\nwait()\n") + "\ndef setup():\n    log.join()\n",
    "in the program": using("wait()\n", before="    log.join()\n"),
    "in the module": "import tools.log as log\nlog.join()\n" + of_main(HANG),
    "in the function": "import tools.log as log\n" + HEAD + f"def main():\n    log.join()\n{indented(HANG)}\nmain()\n",
}
RUNS = {
    "a name that there is": using("log.note()\nwait()\n"),
    "a branch": using("if print():\n    log.join()\nwait()\n"),
    "a condition": using("x = print() and log.join()\nwait()\n"),
    "an attempt": using("try:\n    log.join()\nexcept AttributeError:\n    pass\nwait()\n"),
    "too late": using("wait()\nlog.join()\n"),
    "too late in a branch": using("if print():\n    wait()\nlog.join()\n"),
    "too late by another function": using("again()\nlog.join()\n") + "\ndef again():\n    wait()\n",
    "too late in the program": using("log.join()\n", before="    wait()\n"),
    "a function that may return": using("setup()\nwait()\n")
    + "\ndef setup():\n    if print():\n        return\n    log.join()\n",
    "a class body": using("log.join()\nwait()\n").replace("\ndef main", "\nclass Run:\n    wait()\n\ndef main"),
    "a default": using("log.join()\nwait()\n").replace("def main()", "def main(x=wait())"),
    "a decorator": using("log.join()\nwait()\n").replace("def wait", "@start\ndef wait"),
    "another one of the name": using(
        "log.join()\nwait()\n", "import tools.log as log\nfrom logs import start\nlog = start(log)\n"
    ),
    "one that is set": using("log.join()\nwait()\n", "import tools.log as log\nlog.join = print\n"),
    "a computed name": using("log.join()\nwait()\n") + "\neval('wait()')\n",
    "another module": using("log.join()\nwait()\n", "import logs as log\n"),
}


@pytest.mark.parametrize("name", STOPS)
def test_every_run_stops_before(tmp_path, name):
    files = LACKS | {"train.py": STOPS[name]}
    (one,) = findings(tmp_path, files)
    assert one.severity.value == "info"
    assert "every run stops before: log." in one.evidence["flow"][-1]["note"]


@pytest.mark.parametrize("name", RUNS)
def test_some_run_goes_on(tmp_path, name):
    assert found(tmp_path, LACKS | {"train.py": RUNS[name]}) in (["error"], ["warning"])


@pytest.mark.parametrize(
    "files",
    [
        {"tools/log.py": "from tools.more import *\n"},
        {"tools/log.py": "def __getattr__(name):\n    return name\n"},
        {"tools/log.py": "if print():\n    def join():\n        pass\n"},
        {"tools/__init__.py": "from tools.log import Log as log\n"},
        {"other.py": "import tools.log\ntools.log.join = print\n"},
        {"other.py": "from train import wait\nwait()\n"},
        {"run.ipynb": '{"cells": [{"cell_type": "code", "source": ["import train"]}], "metadata": {}, "nbformat": 4}'},
    ],
)
def test_names_that_a_module_may_have_and_other_importers(tmp_path, files):
    assert found(tmp_path, LACKS | {"train.py": STOPS["a call"]} | files) in (["error"], ["warning"])


def test_methods_that_find_attributes_are_no_names_of_their_module(tmp_path):
    files = {"tools/log.py": "class Log:\n    def __getattr__(self, name):\n        return self\n"}
    assert found(tmp_path, LACKS | {"train.py": STOPS["a call"]} | files) == ["info"]
