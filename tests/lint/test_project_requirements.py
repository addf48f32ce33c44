"""Releases that requirement files of a project permit."""

from __future__ import annotations

import os

import pytest

from doctor.lint.engine.project_requirements import bounds, is_installed, may_install, required_releases
from doctor.lint.engine.releases import Releases


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytorch-lightning==1.4.2\n", {"pytorch-lightning": "1.4.2"}),
        ("dependencies:\n  - pytorch-lightning=1.9.3\n", {"pytorch-lightning": "1.9.3"}),
        ("pytorch_lightning>=1.5,<2.0  # the old Trainer\n", {"pytorch-lightning": "1"}),
        ("lightning[extra]<1.7.0; python_version<'3.8'\n", {"lightning": "1.6"}),
        ("lightning~=2.0.1", {"lightning": "2.0"}),
        ('install_requires=["pytorch-lightning==1.6.*", "ray"]', {"pytorch-lightning": "1.6"}),
        ("lightning==1.*,<1.7", {"lightning": "1.6"}),
        ('pytorch-lightning = "^1.9"', {"pytorch-lightning": "1"}),
        ('lightning = {version = "1.9.4", extras = ["pytorch-extra"]}', {"lightning": "1.9.4"}),
        ('install_requires=["torch>=1.8", "lightning <= 1.9.5"]', {"lightning": "1.9.5"}),
        ("lightning>=2.0\ntorch\nray!=2.1\ntrain.py --lightning=3", {}),
        ("lightning<0", {}),
        ("  - pytorch=2.1.0=py3.10_cuda11.8_cudnn8.7.0_0\n", {"torch": "2.1.0"}),
        ("  - pytorch::pytorch=2.1\n  - conda-forge::lightning<2.1\n", {"torch": "2.1", "lightning": "2.0"}),
        ("  - pytorch-cuda=11.8=h7e8668a_5\n  - pytorch\n", {"pytorch-cuda": "11.8"}),
        (
            "# Name      Version     Build    Channel\n"
            "pytorch     1.13.1      py3.10_cuda11.7_cudnn8.5.0_0    pytorch\n"
            "ray         2.9.3       pypi_0\n",
            {"torch": "1.13.1", "ray": "2.9.3"},
        ),
        (
            "pytorch-lightning @ git+https://github.com/a/pytorch-lightning.git@v0.8.5_fixes#egg=x",
            {"pytorch-lightning": "0.8.5"},
        ),
        ('"lightning[extra] @ https://host/lightning-2.1.0.tar.gz"', {"lightning": "2.1.0"}),
        ("lightning @ git+https://github.com/a/lightning.git@main", {"lightning": ""}),
        ("lightning @ git+https://github.com/a/lightning.git", {"lightning": ""}),
    ],
)
def test_the_newest_release_within_the_bounds(text, expected):
    assert dict(bounds(text)) == expected


def test_the_nearest_bound_applies_and_folders_above_the_repository_are_not_read(tmp_path):
    example = tmp_path / "repository" / "examples" / "old"
    example.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text("ray==1.0\n")
    (tmp_path / "repository" / "setup.py").write_text('install_requires=["lightning<2", "torch==2.4.1"]')
    (example / "requirements.txt").write_text("pytorch-lightning==1.0.4\nlightning>=1\n")
    script = example / "train.py"

    found = required_releases(script, script)

    assert dict(found) == {"pytorch-lightning": "1.0.4", "lightning": "1", "torch": "2.4.1"}


def test_a_direct_reference_is_not_the_installed_release(tmp_path):
    (tmp_path / "requirements.txt").write_text("lightning @ git+https://github.com/a/lightning.git@main\n")
    assert "lightning" in Releases({})
    assert "lightning" not in Releases({}).of_project(tmp_path / "train.py", tmp_path)


def test_environments_in_folders_of_their_own(tmp_path):
    (tmp_path / "setup.py").write_text("install_requires=['pytorch-lightning>=1.7']\n")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "environment.yml").write_text("dependencies:\n- pip:\n  - pytorch-lightning==1.7.7\n")
    assert required_releases(tmp_path / "train.py", tmp_path) == {"pytorch-lightning": "1.7.7"}


def test_without_a_repository_the_given_folder_is_the_limit(tmp_path):
    inner = tmp_path / "given" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text("ray==1.0\n")
    (tmp_path / "given" / "requirements.txt").write_text("torch==2.4.1\n")
    os.mkfifo(inner / "requirements.txt")

    assert dict(required_releases(inner / "train.py", tmp_path / "given")) == {"torch": "2.4.1"}
    assert dict(required_releases(inner / "train.py", inner / "train.py")) == {}


def test_a_given_release_wins_over_a_required_one_and_that_over_an_installed_one(tmp_path):
    (tmp_path / "requirements.txt").write_text("lightning<2\npytest==1.0\n")
    script = tmp_path / "train.py"

    required = Releases({}).of_project(script, tmp_path)
    given = Releases({"lightning": "2.6.6"}).of_project(script, tmp_path)

    assert (required["lightning"], required["pytorch-lightning"], required["pytest"]) == ("1", "1", "1.0")
    assert given["lightning"] == "2.6.6"
    assert Releases({})["pytest"] == pytest.__version__
    assert "no-such-distribution" not in required


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", {"pytorch-lightning": "1.6.0", "torch": "1.9.0"}),
        ("Dockerfile.gpu", {"pytorch-lightning": "1.6.0", "torch": "1.9.0"}),
        ("CHANGES.md", {}),
    ],
)
def test_commands_that_a_page_gives_to_install_a_project(tmp_path, page, expected):
    (tmp_path / page).write_text(
        "Works with lightning==2.1.\n\n```\npip install torch==1.9.0 'pytorch_lightning==1.6.0' tensorboard\n```\n"
    )
    assert required_releases(tmp_path / "train.py", tmp_path) == expected


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Install [PyTorch 2.0.1](https://pytorch.org/get-started/locally/) for your system.", "2.0.1"),
        ("1. Install **PyTorch** 1.13 with CUDA.", "1.13"),
        ("Then install `torch` version 2.1.0.", "2.1.0"),
        ("Install PyTorch 2.0 or newer.", None),
        ("Install PyTorch 1.8+ first.", None),
        ("Install PyTorch 2.0.1 (later releases work too).", None),
        ("Install PyTorch 1.8 - 2.0.", None),
        ("Tested with PyTorch 2.0.1.", None),
        ("Do not install torchvision 0.15.", None),
    ],
)
def test_a_sentence_may_say_which_torch_to_install(tmp_path, sentence, expected):
    (tmp_path / "README.md").write_text(f"# Setup\n\n{sentence}\n\npip install -r requirements.txt\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    assert required_releases(tmp_path / "train.py", tmp_path).get("torch") == expected


def test_requirement_files_come_before_pages(tmp_path):
    (tmp_path / "README.md").write_text("pip install lightning==1.6.0 torch==1.9.0\n")
    (tmp_path / "requirements.txt").write_text("lightning==2.1.0\n")
    assert required_releases(tmp_path / "train.py", tmp_path) == {"lightning": "2.1.0", "torch": "1.9.0"}


def test_dockerfiles_in_a_folder_of_their_own_pin_releases_too(tmp_path):
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/Dockerfile.cuda11").write_text(
        "FROM a\nRUN pip install \\\n    'pytorch-lightning<1.9' && make\n"
    )
    (tmp_path / "setup.py").write_text("install_requires=['torch']\n")
    assert required_releases(tmp_path / "pkg/train.py", tmp_path) == {"pytorch-lightning": "1.8"}


def test_whether_a_project_installs_something(tmp_path):
    script = tmp_path / "pkg/train.py"
    assert may_install(script, tmp_path, "lightning")  # it states nothing
    (tmp_path / "requirements.txt").write_text("torch>=2\n")
    may_install.cache_clear()
    assert not may_install(script, tmp_path, "lightning")
    (tmp_path / "README.md").write_text("Needs PyTorch Lightning.\n")
    may_install.cache_clear()
    _forget_pages()
    assert may_install(script, tmp_path, "lightning")


def _forget_pages():
    from doctor.lint.engine import project_requirements

    project_requirements._texts_of_pages.cache_clear()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpu.yml", "name: gpu\nchannels:\n  - pytorch\ndependencies:\n  - python=3.9\n  - lightning=1.9\n", "1.9"),
        ("gpu.yaml", "dependencies:\n- pytorch::pytorch\n- pip\n- pip:\n  - pytorch-lightning==1.7.7\n", "1.7.7"),
        ("gpu.yml", "dependencies:\n  # for training\n  - pip:\n    - lightning==1.9.5\n  - python\n", "1.9.5"),
        ("docker/all.yml", "dependencies:\n  # for training\n  - python\n  - pip:\n    - lightning==1.9.5\n", "1.9.5"),
        ("other/gpu.yml", "dependencies:\n  - lightning=1.9\n", None),
        ("chart.yaml", "dependencies:\n  - name: web\n    text: lightning==1.9\n", None),
        ("train.yaml", "model:\n  dependencies:\n    - lightning=1.9\n", None),
    ],
)
def test_an_environment_of_conda_is_known_by_what_it_holds(tmp_path, name, text, expected):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    found = required_releases(tmp_path / "train.py", tmp_path)
    assert found.get("lightning", found.get("pytorch-lightning")) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", "```\npip3 install torch pytorch-lightning\npip3 install ray_lightning\n```\n", "1.6"),
        ("requirements.txt", "torch\nlightning-bolts>=0.5\n", "1"),
        ("README.md", "pip install pytorch-lightning==1.9 ray_lightning\n", "1.9"),
        ("README.md", "Compare with ray_lightning.\n\npip install pytorch-lightning\n", None),
        ("requirements.txt", "# ray_lightning\ntorch\n", None),
    ],
)
def test_another_distribution_that_a_project_installs_limits_lightning(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    found = Releases({}).of_project(tmp_path / "src" / "train.py", tmp_path)
    assert found["pytorch-lightning"] == (expected or Releases({})["pytorch-lightning"])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("train.py", "2.4"),
        ("eval.py", None),
        ("listen-eval-kit/run.py", None),
        ("evaluation/run.py", "2.4"),
    ],
)
def test_a_part_of_a_project_may_have_requirements_of_its_own(tmp_path, file, expected):
    (tmp_path / "requirements.txt").write_text("lightning==2.4\n")
    (tmp_path / "requirements_eval.txt").write_text("torch\n")
    assert required_releases(tmp_path / file, tmp_path).get("lightning") == expected
    assert Releases({}).of_project(tmp_path / file, tmp_path).is_bounded("lightning") == bool(expected)


@pytest.mark.parametrize(
    ("name", "text", "builds"),
    [
        ("setup.py", "from setuptools import setup\n\nsetup(name='tool')\n", True),
        ("setup.py", "import shutil\n\nshutil.copy('lib.dll', folder)\n", False),
        ("setup.cfg", "[metadata]\nname = tool\n", True),
        ("setup.cfg", "[flake8]\nmax-line-length = 100\n", False),
        ("pyproject.toml", "[build-system]\nrequires = []\n", True),
        ("pyproject.toml", "[tool.ruff]\nline-length = 100\n", False),
    ],
)
def test_a_file_installs_packages_by_what_it_says(tmp_path, name, text, builds):
    (tmp_path / name).write_text(text)
    assert is_installed(tmp_path / "train.py", tmp_path) is builds
