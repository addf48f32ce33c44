"""CODE022: the script uses a Lightning API that was removed or renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import Edit, Script, Severity, Violation, is_older, rule
from doctor.knowledge.lightning_api import ArgumentInfo, qualified
from doctor.knowledge.lightning_api import argument as trainer_argument
from doctor.knowledge.lightning_api import hook as lightning_hook
from doctor.knowledge.lightning_api import imported as lightning_import
from doctor.knowledge.lightning_api import method as trainer_method
from doctor.knowledge.lightning_api import strategy as trainer_strategy
from doctor.knowledge.releases import release
from doctor.lint.engine.rule import LONGEST_SUMMARY
from doctor.lint.fix.trainer_arguments import HALF, STRATEGIES_AS_ACCELERATORS, trainer_edits
from doctor.lint.python.lightning_version import KnownLightning, known_lightning
from doctor.lint.python.project.one_process import is_called_in_vain
from doctor.lint.python.project.unreached import (
    calls_nowhere,
    has_no_trainer,
    is_imported_nowhere,
    is_optional_part,
    is_set_aside,
    is_used_nowhere,
)
from doctor.lint.python.script import UNKNOWN
from doctor.lint.python.training import TRAINER, hooks, lightning_modules
from doctor.testing.script_cases import fails, passes

_V1 = (("lightning", "1.9.5"), ("pytorch-lightning", "1.9.5"))
_V2 = (("lightning", "2.6.6"), ("pytorch-lightning", "2.6.6"))
_PACKAGE = "lightning.pytorch."
_OPEN = "and no release is pinned"
_OPTIMIZER_STEP = ("optimizer_idx", "on_tpu", "using_lbfgs")


@rule(
    id="CODE022",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("lightning",),
    foreshadows=("VER006",),
    impacts={
        _OPEN: "`pip install` without a bound installs Lightning 2, with which every rank fails at these calls.",
        r"was replaced": "The old value works for now; a later release may remove it.",
        r"Trainer\(": "Every rank fails when it creates the Trainer.",
        r"^Trainer\.": "Every rank fails with AttributeError at this line.",
        r"^(?:lightning|pytorch_lightning)\.": "Every rank fails with ImportError at this line.",
        r"_step_end\b": "Lightning no longer calls this method, so its code silently never runs.",
        r"\.training_step\(": "Lightning raises RuntimeError on every rank before the first batch.",
        r"_epoch_end\b": "Lightning raises NotImplementedError on every rank before the first batch.",
    },
    cases=lambda: (
        fails("written for 1.x", _FOR_1, fixed=_FOR_1_FIXED, releases=_V2),
        fails("a dictionary of arguments", _DICTIONARY, releases=_V2),
        fails(
            "the strategy as accelerator",
            _AS_ACCELERATOR,
            fixed={
                'gpus=8, accelerator="ddp", max_epochs=3': 'devices=8, strategy="ddp", max_epochs=3, accelerator="gpu"'
            },
        ),
        fails("hooks and methods", _HOOKS, releases=_V2),
        fails("newer than the release", _NEWER, releases=_V1),
        fails("values that are gone", _VALUES, releases=_V2),
        passes("as Lightning 2 has it", _AS_2, releases=_V2),
        passes("1.x where 1.x is installed", _AS_1, releases=_V1),
        passes("other Trainers, and strategies that others register", _OTHER_TRAINERS, releases=_V2),
        passes("where both kinds of releases are served", _BOTH_KINDS, releases=_V2),
        passes("where the release is asked for above", _ASKED_ABOVE, releases=_V2),
        passes("a hook that asks for the release itself", _ASKING_HOOK, releases=_V2),
        passes("an option of one's own of that name, where the release is not known", _OWN_OPTION),
    ),
)
def lightning_call_outdated(script: Script) -> Iterator[Violation]:
    """Ask whether the installed or required Lightning release supports the API that the script uses.

    Why it hurts: every rank fails with an error when it reaches this code, or Lightning rejects the hook.
    Fix: Use the API of that release, or pin Lightning to the release that the script was written for.
    """
    known = known_lightning(script)
    is_open = known.is_open
    found: dict[int, list[_Complaint]] = {}
    for complaint in _complaints(script, known.number):
        if not _is_guarded(script, complaint.at) and not (is_open and complaint.severity is Severity.INFO):
            found.setdefault(getattr(complaint.at, "lineno", 0), []).append(complaint)
    for complaints in found.values():
        # One violation per line, about the most severe complaint, with the fixes of all.
        severity = min((one.severity for one in complaints), key=list(Severity).index)
        worst = [one for one in complaints if one.severity is severity]
        certain = all(one.edits for one in complaints) and not is_open
        if severity is Severity.ERROR and (known.number is None or is_open):
            severity = Severity.WARNING
        if severity is Severity.ERROR and all(_is_for_tests(one.at) for one in worst):
            severity = Severity.WARNING if is_called_in_vain(script, "test") else severity
        if severity is Severity.ERROR and all(is_optional_part(script, one.at) for one in worst):
            severity = Severity.WARNING
        is_aside = (is_open or known.number is None) and is_set_aside(script, "lightning")
        unused = is_aside or _never_matters(script, worst)
        fix = _joined(list(dict.fromkeys(map(_fix, complaints))))
        yield Violation(
            worst[0].at,
            _claim(worst, known),
            fix=_pinned_or(fix, worst) if is_open else fix,
            severity=Severity.INFO if unused else severity,
            preview=unused,
            edits=tuple(edit for one in complaints for edit in one.edits) if certain else (),
            evidence=(("lightning", known.number),) if known.number is not None and not is_open else (),
            once=_OPEN if is_open else "",
        )


def _pinned_or(fix: str, worst: list[_Complaint]) -> str:
    if worst[0].removed.startswith("since "):
        return fix
    first = min((one.removed for one in worst), key=release)
    return f"Pin a `pytorch-lightning` older than {first} in the requirements, or migrate: {fix[:1].lower()}{fix[1:]}"


def _joined(fixes: list[str]) -> str:
    """One sentence, if each of them says what to use instead of what."""
    if all(one.startswith("Use ") for one in fixes):
        return f"Use {', and '.join(one.removeprefix('Use ').removesuffix('.') for one in fixes)}."
    return " ".join(fixes)


def _fix(one: _Complaint) -> str:
    if one.removed.startswith("since "):
        argument = one.words.partition("(")[2].removesuffix(")")
        return f"Install {one.replacement}, or remove {f'`{argument}`' if argument else 'the argument'}."
    if _PROSE.search(one.replacement):
        return f"Instead of `{one.words}`, use {one.replacement}."
    return f"Use `{one.replacement}` instead of `{one.words}`."


_PROSE = re.compile(r"\b(?:and|another|gone|or|own|package|removed|the|with)\b")
"""Words of replacements that are not only code."""


def _never_matters(script: Script, worst: list[_Complaint]) -> bool:
    """Whether nothing in the project reaches it: a module that nothing imports, a class that no Trainer gets, a hook of
    tests where nothing tests, one that did nothing; or a comment next to it says that it is for older releases."""
    return all(_is_unreached(script, one.at) or _is_known(script, one.at) or _gives_back(one.at) for one in worst)


def _gives_back(at: ast.AST) -> bool:
    """Whether a hook only gives back the loss that it gets, as Lightning takes it without the hook: ``def
    training_step_end(self, outputs): return outputs["loss"].mean()``."""
    if not isinstance(at, ast.FunctionDef) or not at.name.endswith("_step_end") or len(at.args.args) != 2:
        return False
    code = [one for one in at.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    value = code[0].value if len(code) == 1 and isinstance(code[0], ast.Return) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("mean", "sum"):
        value = None if value.args or value.keywords else value.func.value
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == "loss":
        value = value.value
    return isinstance(value, ast.Name) and value.id == at.args.args[1].arg


def _is_unreached(script: Script, at: ast.AST) -> bool:
    if is_imported_nowhere(script):
        return True
    owner = script.class_of(at) if isinstance(at, ast.FunctionDef) else None
    if not isinstance(at, ast.FunctionDef) or owner is None:
        return False
    # trainer/configuration_validator.py rejects the hooks of tests in ``Trainer.test()`` alone.
    if has_no_trainer(script):
        return True
    return is_used_nowhere(script, owner) or (_is_for_tests(at) and calls_nowhere(script, "test"))


def _is_for_tests(at: ast.AST) -> bool:
    return isinstance(at, ast.FunctionDef) and at.name in ("test_epoch_end", "test_step_end")


_IS_KNOWN = re.compile(r"^[^#]*#.*(?:\bremoved\b|no longer (?:supported|called|exists?|works?))", re.IGNORECASE)


def _is_known(script: Script, at: ast.AST) -> bool:
    line = getattr(at, "lineno", 1)
    return any(map(_IS_KNOWN.search, script.lines[max(line - 2, 0) : line]))


class _Complaint(NamedTuple):
    """An outdated use: ``words``, since when it is removed or available, and the replacement."""

    at: ast.AST
    words: str
    removed: str
    replacement: str
    edits: tuple[Edit, ...] = ()
    severity: Severity = Severity.ERROR


def _claim(worst: list[_Complaint], known: KnownLightning) -> str:
    words, has_several = list(dict.fromkeys(one.words for one in worst)), False
    if len(words) > 1 and all(word.startswith("Trainer(") for word in words):
        words = [f"Trainer({', '.join(word.removeprefix('Trainer(').removesuffix(')') for word in words)})"]
        has_several = True
    subject, verb = " and ".join(words), "were" if len(words) > 1 else "was"
    if worst[0].severity is Severity.INFO:
        return f"{subject} {'uses arguments' if has_several else verb} replaced in Lightning {worst[0].removed}"
    if worst[0].removed.startswith("since "):
        since = worst[0].removed.removeprefix("since ")
        return f"Lightning {known.number} does not support {subject}, added in {since}"
    verb = "uses arguments" if has_several else verb
    releases = " and ".join(sorted({one.removed for one in worst}))
    gone = f"{subject} {verb} removed in Lightning {releases}"
    if known.number is None or known.is_open:
        summary = f"{gone}, {_OPEN}"
        return summary if len(summary) <= LONGEST_SUMMARY else f"{subject} was removed in {releases}, {_OPEN}"
    if known.proof:
        return f"{gone}, and {known.proof} needs 2.0 or newer"
    # "1.9" stands for a bound of the project: the newest line of releases that it permits.
    number = known.number
    return f"{gone} (used: {number})" if number.count(".") > 1 else f"{gone} (allowed: {number}.x)"


def _is_gone(removed: str | None, release: str | None) -> bool:
    """Whether a release lacks it; an unknown release counts as the newest."""
    return removed is not None and (release is None or is_older(release, removed) is False)


def _gone(at: ast.AST, words: str, known: ArgumentInfo | None, release: str | None) -> Iterator[_Complaint]:
    if known is not None and _is_gone(known.removed, release):
        yield _Complaint(at, words, known.removed or "", known.replacement)


def _complaints(script: Script, release: str | None) -> Iterator[_Complaint]:
    for call in script.calls(TRAINER):
        for name, value, at in _given(script, call):
            known, text = trainer_argument(name), script.text_of(value, 24)
            place = at if isinstance(at, ast.keyword) else None
            if known is not None and _is_gone(known.removed, release):
                edits = trainer_edits(script, call, name, value) if place else ()
                new = known.replacement.replace("=…", f"={text}") if name in _SAME_VALUE else known.replacement
                yield _Complaint(at, f"Trainer({name}={text})", known.removed or "", new, edits)
            elif known is not None and known.since and release is not None and is_older(release, known.since):
                yield _Complaint(
                    at, f"Trainer({name}={text})", f"since {known.since}", f"Lightning {known.since} or newer"
                )
            else:
                yield from _of_value(script, call, name, value, at, release)
    yield from _of_methods(script, release)
    yield from _of_imports(script, release)
    for owner in lightning_modules(script):
        yield from _of_module(owner, release)


def _of_imports(script: Script, release: str | None) -> Iterator[_Complaint]:
    for node in script.all(ast.ImportFrom):
        if not node.module or node.level or node.module.partition(".")[0] not in ("lightning", "pytorch_lightning"):
            continue
        module = node.module.replace("pytorch_lightning", "lightning.pytorch", 1) + "."
        if not module.startswith(_PACKAGE):
            continue
        for one in node.names:
            path = (module + one.name).removeprefix(_PACKAGE)
            known = lightning_import(path)
            if known is not None and _is_gone(known.removed, release):
                new = qualified(known.replacement, node.module)
                yield _Complaint(node, f"{node.module}.{one.name}", known.removed or "", new)


_SAME_VALUE = frozenset(
    {"checkpoint_callback", "gpus", "num_processes", "replace_sampler_ddp", "resume_from_checkpoint", "tpu_cores"}
)
"""Arguments whose replacement takes the same value."""


def _given(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value, keyword
            continue
        for one in script.values_of(keyword.value):
            if isinstance(one, ast.Dict):
                for key, value in zip(one.keys, one.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value, value, key
            elif isinstance(one, ast.Call) and script.text_of(one.func) == "dict":
                yield from ((inner.arg, inner.value, inner.value) for inner in one.keywords if inner.arg)


def _of_value(
    script: Script, call: ast.Call, name: str, value: ast.expr, at: ast.AST, release: str | None
) -> Iterator[_Complaint]:
    written = value.value if isinstance(value, ast.Constant) else UNKNOWN
    words = f"Trainer({name}={script.text_of(value, 24)})"
    edits = trainer_edits(script, call, name, value) if isinstance(at, ast.keyword) else ()
    if name == "strategy" and isinstance(written, str):
        known = trainer_strategy(written)
        if known is not None and _is_gone(known.removed, release):
            yield _Complaint(at, words, known.removed or "", f'strategy="{known.replacement}"', edits)
    elif name == "accelerator" and written in STRATEGIES_AS_ACCELERATORS and _is_gone("1.7.0", release):
        yield _Complaint(at, words, "1.7.0", f'accelerator="gpu", strategy="{written}"', edits)
    elif name == "accumulate_grad_batches" and isinstance(value, ast.Dict) and _is_gone("2.0.0", release):
        yield _Complaint(
            at, words, "2.0.0", f"callbacks=[GradientAccumulationScheduler(scheduling={script.text_of(value, 24)})]"
        )
    elif name == "precision" and written in HALF and release is not None and _is_gone("2.0.0", release):
        yield _Complaint(at, words, "2.0.0", f'precision="{HALF[written]}"', edits, Severity.INFO)


def _of_methods(script: Script, release: str | None) -> Iterator[_Complaint]:
    for call in script.method_calls("from_argparse_args", "add_argparse_args", "tune"):
        name = script.name(call.func)
        if name.startswith(TRAINER):
            method = name.rpartition(".")[2]
            yield from _gone(call, f"Trainer.{method}", trainer_method(method), release)


def _of_module(owner: ast.ClassDef, release: str | None) -> Iterator[_Complaint]:
    for statement in owner.body:
        if isinstance(statement, ast.FunctionDef):
            yield from _gone(statement, f"{owner.name}.{statement.name}", lightning_hook(statement.name), release)
    if not _is_gone("2.0.0", release):
        return
    for method in hooks(owner, "training_step", "optimizer_step"):
        taken = [one for one in _required(method) if one in _OPTIMIZER_STEP]
        if taken:
            words = f"{owner.name}.{method.name}({', '.join(taken)})"
            yield _Complaint(method, words, "2.0.0", "self.optimizers() with automatic_optimization = False")


def _required(method: ast.FunctionDef) -> list[str]:
    places = [*method.args.posonlyargs, *method.args.args]
    return [one.arg for one in places[: len(places) - len(method.args.defaults)]]


def _is_guarded(script: Script, node: ast.AST) -> bool:
    """Whether the code asks for the release before; of a hook, also in it."""
    if isinstance(node, ast.FunctionDef) and any(
        "__version__" in ast.unparse(one.test) for one in script.inside(node, ast.If)
    ):
        return True
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.Try) and (inner in outer.body or inner in outer.handlers):
            return True
        if isinstance(outer, (ast.If, ast.IfExp)):
            behind = (outer.test, *script.values_of(outer.test))
            test = " ".join(map(ast.unparse, behind)).lower()
            if any(word in test for word in ("version", "_greater", "_ge_", "_lt_", "is_old", "signature", "hasattr")):
                return True
        inner = outer
    return False


_ASKING_HOOK = """\
import pytorch_lightning as pl

class Net(pl.LightningModule):
    def training_step_end(self, parts):
        if pl.__version__[0] != "2":
            self.parts = self.all_gather(parts)
"""
_FOR_1 = """\
import pytorch_lightning as pl

trainer = pl.Trainer(
    gpus=2,  # !
    precision=16,  # !
    strategy="fsdp_native",  # !
    replace_sampler_ddp=False,  # !
    max_epochs=10,
)
trainer.fit(model)
"""
_FOR_1_FIXED = """\
import pytorch_lightning as pl

trainer = pl.Trainer(
    devices=2,
    precision="16-mixed",
    strategy="fsdp",
    use_distributed_sampler=False,
    max_epochs=10,
    accelerator="gpu",
)
trainer.fit(model)
"""
_DICTIONARY = """\
import pytorch_lightning as pl

trainer_params = {
    "gpus": gpus,  # !
    "max_epochs": TRAIN_ARGS.max_epochs,
    "callbacks": all_callbacks,
}
trainer = pl.Trainer(**trainer_params)
"""
_AS_ACCELERATOR = """\
from pytorch_lightning import Trainer

trainer = Trainer(gpus=8, accelerator="ddp", max_epochs=3)  # !
trainer.fit(model)
"""
_HOOKS = """\
from pytorch_lightning.utilities.distributed import rank_zero_only  # !
from pytorch_lightning.plugins import DDPPlugin  # !

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx, optimizer_idx):  # !
        return self.loss(batch)

    def validation_epoch_end(self, outputs):  # !
        self.log("val", sum(outputs))

    def validation_step_end(self, parts):  # !
        return sum(parts)

trainer = L.Trainer.from_argparse_args(args)  # !
trainer.tune(Model())  # !
"""
_NEWER = """\
import pytorch_lightning as pl

trainer = pl.Trainer(devices=2, barebones=True)  # !
"""
_VALUES = """\
trainer = L.Trainer(
    strategy="dp",  # !
    accumulate_grad_batches={0: 8, 4: 4},  # !
    gpus=args.gpus,  # !
    resume_from_checkpoint=path,  # !
)
"""
_AS_2 = """\
class Model(L.LightningModule):
    def on_validation_epoch_end(self):
        self.log("val", sum(self.outputs))

trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp", precision="16-mixed", use_distributed_sampler=False)
trainer.fit(model, ckpt_path="last")
"""
_AS_1 = """\
import pytorch_lightning as pl
from pytorch_lightning.utilities.distributed import rank_zero_only

class Model(pl.LightningModule):
    def validation_epoch_end(self, outputs):
        self.log("val", sum(outputs))

trainer = pl.Trainer(gpus=2, precision=16, strategy="ddp_sharded")
"""
_OTHER_TRAINERS = """\
from transformers import Trainer
from mylib import Trainer as Own

other = Trainer(model=model, gpus=2)
own = Own(gpus=2, resume_from_checkpoint=path)
trainer = L.Trainer(strategy="horizon", precision="32-true")
"""
_BOTH_KINDS = """\
import pytorch_lightning as pl

try:
    from pytorch_lightning.utilities.distributed import rank_zero_only
except ImportError:
    from pytorch_lightning.utilities import rank_zero_only

if pl.__version__ < "2":
    trainer = pl.Trainer(gpus=2)
else:
    trainer = pl.Trainer(accelerator="gpu", devices=2)
"""
_ASKED_ABOVE = """\
import pytorch_lightning as pl

BEFORE_2 = int(pl.__version__.split(".")[0]) < 2

if BEFORE_2:
    trainer = pl.Trainer(gpus=2)
"""
_OWN_OPTION = """\
class Model(L.LightningModule):
    def __init__(self, gpus=1):
        super().__init__()

model = Model(gpus=2)
trainer = L.Trainer(precision=16, inference_mode=False)
"""
