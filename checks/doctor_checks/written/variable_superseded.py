"""NCCL004: a launch file sets a variable under a name of the past."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.environment_variables import known as known_variable
from doctor.testing import lines


@rule(
    id="NCCL004",
    severity=Severity.WARNING,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "renamed by torch 2.2",
            lines("export NCCL_ASYNC_ERROR_HANDLING=1  # !", "torchrun train.py"),
            name="train.sh",
        ),
        FileFails("renamed too", lines("NCCL_BLOCKING_WAIT=1 torchrun train.py  # !"), name="train.sh"),
        FileFails("for all tasks", lines("srun --export=ALL,NCCL_BLOCKING_WAIT=0 python train.py  # !"), name="job.sh"),
        FilePasses(
            "the name of today", lines("export TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"), name="train.sh"
        ),
        FilePasses(
            "both names",
            lines("export NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"),
            name="train.sh",
        ),
        FilePasses("of the script alone", lines("NCCL_BLOCKING_WAIT=1", "torchrun train.py"), name="train.sh"),
    ),
)
def variable_superseded(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the variables of a launch file bear the names under which they are read today.

    Why it hurts: an old name is read with a warning for a while, and then no more: the setting has no effect.
    Fix: write the new name.
    """
    names = {setting.name for setting in file.settings}
    for setting in file.settings:
        info = known_variable(setting.name)
        if not setting.is_exported or info is None or info.superseded is None or info.replaced_by in names:
            continue
        new = f": {info.replaced_by} replaces it" if info.replaced_by else ""
        still = "is deprecated" if info.still_read else "is no longer read"
        reader = "torch" if info.reader == "torch" else "NCCL"
        yield Violation(
            setting.place,
            f"{setting.name} {still} from {reader} {info.superseded} on{new}",
            fix=f"`{info.replaced_by}` in place of `{setting.name}`." if info.replaced_by else "Remove it.",
            severity=None if info.is_superseded_everywhere and not info.still_read else Severity.INFO,
            evidence=(("name", setting.name), ("replaced_by", info.replaced_by)),
        )
