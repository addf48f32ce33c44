"""Imports and calls the user's factory, and identifies what it returned."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from doctor.core.errors import UnusableError
from doctor.estimate.tracing.pytree import resized, tensors_in
from doctor.version import PACKAGE

_PAIR = "the module and a batch (return model, batch)"


@dataclass(frozen=True, slots=True)
class FactoryOutput:
    """The output of a factory: a module and one batch of one rank, and the Trainer and loader, if any. ``notes``: of a
    model that was built from a configuration."""

    module: Module
    batch: Any
    trainer: Any = None
    loader: Any = None
    notes: tuple[str, ...] = ()


def find_factory(factory: str, directory: Path) -> Callable[[], object]:
    """Import and return the function that ``MODULE:FACTORY`` or ``FILE.py:FACTORY`` names.

    Raises:
        UnusableError: there is none.
    """
    where, _, name = factory.rpartition(":")
    if not where or not name.isidentifier():
        raise UnusableError(f"{factory}: expected MODULE:FACTORY, for example train.py:make or package.module:make")
    sys.path[:] = [str(directory), *(entry for entry in sys.path if entry not in ("", str(directory)))]
    try:
        module = _from_file(directory / where) if where.endswith(".py") else importlib.import_module(where)
    except UnusableError as error:
        raise UnusableError(f"{factory}: {error}") from None
    except ModuleNotFoundError as error:
        raise UnusableError(f"{factory}: {_missing(error, where, directory)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's module raises
        raise UnusableError(f"{factory}: importing {where} failed: {in_words(error)}") from None
    made = getattr(module, name, None)
    if not callable(made):
        raise UnusableError(f"{factory}: {where} has no function {name!r}")
    return made  # type: ignore[no-any-return]


def _missing(error: ModuleNotFoundError, where: str, directory: Path) -> str:
    """Describe the module that was not found, and what to do about it."""
    words = f"no module named {error.name!r} from {directory}"
    if where == error.name or where.startswith(f"{error.name}."):
        return f"{words}: run this in the folder where its imports start, or name a file (train.py:make)"
    return f"{words}: run this in the environment of the training, or name a configuration of the model (config.json)"


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UnusableError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def in_words(error: BaseException) -> str:
    """Describe an error in one line: its type, its first line, and the line of user code that raised it."""
    lines = str(error).strip().splitlines()
    trace, place = error.__traceback__, ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if "site-packages" not in path.parts and Path(PACKAGE) not in path.parents and path.exists():
            place = f" ({path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}{place}"


def call_factory(factory: Callable[[], object], name: str) -> FactoryOutput:
    """Call the factory.

    Raises:
        UnusableError: it raised, or it returned something else.
    """
    needed = _required(factory)
    if needed:
        raise UnusableError(
            f"{name}: it cannot be called without arguments ({', '.join(needed)}): name a function without any that "
            f"returns {_PAIR}"
        )
    try:
        returned = factory()
        return returned if isinstance(returned, FactoryOutput) else unpack_output(returned, name)
    except UnusableError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's factory raises
        raise UnusableError(f"{name}: the factory raised {in_words(error)}") from None


def _required(factory: Callable[[], object]) -> list[str]:
    """Return the names of parameters that have no default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables of C have none
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]


def unpack_output(returned: object, name: str) -> FactoryOutput:
    """Identify module, batch, Trainer and loader, in any order."""
    parts = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    trainer = _take(parts, lambda part: _is_named(part, "Trainer"))
    module = _take(parts, lambda part: isinstance(part, Module))
    if module is None:  # not `or`: a compiled module has no truth value
        module = _module_of(trainer)
    if module is None:
        raise UnusableError(
            f"{name}: the factory returned {_kinds(returned)}, which contains no torch.nn.Module: it has to return "
            f"{_PAIR}"
        )
    loader = _take(parts, _is_loader)
    if loader is None and not parts:
        loader = _loader_of(trainer, module)
    batch = parts[0] if len(parts) == 1 else tuple(parts)
    if loader is not None and not parts:
        batch = _first(loader, name)
    size = getattr(getattr(trainer, "args", None), "per_device_train_batch_size", None)
    if isinstance(size, int):
        batch = resized(batch, size)  # its loader's batches are for all GPUs of a process
    if not any(True for _ in tensors_in(batch)):
        raise UnusableError(
            f"{name}: the factory returned {_kinds(returned)}, which contains no batch with a tensor: it has to return "
            f"{_PAIR}"
        )
    return FactoryOutput(module, batch, trainer, loader)


def _take(parts: list[Any], fits: Callable[[Any], bool]) -> Any:
    for place, part in enumerate(parts):
        if fits(part):
            return parts.pop(place)
    return None


def _is_named(part: object, name: str) -> bool:
    """Match by class name: both namespaces of Lightning, and Transformers, have a Trainer."""
    return any(kind.__name__ == name for kind in type(part).__mro__)


def _is_loader(part: object) -> bool:
    return isinstance(part, torch.utils.data.DataLoader) or _is_named(part, "LightningDataModule")


def _module_of(trainer: Any) -> Module | None:
    found = (getattr(trainer, name, None) for name in ("model", "lightning_module"))
    return next((module for module in found if isinstance(module, Module)), None)


def _loader_of(trainer: Any, module: Module) -> Any:
    for owner, name in ((trainer, "get_train_dataloader"), (trainer, "datamodule"), (module, "train_dataloader")):
        found = getattr(owner, name, None)
        loader = found() if callable(found) and not _is_loader(found) else found
        if loader is not None:
            return loader
    return None


def _first(loader: Any, name: str) -> Any:
    if _is_named(loader, "LightningDataModule"):
        loader.setup("fit")
        loader = loader.train_dataloader()
    if getattr(loader, "num_workers", 0) and isinstance(loader, torch.utils.data.DataLoader):
        # Worker processes can't send fake tensors.
        loader = torch.utils.data.DataLoader(
            loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn, drop_last=loader.drop_last
        )
    for batch in loader:
        return batch
    raise UnusableError(f"{name}: the data loader returns no batch")


def _kinds(returned: object) -> str:
    parts: Iterable[object] = returned if isinstance(returned, (tuple, list)) else (returned,)
    return ", ".join(type(part).__name__ for part in parts) or "nothing"
