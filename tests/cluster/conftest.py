"""What the tests of the gathering share: boards, whatever carries them."""

import itertools
import secrets

import pytest

from tests.cluster.boards import folder_boards, store_boards


@pytest.fixture
def folders(tmp_path):
    """A function that makes a place for a board of its own, in a folder: a function that opens it."""
    numbers = itertools.count()
    return lambda: folder_boards(tmp_path / str(next(numbers)))


@pytest.fixture(params=["folder", "store"])
def places(request, folders):
    """The same, whatever carries the board."""
    return folders if request.param == "folder" else lambda: store_boards(secrets.token_hex(4))


@pytest.fixture
def folder(folders):
    """A function that opens a board in a folder; all that it opens show the same."""
    return folders()


@pytest.fixture
def boards(places):
    """The same, whatever carries the board."""
    return places()
