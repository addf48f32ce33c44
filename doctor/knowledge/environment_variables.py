"""The variables that NCCL and torch.distributed read, and the known name closest to a misspelled one.

Sources: ``NCCL_PARAM``, ``DEFINE_NCCL_PARAM`` and ``ncclGetEnv`` in NCCL's sources over the tags 2.3.5 to 2.30.7 and
its user guide (docs/userguide/source/env.rst); ``getCvar*`` and ``getenv`` in torch from 2.1 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Literal

import msgspec

from doctor.core.text import lazy_compile
from doctor.knowledge.data_files import read
from doctor.knowledge.releases import within

Reader = Literal["nccl", "plugin", "torch", "cuda"]


class VariableInfo(msgspec.Struct, frozen=True):
    """A known variable.

    ``reader``: the library that reads it; ``first`` and ``last``: releases of the reader, ``None`` if it is older than
    the oldest release examined or still present. ``type``: int, bool, float or string; ``grammar``: the rule of
    :mod:`doctor.knowledge.variable_values` for its value, with ``words``, ``minimum``, ``maximum`` and ``step``;
    ``is_replaced``: NCCL uses another number instead of one beyond these, and runs;
    ``bits``: the device drops all others; ``unlimited``: this value and greater ones up to 255 mean no limit.
    ``default``: only if it is one literal in every release. ``replaced_by``, ``superseded`` (since which release),
    ``still_read``: for a renamed or removed one. ``peers``: whether the ranks of a job must ``agree`` on it, ``may
    differ``, or (empty) should not differ. ``source``: the upstream file that reads it.
    """

    reader: Reader
    type: str = "string"
    grammar: str = "none"
    words: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    step: int | None = None
    is_replaced: bool = False
    bits: int | None = None
    unlimited: int | None = None
    default: str | None = None
    first: str | None = None
    last: str | None = None
    replaced_by: str | None = None
    superseded: str | None = None
    still_read: bool = False
    peers: str = ""
    note: str = ""
    source: str = ""

    @property
    def is_superseded_everywhere(self) -> bool:
        """Whether no supported release reads it under this name as its own."""
        oldest = OLDEST_SUPPORTED.get(self.reader)
        return self.superseded is not None and oldest is not None and not within(oldest, before=self.superseded)


OLDEST_SUPPORTED = {"nccl": "2.20.5", "torch": "2.4"}
"""The oldest releases in use: the oldest torch that this package supports, and the NCCL that its wheels pin
(nvidia-nccl-cu12)."""


@cache
def table() -> dict[str, VariableInfo]:
    """All known variables by name."""
    shape = dict[str, VariableInfo]
    return read("torch_variables.json", shape) | read("nccl_variables.json", shape)


def known(name: str) -> VariableInfo | None:
    """The variable ``name``; ``None`` if no known release reads it."""
    return table().get(name)


class _ReadingLibrary(msgspec.Struct, frozen=True):
    names: frozenset[str]
    prefixes: tuple[str, ...]
    is_plugin: bool = False

    def reads(self, name: str) -> bool:
        return name in self.names or name.startswith(self.prefixes)


@cache
def _readers() -> dict[str, _ReadingLibrary]:
    """The file lists them by reader, with the commit that the names were extracted from if the source is public."""
    return read("nccl_foreign.json", dict[str, _ReadingLibrary])


def is_foreign(name: str) -> bool:
    """Whether ``name`` belongs to a package, a build, a plugin or a fork of NCCL: NCCL itself does not read it."""
    return any(reader.reads(name) for reader in _readers().values())


def network_plugin_of(name: str) -> str | None:
    """The network plugin of NCCL that is known to read ``name``; ``None`` if none is."""
    found = (title for title, reader in _readers().items() if reader.is_plugin and reader.reads(name))
    return next(found, None)


_MISSPELT_PREFIX = lazy_compile(r"N+[CL]{1,4}_")


def concerns_nccl(name: str) -> bool:
    """Whether ``name`` is, or may be intended as, a variable of NCCL or of torch's NCCL process group."""
    return name.strip().upper().startswith(("NCCL_", "TORCH_NCCL_")) or bool(_MISSPELT_PREFIX.match(name))


_LOOK_ALIKE = str.maketrans("01", "OI")


@cache
def _library_variables() -> tuple[frozenset[str], dict[str, str]]:
    """The variables of PyTorch, Gloo, TensorPipe, UCX, libfabric, CUDA, ROCm and OpenMP, and each without 0 and 1.

    The file lists them by library, with the release or commit that the names were extracted from."""
    listed = read("library_variables.json", dict[str, frozenset[str]]).values()
    names = frozenset(name for library in listed for name in library) | frozenset(table())
    return names, {name.translate(_LOOK_ALIKE): name for name in sorted(names)}


_LIBRARIES = ("TORCH_", "PYTORCH_", "GLOO_", "TP_", "UCX_", "FI_", "CUDA_", "HIP_", "ROCR_", "OMP_")


@cache
def misspelled(name: str) -> str | None:
    """The variable of NCCL or of one of these libraries that ``name`` misspells by one letter.

    0 and 1 count as the letters O and I. CCL_ is the prefix of oneCCL, and of NCCL without its first letter. ``None``
    if the name is a known one or resembles none, as a variable of a script with such a prefix does."""
    names, by_shape = _library_variables()
    if concerns_nccl(name) or name in names:
        return None
    if name.startswith("CCL_") and known(f"N{name}") is not None:
        return f"N{name}"
    shape = name.upper().translate(_LOOK_ALIKE)
    if not shape.startswith(_LIBRARIES):
        return None
    if shape in by_shape:
        return by_shape[shape]
    prefix = next(one for one in _LIBRARIES if shape.startswith(one))
    own = shape.removeprefix(prefix)
    near = (one for known, one in by_shape.items() if known.startswith(prefix) and slips(shape, known, 1) == 1)
    return min(near, default=None) if len(own) >= _SHORTEST_NAME else None


_SHORTEST_NAME = 3
"""Letters of a name's own part: shorter ones are one letter away from many."""


LETTERS_PER_SLIP = 5
"""Letters of a name's own part per tolerated typo, so that the variable of a plugin is not taken for a misspelling:
NCCL_IB_HCA allows one, NCCL_SOCKET_IFNAME two."""


@cache
def nearest(name: str) -> str | None:
    """The known name that ``name`` is probably intended as; ``None`` if none is close.

    In this order: equal except for case, blanks and underscores; with a missing or superfluous TORCH_, or NCCL
    misspelled; with its words in another order; with a few typos; truncated.
    """
    plain = name.strip().upper()
    ordered, spelt = _candidates(_is_torch(plain))
    for spelling, by_spelling in zip(_SPELLINGS, spelt, strict=True):
        if match := next((known for known in by_spelling.get(spelling(plain), ()) if known != name), None):
            return match
    near = [one for one in ordered if one.name != name]
    return _closest(plain, near) or _unfinished(plain, near)


class _Candidate(msgspec.Struct, frozen=True):
    """A known name: its own part, the same without underscores, and its letters as bits."""

    name: str
    own: str
    squashed: str
    letters: int


@cache
def _candidates(torch: bool) -> tuple[list[_Candidate], list[dict[str, tuple[str, ...]]]]:
    """The candidates for a name of torch, or for another name, in order of preference and indexed by each of the
    spellings. Cached, because a host may have thousands of unknown variables."""
    names = [known for known in table() if concerns_nccl(known)]
    names.sort(key=lambda known: (table()[known].superseded is not None, _is_torch(known) != torch))
    ordered = []
    spelt: list[dict[str, tuple[str, ...]]] = [{} for _ in _SPELLINGS]
    for known in names:
        own = _own_part(known)
        ordered.append(_Candidate(known, own, _squash(own), _letters(_squash(own))))
        for spelling, by_spelling in zip(_SPELLINGS, spelt, strict=True):
            key = spelling(known)
            by_spelling[key] = (*by_spelling.get(key, ()), known)
    return ordered, spelt


def _letters(text: str) -> int:
    """A bit for each letter and digit in the name."""
    bits = 0
    for letter in text:
        bits |= 1 << (ord(letter) & 63)
    return bits


def _is_torch(name: str) -> bool:
    return name.startswith("TORCH_")


def _squash(name: str) -> str:
    return name.replace("_", "")


def _own_part(name: str) -> str:
    return re.sub(r"^(?:TORCH_)?(?:N+[CL]{1,4}_)+", "", name)


def _sorted_words(name: str) -> str:
    return " ".join(sorted(name.split("_")))


_SPELLINGS = (_squash, _own_part, _sorted_words)


def _closest(name: str, candidates: Sequence[_Candidate]) -> str | None:
    """The name with the fewest typos. One typo removes at most one kind of letter and adds one, so most names are
    excluded by their letters."""
    own = _squash(_own_part(name))
    limit = max(1, len(_own_part(name)) // LETTERS_PER_SLIP)
    letters = _letters(own)
    best, found = limit + 1, None
    for known in candidates:
        if (
            abs(len(known.squashed) - len(own)) < best
            and (letters & ~known.letters).bit_count() < best
            and (known.letters & ~letters).bit_count() < best
            and (distance := slips(own, known.squashed, best - 1)) < best
        ):
            best, found = distance, known.name
    return found


def _unfinished(name: str, candidates: Sequence[_Candidate]) -> str | None:
    """The one known name that continues ``name``; a single word (NCCL_IB) is not enough."""
    own = _own_part(name)
    if "_" not in own:
        return None
    longer = [known.name for known in candidates if known.own.startswith(f"{own}_")]
    return longer[0] if len(longer) == 1 else None


def slips(one: str, other: str, limit: int) -> int:
    """The number of insertions, deletions, substitutions and transpositions between two names (optimal string
    alignment); more than ``limit`` is returned as ``limit + 1``."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, theirs in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != theirs))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == theirs:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return min(row[-1], limit + 1)


def without_loss(name: str, value: str) -> str:
    """What the loss of a removed name leaves as it was; empty if it changes something."""
    switched_off = name == "NCCL_IB_CUDA_SUPPORT" and value.strip() == "0"
    return "" if switched_off else _WITHOUT_LOSS.get(name, "")


_WITHOUT_LOSS = {
    "NCCL_IB_CUDA_SUPPORT": "None: NCCL uses GPUDirect RDMA by default if the devices support it.",
    "NCCL_CHECKS_DISABLE": "None: NCCL ignores it, and the pointer checks are off by default.",
    "NCCL_WORK_FIFO_DEPTH": "None on the results: NCCL uses the default size of its work queue.",
    **dict.fromkeys(
        ("NCCL_LL_THRESHOLD", "NCCL_SINGLE_RING_THRESHOLD", "NCCL_THREAD_THRESHOLD", "NCCL_TREE_THRESHOLD"),
        "None on the results: NCCL chooses algorithm, protocol and threads by itself for each size.",
    ),
}
"""Removed names whose loss changes neither what NCCL chooses nor whether ranks agree, and their effects."""
