"""Decides which names of variables, options and fields indicate a secret.

The words are those of the keyword rules of secret scanners (Yelp/detect-secrets ``plugins/keyword.py``, gitleaks
``generic-api-key``), without those that mean something else in training: tokens of a vocabulary, keys of a store.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

from doctor.core.text import lazy_compile


class SecretConfidence(IntEnum):
    """How reliably a name indicates a secret. ``MAYBE``: always as a variable; in text only before a value that looks
    random."""

    NO = 0
    MAYBE = 1
    SURE = 2


_WORD = lazy_compile(r"[A-Z0-9]+")
_CAMEL = lazy_compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_SURE = frozenset(
    """
    AUTHORIZATION PASS PWD PW PASSCODE PASSPHRASE JWT APIKEY AUTHTOKEN SIGNATURE ACCESSKEY SECRETKEY CREDENTIAL
    CREDENTIALS CREDS CRED AUTHKEY MYSQLPW
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
_MAYBE = frozenset(
    """
    AUTH OAUTH BEARER COOKIE PAT DSN SIG PRIVATE ACCESS LICENSE LICENCE KEY KEYS COMMENT
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""``COMMENT``: the comment of a job (SLURM_JOB_COMMENT) is arbitrary user text, and no check reads it."""
_INSIDE_SURE = ("PASSW", "PASSPHR", "SECRET", "APIKEY")
_KEY_OF = frozenset(
    """
    API ACCESS SECRET PRIVATE ACCOUNT AUTH SIGNING SIGN ENCRYPTION SUBSCRIPTION LICENSE APP CLIENT SERVICE
    STORAGE DEPLOY HMAC SHARED SESSION INTEGRATION WEBHOOK ADMIN INGEST ACCESSKEY
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Words before KEY that state its purpose: ``api_key``. ``x-functions-key`` has none."""
_VOCABULARY = frozenset(
    """
    MAX MIN NUM N NO NEW TOTAL PER BATCH PROMPT INPUT OUTPUT PAD PADDING EOS BOS UNK MASK SEP CLS IMAGE AUDIO
    VIDEO SPECIAL STOP START END TARGET TRAIN TRAINED LABEL NEXT LAST FIRST NB COUNT GENERATED DRAFT TEXT IGNORE
    OF COMPLETION CONTEXT SEQ SEQUENCE GLOBAL LOCAL SEEN CONSUMED PROCESSED
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Words before TOKEN or TOKENS that make it a vocabulary token or a token count."""
_HARMLESS = frozenset({"PKEY", "PKEYS", "MONKEY", "HOTKEY", "TURKEY", "DONKEY", "JOCKEY", "WHISKEY"})
"""``PKEY`` is a partition of an InfiniBand fabric (NCCL_IB_PKEY), or the path of a key file."""
_HARMLESS_NAMES = frozenset({"PWD", "OLDPWD"})
"""The shell's working directory."""
_ALGORITHM = "NCCL_PAT_"
"""In these names ``PAT`` is an NCCL algorithm, not a personal access token."""


def is_secret_name(name: str) -> bool:
    """Whether a variable or option called ``name`` usually holds a secret; ``KEYBOARD`` does not."""
    return secrecy(name) is not SecretConfidence.NO


@lru_cache(maxsize=4096)
def secrecy(name: str) -> SecretConfidence:
    """How reliably the name of a variable, option or field indicates a secret."""
    plain = name.upper()
    if name in _HARMLESS_NAMES or plain.startswith(_ALGORITHM):
        return SecretConfidence.NO
    words = [word.rstrip("0123456789") or word for word in _WORD.findall(_CAMEL.sub("_", name).upper())]
    before = ["", *words]
    return max(
        (_of_word(word, previous) for word, previous in zip(words, before, strict=False)), default=SecretConfidence.NO
    )


def _of_word(word: str, previous: str) -> SecretConfidence:
    if word in _SURE or any(part in word for part in _INSIDE_SURE):
        return SecretConfidence.SURE
    if "TOKEN" in word and "TOKENI" not in word:
        if previous in _VOCABULARY or any(word == f"{one}TOKENS" for one in _VOCABULARY):
            return SecretConfidence.NO
        return SecretConfidence.MAYBE if word.endswith("TOKENS") else SecretConfidence.SURE
    if word in ("KEY", "KEYS"):
        return SecretConfidence.SURE if previous in _KEY_OF else SecretConfidence.MAYBE
    if word in _MAYBE or _is_compound(word):
        return SecretConfidence.MAYBE
    return SecretConfidence.NO


def _is_compound(word: str) -> bool:
    """Accept ``AUTHX``, ``USERAUTH``, ``MYCREDS``, ``WANDBKEY``, but not ``AUTHOR``, ``CREDIT``, ``MONKEY``."""
    if word.endswith(("KEY", "KEYS")):
        return word not in _HARMLESS
    if word.startswith("CRED"):
        return not word.startswith(("CREDIT", "CREDIB"))
    if word.startswith("AUTH"):
        return not word.startswith(("AUTHOR", "AUTHENTIC"))
    return word.endswith(("CREDS", "AUTH", "SIGNATURE"))
