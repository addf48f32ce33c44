"""Training settings, as each rank recorded them, that differ between ranks which train one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from doctor.analysis.stats.majority import MajoritySplit, describe, split_values
from doctor.analysis.stats.rank_roles import replicas_in, same_role
from doctor.core.facts import TORCH_SEED, ProgressFacts, ReplicaFacts, StepSettings, TrainingFacts
from doctor.core.job import Job, Rank
from doctor.core.text import lazy_compile, ranks_in_words

ACCUMULATION = {"transformers": "gradient_accumulation_steps"}
"""The name of the setting by framework; Lightning's and Accelerate's are in :data:`_USUAL`."""
_USUAL = "accumulate_grad_batches"
_CHANGES_CALLS = lazy_compile(
    r"accumul|reductions|^(?:max|min)_(?:steps|epochs)$|^limit_|^overfit|^fast_dev_run|val_check|check_val|num_sanity"
    r"|^eval_|^save_|^num_train_epochs|find_unused|^precision$|drop_last|even_batches|^reload_"
    r"|^static_graph$|^broadcast_buffers$|^bucket_cap"
)
"""Settings that change which collectives a rank calls, or how many."""
_CHANGES_VALUES = lazy_compile(
    r"accumul|reductions|^precision$|clip|max_grad_norm|^(?:lr|weight_decay|momentum|betas|eps)\b|^learning_rate|^warmup"
    r"|^optim|^lr_scheduler"
)
"""Settings that change the updates of parameters."""
_MODES, _FROZEN = "modules in eval mode", "parameters frozen in training"
"""The names of these values in :class:`doctor.core.facts.StepSettings`."""
_BATCHES = "batches trained"
"""The same for their number so far, which a sharded model leaves equal on all ranks."""
_REDUCTIONS = "gradient reductions per optimizer step"
"""The same for backward passes in which DistributedDataParallel reduces gradients."""
_SLOWER = 0.75
"""The pace in batches of a rank that reduces more often, by that of its peers, below which it waits for them in each
reduction: at half as many batches a reduction it is 0.5. Other backward passes on one rank leave the paces equal."""
_NONE, _DEFAULT = "none", "default"
"""No modules or parameters, and an argument that a Trainer was not given."""


class SettingDifference(msgspec.Struct, frozen=True):
    """A setting with several values. ``step``: the optimizer step after which it was sampled, ``None`` if it holds for
    the run."""

    name: str
    split: MajoritySplit
    step: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The minorities; all ranks if they are split evenly."""
        return self.split.odd

    @property
    def has_majority(self) -> bool:
        """Whether most ranks have the same value."""
        return self.split.common is not None

    @property
    def text(self) -> str:
        """``accumulate_grad_batches differs (rank 0: 2; rank 1: 4)``."""
        after = f" after step {self.step}" if self.step is not None else ""
        are_words = self.name in (_MODES, _FROZEN, _BATCHES, _REDUCTIONS)
        verb = "differ" if are_words else "differs"
        name = f"{self.name[:1].upper()}{self.name[1:]}" if are_words else self.name
        return f"{name} {verb}{after} ({describe(self.split)})"

    @property
    def changes_calls(self) -> bool:
        """Whether it makes ranks call different collectives."""
        return _CHANGES_CALLS.search(self.name) is not None

    @property
    def changes_values(self) -> bool:
        """Whether it makes equal parameters diverge."""
        return _CHANGES_VALUES.search(self.name) is not None

    @property
    def effect(self) -> str:
        """What modules in eval mode or frozen parameters of some ranks lead to; empty for other settings."""
        if self.name == _BATCHES:
            return "A rank that skips a step, or takes one more, does not update its shard together with the others."
        if self.name == _REDUCTIONS:
            return "The reductions of different batches are averaged with each other, and the ranks drift apart."
        own = next((group for group in self.split.minorities if group.value != _NONE), None)
        if self.name not in (_MODES, _FROZEN) or own is None:
            return ""
        who, several = ranks_in_words(own.ranks), len(own.ranks) > 1
        names = _in_code(own.value)
        if self.name == _MODES:
            return (
                f"{who.capitalize()} train{'' if several else 's'} with {names} in eval mode: without dropout and "
                "with stored statistics in batch normalization, and DDP averages the resulting gradients."
            )
        return (
            f"DDP receives no gradient of {names} from {who}: it raises an error, or averages zeros with "
            "`find_unused_parameters=True`."
        )

    @property
    def fix(self) -> str:
        """How to make it equal."""
        who, value = ranks_in_words(self.ranks), self._usual
        if self.name == _MODES:
            evaluating = tuple(rank for group in self.split.groups if group.value != _NONE for rank in group.ranks)
            return f"Call `model.train()` on {ranks_in_words(evaluating)} after evaluation, before training continues."
        if self.name == _BATCHES:
            return "Call `optimizer.step()` after the same batches on all ranks; decide that by a value they share."
        if self.name == _REDUCTIONS:
            return f"Enter `model.no_sync()` for the same batches on all ranks, also on {who}."
        if self.name == _FROZEN:
            wrapped = "before DistributedDataParallel wraps the model"
            if value == _NONE:
                own = _in_code(self.split.minorities[0].value)
                return f"Keep {own} trainable on {who}, or freeze the same parameters on all ranks {wrapped}."
            if value is not None:
                return f"Freeze {_in_code(value)} on all ranks, also on {who}, {wrapped}."
            return f"Freeze the same parameters on all ranks {wrapped}."
        name = self.name if self.step is None else self.name.partition(" ")[0]
        shown = "its default" if value == _DEFAULT else value
        target = f"`{name}` to {shown} on {who}, as on the other ranks" if value else f"the same `{name}` on {who}"
        if self.step is not None and name in ("lr", "learning_rate"):
            return (
                f"Set {target}, or, if `ReduceLROnPlateau` changed it, reduce the metric over all ranks before "
                "`scheduler.step(metric)`."
            )
        return f"Set {target}, {'or to another value on all ranks' if value else 'read from one configuration'}."

    @property
    def _usual(self) -> str | None:
        """The value of most ranks, if all others have the same other one."""
        return self.split.common.value if self.split.common and len(self.split.minorities) == 1 else None


def _in_code(names: str) -> str:
    """A lone name in backticks; a list as it is."""
    return f"`{names}`" if names.replace(".", "_").isidentifier() else names


def setting_differences(job: Job) -> tuple[SettingDifference, ...]:
    """The settings that differ between ranks which train one model, those of the whole run first."""
    found: list[SettingDifference] = []
    for ranks in _peers(job):
        found += _of_run(ranks)
        found += _of_steps(ranks, others_may_follow=len(job.ranks) < job.world_size)
    return tuple(found)


def _peers(job: Job) -> Iterator[tuple[Rank, ...]]:
    """Ranks that train one model and have the same part of it."""
    roles = [{rank.number for rank in role} for role in same_role(job)]
    for members in replicas_in(job):
        for role in roles:
            both = tuple(rank for rank in members if rank.number in role)
            if len(both) > 1:
                yield both


def _of_run(ranks: Sequence[Rank]) -> Iterator[SettingDifference]:
    known = {rank.number: training for rank in ranks if (training := rank.find(TrainingFacts)) is not None}
    yield from _different(ACCUMULATION.get(_framework(known.values()), _USUAL), _values(known, "accumulate"))
    yield from _different("precision", _values(known, "precision"))
    names = dict.fromkeys(variable.name for training in known.values() for variable in training.arguments)
    # A seed per rank is common: each rank draws different dropout masks, and DDP broadcasts the parameters.
    for name in names:
        if name not in (_USUAL, *ACCUMULATION.values(), TORCH_SEED):
            yield from _different(name, {rank: one for rank, found in known.items() if (one := _argument(found, name))})


def _framework(known: Iterable[TrainingFacts]) -> str:
    return next((one.framework for one in known), "")


def _values(known: Mapping[int, TrainingFacts], name: str) -> dict[int, str]:
    values = {rank: getattr(training, name) for rank, training in known.items()}
    return {rank: str(value) for rank, value in values.items() if value is not None}


def _argument(training: TrainingFacts, name: str) -> str | None:
    """A setting as text. A Trainer's has its default if it is not recorded; a loop's is unknown."""
    value = training.argument(name)
    return value if value is not None or training.framework == "plain" else _DEFAULT


def _of_steps(ranks: Sequence[Rank], *, others_may_follow: bool) -> Iterator[SettingDifference]:
    """The differences in the newest sample that all ranks have. Two of more ranks do not show which of them differs."""
    samples = {rank.number: _by_step(rank) for rank in ranks}
    taken = {rank: steps for rank, steps in samples.items() if steps}
    common = set.intersection(*(set(steps) for steps in taken.values())) if len(taken) > 1 else set[int]()
    if not common or (len(taken) == 2 and (others_may_follow or len(ranks) > 2)):
        return
    step = max(common)
    values: dict[str, dict[int, str]] = {}
    for rank, steps in taken.items():
        for variable in steps[step].values:
            values.setdefault(variable.name, {})[rank] = variable.value
    for name, by_rank in values.items():
        if name != _REDUCTIONS or _waits_by_reductions(ranks, by_rank):
            yield from _different(name, by_rank, step)


def _waits_by_reductions(ranks: Sequence[Rank], reductions: Mapping[int, str]) -> bool:
    """Whether each rank that reduces gradients more often is slower by batches than each that does so less often."""
    paces = {rank.number: _pace(rank) for rank in ranks if rank.number in reductions}
    pairs = [(more, less) for more in paces for less in paces if float(reductions[more]) > float(reductions[less])]
    return bool(pairs) and all(0 < paces[more] < _SLOWER * paces[less] for more, less in pairs)


def _pace(rank: Rank) -> float:
    """The newest training batches of a rank per second; 0 if too few of them are known."""
    progress = rank.find(ProgressFacts)
    points = progress.recent if progress is not None else ()
    begun = [one.at for one in points if one.stage == "train" and one.point == "step" and one.at is not None]
    seconds = begun[-1] - begun[0] if len(begun) > 2 else 0.0
    return (len(begun) - 1) / seconds if seconds > 0 else 0.0


def _by_step(rank: Rank) -> dict[int, StepSettings]:
    facts = rank.find(ReplicaFacts)
    return {one.step: one for one in facts.settings} if facts is not None else {}


def _different(name: str, values: Mapping[int, str], step: int | None = None) -> Iterator[SettingDifference]:
    if len(set(values.values())) > 1:
        yield SettingDifference(name, split_values(values), step)
