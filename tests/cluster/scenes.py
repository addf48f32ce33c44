"""Tests that wait more than they work, and so are played side by side: all that were chosen begin at once."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.boards import NewBoard, folder_boards, store_boards
from tests.cluster.ranks import hurry

Play = Callable[..., None]
CARRIERS = ("folder", "store")


class Place(NamedTuple):
    """Where a scene is played, with a folder of its own."""

    folder: Path
    carrier: str

    def boards(self, name: str = "board") -> NewBoard:
        """Boards that all show the same; those of another ``name`` show something else."""
        if self.carrier == "folder":
            return folder_boards(self.folder / name)
        return store_boards(f"{self.folder.name}-{name}")

    @property
    def root(self) -> Path:
        """Where the board of a folder is."""
        return self.folder / "board" / ".rankdoctor-key"


class Scenes:
    """The scenes of a module. Its tests ask for the fixture ``played``, which :meth:`fixture` makes."""

    def __init__(self) -> None:
        self._plays: dict[str, Callable[[Path], None]] = {}
        self._started = False

    def scene(
        self, carriers: Sequence[str] = ("folder",), **choices: Sequence[object]
    ) -> Callable[[Play], Callable[..., None]]:
        """Makes a test of a function that gets a :class:`Place`; one for each carrier and each of the ``choices`` of
        its other arguments."""

        def decorate(play: Play) -> Callable[..., None]:
            names = []
            for carrier, *values in itertools.product(carriers, *choices.values()):
                names.append("-".join(map(str, [carrier, *values])))
                self._plays[f"{play.__name__}[{names[-1]}]"] = _bound(
                    play, carrier, dict(zip(choices, values, strict=True))
                )

            @pytest.mark.parametrize("name", names)
            def test(played: Callable[[str], None], name: str) -> None:
                played(f"{play.__name__}[{name}]")

            test.__name__, test.__doc__ = play.__name__, play.__doc__
            return test

        return decorate

    def fixture(self) -> Any:
        """The fixture that plays what was chosen, and gives a function that waits for one scene."""

        @pytest.fixture(scope="module")
        def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
            _import_torch()
            chosen = [item.name for item in request.session.items if item.name in self._plays and not self._started]
            self._started = True
            with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max(1, len(chosen))) as stage:
                hurry(patch)
                folders = {name: tmp_path_factory.mktemp("scene") for name in chosen}
                futures = {name: stage.submit(self._plays[name], folder) for name, folder in folders.items()}
                yield lambda name: self._result(name, futures, tmp_path_factory)

        return played

    def _result(self, name: str, futures: dict[str, Future[None]], folders: pytest.TempPathFactory) -> None:
        """Wait for a scene. For a second attempt the fixture is made again, and the scene is played by itself."""
        if name in futures:
            futures[name].result()
        else:
            self._plays[name](folders.mktemp("scene"))


def _import_torch() -> None:
    """In the one thread that there is yet: imported beside others that wait for it, torch crashes now and then."""
    with suppress(ModuleNotFoundError):
        importlib.import_module("torch.distributed")


def _bound(play: Play, carrier: str, values: dict[str, object]) -> Callable[[Path], None]:
    return lambda folder: play(Place(folder, carrier), **values)
