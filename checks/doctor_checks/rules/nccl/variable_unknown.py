"""NCCL001 in launch files: a variable that no known release or plugin reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Script, Severity, Violation, is_older, rule
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.environment_variables import misspelled, table, without_loss
from doctor.knowledge.environment_variables import nearest as nearest_variable
from doctor.knowledge.releases import bundled_nccl
from doctor.lint.launch.launch_file import EnvironmentSetting, EnvironmentSource, LaunchFile
from doctor.lint.python.project.starts.other_accelerators import uses_no_nccl
from doctor.lint.python.training import several_ranks
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.variable_unknown import is_unknown_variable, unknown_summary, variable_unknown

_POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: trainer
      env:
        - {name: NAME, value: eth0}
"""


_OF_XCCL = "TORCH_XCCL_"
"""Variables of torch's backend for GPUs of Intel, which has some of those for NCCL."""
_OF_ONECCL = "CCL_"
"""Variables of Intel oneCCL (uxlfoundation.github.io/oneCCL/env-variables.html), or NCCL without its first letter."""
_ONECCL = re.compile(r"oneccl|torch_ccl|\bccl_root|[\"']ccl[\"']|[ =]ccl(?=\s|$)", re.IGNORECASE)
"""Packages with the backend ``ccl`` of torch, and its name."""
_TIMEOUT = re.compile(r"(?:TORCH_)?NCCL_(?:COMM_|COLL_|OP_|PG_)?TIMEOUT(?:_(?:MS|S|SECS?|SECONDS?))?")
"""Names that are meant to set the timeout of collectives, which is an argument of ``init_process_group`` alone
(torch/distributed/constants.py and ``_get_default_timeout`` of distributed_c10d.py read no variable)."""


@rule(
    check=variable_unknown,
    reads=EnvironmentSource,
    cases=lambda: (
        passes("of XCCL", 'os.environ["TORCH_XCCL_NONBLOCKING_TIMEOUT"] = "60"\n'),
        fails("of NCCL", 'os.environ["TORCH_NCCL_NONBLOCKING_TIMEOU"] = "60"  # !\n'),
        fails("in a script", 'os.environ["NCCL_DEBGU"] = "INFO"  # !\n'),
        fails("visible GPUs, with a letter too many", 'os.environ["CUDA_VISIABLE_DEVICES"] = "0"  # !\n'),
        fails(
            "visible GPUs, after the GPU is chosen, as an info",
            'def work(gpu):\n    torch.cuda.set_device(gpu)\n    os.environ["CUDA_VISIBLE_DEVICE"] = str(gpu)  # !\n',
        ),
        shell_passes("of oneCCL", "export CCL_DEBUG=INFO NCCL_DEBUG=INFO", "torchrun train.py"),
        shell_fails("without the first letter", "export CCL_DEBUG=INFO  # !", "torchrun train.py"),
        passes("of oneCCL, in a script", 'import torch_ccl\nos.environ["CCL_SOCKET_IFNAME"] = "eth0"\n'),
        passes("in a script, for a library of the project", 'os.environ["MYLIB_DEBGU"] = "INFO"\n'),
        shell_fails("a letter is missing", "export NCCL_SOKET_IFNAME=eth0  # !", "torchrun train.py"),
        shell_fails("zeroes of Gloo", "export GL00_SOCKET_IFNAME=bond0  # !", "torchrun train.py"),
        shell_fails("an underscore too many", "NCCL_IB_DIS_ABLE=1 torchrun train.py  # !"),
        shell_fails("for mpirun", "mpirun -np 8 -x NCCL_SOCKET_IF_NAME=eth0 python train.py  # !"),
        FileFails(
            "in a pod", _POD.replace("NAME, value: eth0}", "NCCL_SOKET_IFNAME, value: eth0}  # !"), name="pod.yaml"
        ),
        shell_passes("known names", "export NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO", "torchrun train.py"),
        shell_passes(
            "packages, plugins and forks",
            "export NCCL_HOME=/opt/nccl NCCL_FASTRAK_CTRL_DEV=eth0 NCCL_NCHANNELS_PER_PEER=4",
            "torchrun a.py",
        ),
        shell_fails(
            "beside the name that was meant, as an info",
            "export NCCL_AVOID_RECORD_STREAMS=1  # !",
            "export TORCH_NCCL_AVOID_RECORD_STREAMS=1",
            "torchrun train.py",
        ),
        shell_fails(
            "near to a name that NCCL ignores, as an info", "export NCCL_CHECK_DISABLE=1  # !", "torchrun a.py"
        ),
        shell_passes("of the script alone", "NCCL_TESTS_VERSON=2.13", "make -C nccl-tests"),
        shell_passes("near to nothing", "export NCCL_TEAM_COLOUR=blue", "torchrun train.py"),
        FilePasses("in a pod, known", _POD.replace("NAME", "NCCL_SOCKET_IFNAME"), name="pod.yaml"),
    ),
)
def variable_unknown_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether the NCCL_* and TORCH_NCCL_* variables of a launch file are known."""
    exported = {(setting.name, setting.known_value) for setting in file.settings if setting.is_exported}
    for setting in file.settings:
        name = setting.name
        if not setting.is_exported or ("NCCL" in name and uses_no_nccl(file)) or name.startswith(_OF_XCCL):
            continue
        if name.startswith(_OF_ONECCL) and _uses_oneccl(file, name):
            continue
        near = nearest_variable(name) if is_unknown_variable(name) else misspelled(name)
        near = _as_read(file, near) if near is not None else None
        if near is not None and (kept := _is_ignored_too(file, near, setting)):
            yield Violation(
                setting.place,
                unknown_summary(name, near, obsolete=True),
                fix=f"Remove `{name}`.",
                severity=Severity.INFO,
                effect=kept,
            )
        elif near is not None:
            yield Violation(
                setting.place,
                unknown_summary(name, near),
                fix=f"Replace `{name}` with `{near}`.",
                severity=Severity.INFO
                if (near, setting.known_value) in exported
                or _is_the_default(file, near, setting.known_value)
                or _is_set_before(file, near, setting)
                or (near == "CUDA_VISIBLE_DEVICES" and _is_in_configurations(file, setting.known_value))
                else None,
            )
        elif is_unknown_variable(name) and _TIMEOUT.fullmatch(name) and _is_read_nowhere(file, name):
            yield Violation(
                setting.place,
                unknown_summary(name, None),
                fix=f"Remove `{name}`, and pass `timeout` to `init_process_group`, or to what calls it.",
                severity=Severity.INFO,
                effect="Collectives keep the timeout of their process group: 10 minutes with NCCL, if the program does "
                "not set it.",
            )


def _uses_oneccl(file: EnvironmentSource, name: str) -> bool:
    """Whether a variable that begins with CCL_ is meant for oneCCL: the file sets the variable of NCCL too, or one that
    NCCL has not, or it or its project has the backend of oneCCL."""
    others = {setting.name for setting in file.settings} - {name}
    if f"N{name}" in others or any(one.startswith(_OF_ONECCL) and misspelled(one) is None for one in others):
        return True
    if not isinstance(file, LaunchFile | Script):
        return False
    text = file.text if isinstance(file, Script) else file.modules.text_at(file.path) if file.modules else ""
    if _ONECCL.search(text):
        return True
    return file.modules is not None and any(file.modules.mentioning(word) for word in ("oneccl", "torch_ccl"))


def _as_read(file: EnvironmentSource, variable: str) -> str:
    """The name under which the torch of the project reads a variable: the old one if its release renamed it later."""
    older = (
        old
        for old, info in table().items()
        if info.replaced_by == variable
        and info.reader == "torch"
        and is_older(file.stated_torch, info.superseded or "") is True
    )
    return next(older, variable)


def _is_read_nowhere(file: EnvironmentSource, name: str) -> bool:
    """Whether a file belongs to a project with programs, and none of its files reads a variable: some programs take the
    timeout of their process group from one."""
    modules = file.modules if isinstance(file, LaunchFile | Script) else None
    if modules is None or modules.is_one_file:
        return False
    reads = re.compile(
        rf"(?:getenv\(|environ\.(?:get|pop)\(|env[:.,]\s*)\s*[\"']?{name}\b"
        rf"|environ\[\s*[\"']{name}[\"']\s*\](?!\s*=[^=])|\$\{{?{name}\b|[\"']{name}[\"']\s*(?:in\b|\))"
    )
    return not any(reads.search(text) for _, text in modules.mentioning(name))


def _is_ignored_too(file: EnvironmentSource, variable: str, setting: EnvironmentSetting) -> str:
    """What is lost with a variable that was meant, if the NCCL of the project ignores it by now and nothing is; empty
    if NCCL reads it, or RCCL may."""
    info = known_variable(variable)
    if info is None or info.superseded is None or info.still_read or file.releases.get("rocm"):
        return ""
    if not info.is_superseded_everywhere or is_older(bundled_nccl(file.stated_torch) or "", info.superseded) is True:
        return ""
    return without_loss(variable, setting.known_value or "0")


def _is_the_default(file: EnvironmentSource, variable: str, value: str | None) -> bool:
    """Whether what was meant is in effect anyway: a program of one process that means to see GPU 0 uses it."""
    return (
        variable == "CUDA_VISIBLE_DEVICES" and value == "0" and isinstance(file, Script) and several_ranks(file) is None
    )


def _is_set_before(file: EnvironmentSource, variable: str, setting: EnvironmentSetting) -> bool:
    """Whether the function that means to choose the GPU has already chosen it: ``torch.cuda.set_device(gpu)``, after
    which CUDA does not read the variable."""
    if variable != "CUDA_VISIBLE_DEVICES" or not isinstance(file, Script):
        return False
    line = setting.place.line
    around = [one for one in file.all(ast.FunctionDef) if one.lineno <= line <= (one.end_lineno or one.lineno)]
    inner = around[-1] if around else None
    calls = file.calls("torch.cuda.set_device")
    return any(one.lineno < line and file.function_of(one) is inner for one in calls)


_GPUS = re.compile(r"^[ \t{]*[\"']?gpu_ids[\"']?:[ \t]*[\"']?([\d, ]+)", re.MULTILINE)


def _is_in_configurations(file: EnvironmentSource, value: str | None) -> bool:
    """Whether each command of a launch file gives Accelerate a configuration that chooses the same GPUs, which it then
    exports as CUDA_VISIBLE_DEVICES (``prepare_multi_gpu_env`` of accelerate/utils/launch.py)."""
    if not isinstance(file, LaunchFile) or file.modules is None or not value:
        return False
    configurations = [(at.split("/"), text) for at, text in file.modules.mentioning("gpu_ids", launches=True)]
    chosen: list[set[str]] = []
    for launch in file.launches:
        given = launch.known_option("config_file") if launch.command.has_config else None
        given = None if launch.option("gpu_ids") is not None else given  # the option counts
        named = [one for one in (given or "").split("/") if one not in ("", ".", "..")]
        texts = [text for parts, text in configurations if named and parts[-len(named) :] == named]
        chosen.append({one.replace(" ", "") for text in texts for one in _GPUS.findall(text)})
    return bool(chosen) and all(one == {value} for one in chosen)
