"""Secrets of known form: tokens with a provider's prefix, key blocks, webhooks.

Prefixes and alphabets are those that providers publish so that scanners can find leaked tokens, as collected in the
rules of gitleaks (``config/gitleaks.toml``), Yelp/detect-secrets (``plugins/``) and trufflehog; lengths are lower
bounds, because a log may truncate a token. Each pattern begins with a literal and has one repetition, so that it takes
time linear in the line; it is tried only on text that contains its cue.
"""

from __future__ import annotations

import re

import msgspec

_FREE = r"(?<![A-Za-z0-9])"
"""A token begins only at a word boundary: ``disk-…`` does not contain ``sk-…``."""
_ALNUM = r"[A-Za-z0-9]{16,}"
_WORDS = r"[\w-]{16,}"
_WEB = r"[\w.~+/=-]{16,}"


class TokenFormat(msgspec.Struct, frozen=True):
    """A form of secrets. ``cue``: lower-case text that all of them contain. If ``pattern`` has a group ``secret``,
    only that group is masked."""

    cue: str
    expression: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """The compiled expression, from the cache of ``re``: compiling all of them at start-up takes 10 ms."""
        return re.compile(self.expression)


def _tokens(rest: str, *prefixes: str) -> list[TokenFormat]:
    """Tokens that begin with one of the literal ``prefixes`` and continue with ``rest``."""
    return [TokenFormat(prefix.lower(), _FREE + re.escape(prefix) + rest) for prefix in prefixes]


TOKEN_FORMATS: tuple[TokenFormat, ...] = (
    # Key blocks: PEM (RFC 7468), OpenSSH, OpenPGP (RFC 4880, 6.2). A log may break off before the end.
    TokenFormat(
        "private key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[^-]|-(?!----END))*(?:-----END [A-Z0-9 ]{0,60}-----)?",
    ),
    TokenFormat("eyj", r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),  # JSON Web Token (RFC 7519)
    # Model hubs, trackers and inference.
    *_tokens(_ALNUM, "hf_", "api_org_", "r8_", "gsk_", "pplx-", "xai-", "jina_"),
    *_tokens(_WORDS, "nvapi-", "wandb_v1_", "tgp_v1_", "lsv2_pt_", "lsv2_sk_"),
    TokenFormat("sk-", _FREE + r"sk-(?:(?:proj|ant|or|svcacct|admin|lf)-[\w-]{16,}|[A-Za-z0-9]{20,})"),
    # Code and packages.
    *_tokens(_ALNUM, "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "npm_"),
    *_tokens(_WORDS, "github_pat_", "glpat-", "gldt-", "glrt-", "glptt-", "glcbt-", "glft-", "glsoat-", "glagent-"),
    *_tokens(_WORDS, "pypi-AgE", "dckr_pat_", "dckr_oat_", "gloas-", "glimt-", "ATCTT3xFfG"),
    *_tokens(r"[0-9a-f]{20,}", "rubygems_", "pul-", "dapi"),
    # Clouds.
    *_tokens(r"[A-Z0-9]{16}(?![A-Za-z0-9])", "AKIA", "ASIA", "ABIA", "ACCA", "A3TX"),
    *_tokens(r"[A-Za-z0-9+/=]{40,}", "ABSK", "bedrock-api-key-"),
    *_tokens(r"[\w-]{30,}", "AIza"),
    *_tokens(_WORDS, "ya29.", "GOCSPX-", "hvs.", "hvb.", "hvr.", "dop_v1_", "doo_v1_", "dor_v1_", "tskey-", "sha256~"),
    *_tokens(r"[A-Za-z0-9]{12,}", "LTAI"),
    *_tokens(_WEB, "fm1a_", "fm1r_", "fm2_", "atlasv1.", "glc_", "dt0c01.", "ops_eyJ", "sntrys_eyJ", "dp.pt."),
    *_tokens(_WEB, "pscale_tkn_", "pscale_pw_", "pscale_oauth_", "tfp_", "AGE-SECRET-KEY-1"),
    TokenFormat("q~", _FREE + r"[\w~.]{3}\dQ~[\w~.-]{31,34}"),  # Azure AD
    # Chat, mail, payment.
    *_tokens(r"[\w.-]{10,}", *(f"xox{kind}-" for kind in "abcdeoprs"), "xoxe.", "xapp-"),
    TokenFormat("sg.", r"(?<![\w.-])SG\.[\w-]{16,}\.[\w-]{16,}"),
    *_tokens(_ALNUM, "sk_live_", "sk_test_", "rk_live_", "rk_test_", "whsec_", "shpat_", "shpca_", "shppa_", "shpss_"),
    *_tokens(_WORDS, "sq0atp-", "sq0csp-", "PMAK-", "NRAK-", "NRII-", "sntryu_", "xkeysib-", "glsa_", "figd_"),
    *_tokens(r"[A-Za-z0-9]{30,}", "EZAK", "EZTK", "CLOJARS_", "lin_api_", "ntn_"),
    TokenFormat("-us", _FREE + r"[0-9a-f]{32}-us[0-9]{1,2}(?![0-9])"),  # Mailchimp
    TokenFormat(":aa", _FREE + r"[0-9]{8,10}:AA[\w-]{32,35}(?![\w-])"),  # Telegram
    TokenFormat("key-", _FREE + r"key-[0-9a-f]{32}(?![0-9a-f])"),  # Mailgun
    # URLs that are secrets themselves: anybody who knows one can post.
    TokenFormat("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows|triggers)/(?P<secret>[\w/+-]{10,})"),
    TokenFormat("/api/webhooks/", r"discord(?:app)?\.com/api/webhooks/\d{1,24}/(?P<secret>[\w-]{10,})"),
    TokenFormat("webhook.office.com/", r"webhook\.office\.com/(?P<secret>[\w@/-]{10,})"),
    TokenFormat("api.telegram.org/bot", r"api\.telegram\.org/bot(?P<secret>[\w:-]{10,})"),
)
"""All forms; the order matters only if one form contains another."""
