"""The hook of ``doctor run``: has training frameworks watched as soon as this process imports them.

This folder is on PYTHONPATH, so every interpreter below the command imports this file at its start (module ``site``),
whatever its release and environment. Hence the syntax of Python 3.6, and no import but of ``os`` and ``sys``, which are
loaded already. The folder leaves ``sys.path`` at once, but not PYTHONPATH, from which children get it. Then the
``sitecustomize`` that this one hides is imported, and replaces it in ``sys.modules``.

Nothing of the package ``doctor`` is imported before a module of ``INSTALLERS`` is, and nothing at all if the program
has another module of that name.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRAINERS = "doctor.monitor.autostart.trainers:"
TORCH = "doctor.monitor.autostart.torch_modules:"
LAUNCHERS = "doctor.monitor.autostart.launchers:"
INSTALLERS = {
    "lightning.pytorch.trainer.trainer": TRAINERS + "watch_lightning",
    "pytorch_lightning.trainer.trainer": TRAINERS + "watch_lightning",
    "transformers.trainer": TRAINERS + "watch_transformers",
    "deepspeed.runtime.engine": TORCH + "watch_deepspeed",
    "megatron.core.distributed.distributed_data_parallel": TORCH + "watch_megatron",
    "accelerate.data_loader": TORCH + "watch_accelerate_loaders",
    "torch.nn.parallel.distributed": TORCH + "watch_ddp",
    "torch.distributed.fsdp.fully_sharded_data_parallel": TORCH + "watch_fsdp",
    "torch.distributed.fsdp._fully_shard._fully_shard": TORCH + "watch_fully_shard",
    "torch.distributed._composable.fsdp.fully_shard": TORCH + "watch_fully_shard",  # torch 2.4 and 2.5
    "torch.distributed.distributed_c10d": TORCH + "watch_process_groups",
    "torch.distributed.elastic.multiprocessing.api": LAUNCHERS + "watch_torchrun",
    "lightning.fabric.strategies.launchers.subprocess_script": LAUNCHERS + "watch_lightning_children",
    "lightning_fabric.strategies.launchers.subprocess_script": LAUNCHERS + "watch_lightning_children",
    "torch.multiprocessing.spawn": TORCH + "watch_spawned_processes",
    "ray.train.v2._internal.execution.worker_group.thread_runner": TORCH + "watch_ray_workers",
    "torch.serialization": TORCH + "watch_checkpoints",
}
"""The function that is called with each module when it has been imported."""

FOLDER = os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))
"""The folder that the package ``doctor`` was loaded from when ``doctor run`` started."""
LOCATIONS = {"doctor": (ROOT,), "doctor_checks": (ROOT, os.path.join(ROOT, "checks"))}
IDENTITY = "DOCTOR_RUN"


def identity() -> str:
    """What has to be equal in ``doctor run`` and here: the user, and the interpreter with its environment."""
    return f"{os.geteuid()}:{sys.hexversion:x}:{sys.implementation.cache_tag}:{sys.prefix}"


def difference(expected: str) -> str:
    """Why this process is not the one that ``expected`` describes; empty if it is."""
    if expected == identity():
        return ""
    if expected.partition(":")[0] != str(os.geteuid()):
        return "it runs as a different user than doctor run"
    release = ".".join(map(str, sys.version_info[:3]))
    return f"its Python ({release}, {sys.prefix}) is not the one that doctor run runs with"


def is_disabled() -> bool:
    """The same as ``doctor.monitor.integrations.hook_guard.is_disabled``."""
    return os.environ.get("DOCTOR_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")


def tell(reason: str) -> None:
    """Print one line on standard error, if that is possible."""
    try:
        words = " ".join(f"rankdoctor: process {os.getpid()} is not watched: {reason}".split())
        sys.stderr.write(words[:600] + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # it is closed
        pass


class PackageFinder:
    """Finds the packages of the doctor where they lie, as the last of all finders."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of one of the doctor's packages, else ``None``."""
        if path is None and name in LOCATIONS:
            return path_finder().find_spec(name, LOCATIONS[name])
        return None


class ImportWatcher:
    """A finder that finds nothing itself, and has installers called with the modules that others find."""

    def __init__(self, installers: "dict[str, str] | None" = None) -> None:
        self.waiting = dict(INSTALLERS if installers is None else installers)
        self.searched: set[str] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return what the other finders find, with a loader that reports the module of an installer."""
        if name not in self.waiting or name in self.searched:
            return None
        self.searched.add(name)  # finders of other tools that do the same ask each other
        try:
            for finder in sys.meta_path:
                search = getattr(finder, "find_spec", None)
                spec = None if finder is self or search is None else search(name, path, target)
                if spec is not None:
                    self.intercept(name, spec.loader)
                    return spec
            return None
        finally:
            self.searched.discard(name)

    def intercept(self, name: str, loader: "Any") -> None:
        """Have the installer called after the loader has executed the module; the loader is restored before."""

        def exec_module(module: "Any") -> None:
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            loader.exec_module(module)
            if module.__name__ == name:
                self.install(name, module)

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):  # a loader without attributes of its own: the module is not watched
            pass

    def install(self, name: str, module: "Any") -> None:
        """Call the installer, once; a failure costs one line."""
        target = self.waiting.pop(name, None)
        if target is None or is_disabled():
            return
        try:
            if hidden_by():
                self.waiting.clear()
                tell(f"the module doctor of this program ({hidden_by()}) has the name of rankdoctor's")
                return
            home, _, function = target.partition(":")
            __import__(home)
            getattr(sys.modules[home], function)(module)
        except Exception as error:
            tell(f"{target}: {type(error).__name__}: {error}")


def path_finder() -> "Any":
    """The import system's finder of files; it is frozen into every interpreter."""
    return sys.modules["_frozen_importlib_external"].PathFinder


def hidden_by() -> str:
    """Where another module or package ``doctor`` comes from that the program imported or would import."""
    loaded = sys.modules.get("doctor")
    spec = loaded.__spec__ if loaded is not None else path_finder().find_spec("doctor")
    if spec is None:
        return ""
    origin = spec.origin or "a namespace package"
    own = os.path.join(ROOT, "doctor", "__init__.py")
    return "" if os.path.realpath(origin) == os.path.realpath(own) else origin


def is_begun() -> bool:
    """Whether imports of this process are watched; this file may have been loaded under another name."""
    return any(type(finder).__name__ == ImportWatcher.__name__ for finder in sys.meta_path)


def begin() -> None:
    """Watch the imports of this process if it is one that ``doctor run`` started."""
    expected = os.environ.get(IDENTITY, "")
    if not expected or is_disabled():
        return
    reason = difference(expected)
    if reason:
        tell(reason)
        return
    watcher = ImportWatcher()
    sys.meta_path.insert(0, watcher)
    sys.meta_path.append(PackageFinder)
    for name in [name for name in INSTALLERS if name in sys.modules]:  # imported by a .pth file
        watcher.install(name, sys.modules[name])


def leave() -> None:
    """Take this folder from the import path of this process."""
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)


if __name__ == "sitecustomize":
    try:
        leave()
        begin()
    except Exception as error:
        tell(f"{type(error).__name__}: {error}")
    # The module that Python would have imported instead of this one; module site handles its errors, and its absence.
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
