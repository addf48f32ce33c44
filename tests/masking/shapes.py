"""The shapes of secrets that nothing may let out: as people, programs and scanners' rules write them.

No secret here was ever one: they are drawn from a fixed seed. Prefixes stand apart from what follows, so that no
scanner takes this file for a leak. Sources of the forms: the rules of gitleaks (``config/gitleaks.toml``), the plugins
of Yelp/detect-secrets, the detectors of trufflehog, and the documentation of the providers.
"""

from __future__ import annotations

import random
import string
from typing import NamedTuple

_CHANCE = random.Random(20261123)
ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


class Secret(NamedTuple):
    """A secret in the text in which it is written. ``secret``: the part that must not be shown."""

    name: str
    text: str
    secret: str


def _word(size: int, alphabet: str = ALNUM) -> str:
    return "".join(_CHANCE.choice(alphabet) for _ in range(size))


def _written(name: str, form: str, secret: str) -> Secret:
    return Secret(name, form.replace("{}", secret), secret)


def _prefixed(name: str, prefix: str, size: int = 36, alphabet: str = ALNUM) -> Secret:
    secret = prefix + _word(size, alphabet)
    return Secret(name, f"denied for {secret} at the endpoint", secret)


_JWT = "ey" + "J" + _word(20) + "." + "ey" + "J" + _word(40) + "." + _word(43)
_SHORT = "pw" + "7q"
_PLAIN = "hunt" + "erTwo" + "99x"

SECRETS: tuple[Secret, ...] = (
    # Names and values.
    _written("aws ini", "aws_secret_access_key = {}", _word(36) + "/k+8"),
    _written("env assignment", "HF_TOKEN={}", _word(24)),
    _written("export", "export WANDB_API_KEY={}", _word(40, HEX)),
    _written("json", '{"user": "x", "api_key": "{}", "n": 3}', _word(20)),
    _written("json escaped", '{\\"api_key\\": \\"{}\\"}', _word(20)),
    _written("yaml", "password: {}", _PLAIN),
    _written("python dict", "{'user': 'x', 'token': '{}'}", _word(20)),
    _written("python keyword", "login(token='{}', add_to_git=False)", _word(20)),
    _written("short password", "password={}", _SHORT),
    _written("short password, yaml", "passwd: {}", _SHORT),
    _written("pwd in a connection string", "Server=db1;User Id=app;Pwd={};Timeout=3", _PLAIN),
    _written("libpq", "host=db1 user=app password={} dbname=runs", _PLAIN),
    _written("secret with blanks, quoted", 'client_secret="{}"', "two words " + _word(8)),
    _written("camel case", "clientSecret: {}", _word(20)),
    _written("query, access_token", "GET /v1/me?access_token={}&page=2", _word(30)),
    _written("query, escaped", "redirect=https%3A%2F%2Fx%2F%23access_token%3D{}", _word(30)),
    _written("query, api_key", "GET https://api.example.com/v1?api_key={}&page=2", _word(24)),
    _written("query, key", "GET https://api.example.com/v1?key={}&page=2", _word(24)),
    _written("AccountKey", "DefaultEndpointsProtocol=https;AccountName=x;AccountKey={};Suffix=y", _word(84) + "=="),
    _written("SharedAccessKey", "Endpoint=sb://x/;SharedAccessKey={}", _word(42) + "="),
    _written("short number", "password: {}", "83" + "17"),
    _written("XML", "<server><password>{}</password></server>", _PLAIN),
    _written("escaped quote", 'password = "{}"', "a" + '\\"b' + "9x"),
    _written("environment", "environ({'HOME': '/root', 'WANDB_API_KEY': '{}'})", _word(40, HEX)),
    _written("docker auth", '"auths": {"ghcr.io": {"auth": "{}"}}', _word(30) + "=="),
    _written("netrc", "machine api.wandb.ai login user password {}", _word(40, HEX)),
    _written("npmrc", "//registry.npmjs.org/:_authToken={}", _word(36, HEX)),
    _written("ngc apikey", "apikey = {}", _word(40)),
    _written("token in prose", "invalid token {}", _word(24)),
    _written("password in prose", "the password '{}' was refused", _PLAIN),
    _written("bearer in prose", "using bearer {}", _word(24)),
    # Addresses.
    _written("url", "https://alice:{}@host1.example.com/x", _PLAIN),
    _written("url, slash", "https://alice:{}@host1/x", "pa7s/wo" + "rd8"),
    _written("url, at", "https://alice:{}@host1/x", "pa7s@wo" + "rd8"),
    _written("url, blank", "https://alice:{}@host1/x", "pa7s wo" + "rd8"),
    _written("url, token alone", "https://{}@github.com/x/y.git", _word(24)),
    _written("url, redis without user", "redis://:{}@10.0.0.1:6379/0", _PLAIN),
    _written("login without scheme", "alice:{}@nas1:29400", _PLAIN),
    _written("login in a path", "/mnt/alice:{}@nas1/x", _PLAIN),
    _written("jdbc", "jdbc:postgresql://db1/x?user=a&password={}", _PLAIN),
    _written("mongodb", "mongodb+srv://app:{}@cluster0.example.net/x", _PLAIN),
    _written("S3, signature 4", "GET /x?X-Amz-Expires=60&X-Amz-Signature={}", _word(64, HEX)),
    _written("S3, signature 2", "GET /x?Expires=1&Signature={}", _word(26) + "%3D"),
    _written("S3, session", "GET /x?X-Amz-Security-Token={}&z=1", _word(80)),
    _written("Azure SAS", "https://x.blob.core.windows.net/c/b?sv=2022&sp=r&sig={}", _word(42) + "%3D"),
    _written("Google, signed", "GET /x?X-Goog-Signature={}", _word(64, HEX)),
    _written(
        "Slack webhook",
        "POST https://hooks.slack.com/services/{}",
        "T0" + _word(8) + "/B0" + _word(8) + "/" + _word(24),
    ),
    _written("Discord webhook", "POST https://discord.com/api/webhooks/123456789012345678/{}", _word(68)),
    _written(
        "Teams webhook", "POST https://acme.webhook.office.com/{}", "webhookb2/" + _word(36, HEX) + "@" + _word(36, HEX)
    ),
    _written("Telegram bot", "https://api.telegram.org/{}/sendMessage", "bot12345678:AA" + _word(33)),
    # Headers.
    _written("header, bearer", "Authorization: Bearer {}", _word(20)),
    _written("header, short bearer", "'Authorization': 'Bearer {}'", _SHORT),
    _written("header, basic", "Authorization: Basic {}", _word(22) + "=="),
    _written("header, token", "authorization: token {}", _word(20)),
    _written("header, signature 4", "Authorization: AWS4-HMAC-SHA256 Credential=x, Signature={}", _word(64, HEX)),
    _written("header, X-Api-Key", "X-Api-Key: {}", _word(20)),
    _written("header, X-Auth-Token", "x-auth-token: {}", _word(20)),
    _written("header, cookie", "Cookie: session={}; theme=dark", _word(30)),
    _written("header, set-cookie", "Set-Cookie: sid={}; HttpOnly", _word(30)),
    # Commands.
    _written("curl -u", "curl -u alice:{} https://host1/x", _PLAIN),
    _written("curl -H", "curl -H 'X-Api-Key: {}' https://host1/x", _PLAIN),
    _written("mysql -p", "mysql -h db1 -u root -p{} runs", _PLAIN),
    _written("sshpass", "sshpass -p {} ssh host1", _PLAIN),
    _written("redis-cli", "redis-cli -h db1 -a {} ping", _PLAIN),
    _written("--password", "tool --user a --password {} go", _PLAIN),
    _written("--password=", "tool --password={} go", _SHORT),
    _written("--pw", "tool --pw {} go", _SHORT),
    _written("--api-key", "tool --api-key {} go", _word(20)),
    _written("wandb login", "wandb login {}", _word(40, HEX)),
    _written("wandb login, option", "wandb login --relogin {}", _word(40, HEX)),
    _written("docker login", "docker login -u alice -p {} ghcr.io", _PLAIN),
    _written("openssl", "openssl rsa -passin pass:{} -in key", _PLAIN),
    _written("aws configure", "aws configure set aws_secret_access_key {}", _word(40)),
    # Key blocks.
    _written("PEM, RSA", "-----BEGIN RSA PRIVATE " + "KEY-----\n{}\n-----END RSA PRIVATE KEY-----", _word(64)),
    _written(
        "PEM, OpenSSH", "-----BEGIN OPENSSH PRIVATE " + "KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----", _word(64)
    ),
    _written("PGP", "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK-----", _word(64)),
    _written(
        "PEM in JSON", '"private_key": "-----BEGIN PRIVATE ' + 'KEY-----\\n{}\\n-----END PRIVATE KEY-----"', _word(64)
    ),
    # Forms of providers.
    Secret("JWT", f"got {_JWT} from the issuer", _JWT),
    _prefixed("Hugging Face", "h" + "f_", 34),
    _prefixed("Hugging Face, organisation", "api_" + "org_", 34),
    _prefixed("GitHub", "gh" + "p_"),
    _prefixed("GitHub, server", "gh" + "s_"),
    _prefixed("GitHub, fine-grained", "github_" + "pat_", 82),
    _prefixed("GitLab", "gl" + "pat-", 20),
    _prefixed("GitLab, runner", "gl" + "rt-", 20),
    _prefixed("OpenAI", "s" + "k-", 48),
    _prefixed("OpenAI, project", "s" + "k-proj-", 60),
    _prefixed("Anthropic", "s" + "k-ant-api03-", 60),
    _prefixed("AWS access key", "AK" + "IA", 16, string.ascii_uppercase + "234567"),
    _prefixed("AWS Bedrock", "AB" + "SK", 120),
    _prefixed("Slack, bot", "xo" + "xb-", 40),
    _prefixed("Slack, app", "xa" + "pp-1-", 40),
    _prefixed("Google API key", "AI" + "za", 35),
    _prefixed("Google OAuth", "ya" + "29.", 60),
    _prefixed("Google OAuth secret", "GOC" + "SPX-", 28),
    _prefixed("NVIDIA", "nv" + "api-", 60),
    _prefixed("npm", "np" + "m_", 36),
    _prefixed("PyPI", "py" + "pi-AgEIcHlwaS5vcmc", 80),
    _prefixed("Stripe", "sk_" + "live_", 24),
    _prefixed("Replicate", "r" + "8_", 37),
    _prefixed("Databricks", "da" + "pi", 32, HEX),
    _prefixed("Docker", "dckr_" + "pat_", 27),
    _prefixed("SendGrid", "S" + "G." + _word(22) + ".", 43),
    _prefixed("Vault", "hv" + "s.", 90),
    _prefixed("DigitalOcean", "dop_" + "v1_", 64, HEX),
    _prefixed("Shopify", "shp" + "at_", 32, HEX),
    Secret("Mailchimp", "key " + (_mail := _word(32, HEX) + "-us12") + " used", _mail),
    Secret("Telegram", "bot " + (_bot := "1234567890:AA" + _word(33)) + " used", _bot),
    _prefixed("Groq", "gs" + "k_", 52),
    _prefixed("Alibaba", "LT" + "AI", 20),
    _prefixed("Postman", "PM" + "AK-", 50, HEX),
    _prefixed("Weights & Biases", "wandb_" + "v1_", 60),
)

NAMES = tuple(
    """
    NCCL_AUTHX NCCL_MYTOKENS SLURM_SPANK_TOKENZ PYTORCH_SIGNATURE UCX_CREDS FI_PASSCODE SLURM_API_SIG NCCL_PRIVATE
    TORCH_ACCESS SLURM_CRED TORCH_HUB_PW NVIDIA_LICENSE NCCL_PASSWORD NCCL_SECRET NCCL_KEY TORCH_TOKEN
    TORCH_API_KEY PYTORCH_JWT UCX_PASS UCX_PASSPHRASE FI_COOKIE OFI_AUTH NCCL_CREDENTIAL SLURM_JWT
    SLURM_JOB_COMMENT SLURM_SECRET_KEY PET_TOKEN OMPI_MCA_btl_auth NVIDIA_API_KEY CUDA_PAT GLOO_BEARER NCCL_OAUTH
    TORCH_PASSWD SLURM_MYKEY PYTORCH_DSN NCCL_SSH_KEY UCX_PWD FI_ACCESS_KEY NVIDIA_NGC_APIKEY SLURM_OAUTH2
    TORCHELASTIC_SECRETS NCCL_HMAC_SIGNATURE RCCL_TOKEN HIP_AUTHKEY
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Names of variables that begin like captured ones and announce a secret."""

OPAQUE = "Zq" + _word(14)
"""What such a variable holds."""
