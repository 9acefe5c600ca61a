"""Take secrets out of command lines and texts before they are written anywhere. Standard library only.

Better one harmless value too many than one token in a file: ``--tokenizer gpt2`` loses its value as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

REDACTED = "<redacted>"

# What names and values of secrets look like: the keyword lists of detect-secrets (plugins/keyword.py), gitleaks
# (config/gitleaks.toml) and GitHub's secret scanning patterns, cut down to what command lines and addresses hold.
_SECRET_WORD = (
    r"(?:key|token|secret|passw|pass[_-]word|passphrase|passcode|credential|auth|cookie|signature|private|bearer"
    r"|webhook|mnemonic|seed[_-]?phrase|recovery[_-]?code|connection[_-]?str|conn[_-]str|session[_-]?id)"
)
"""Says it anywhere in a name."""
_LAST_WORD = r"(?:pass|\w{1,9}\dpass|pwd|pswd|psw|pw|pin|t?otp|mfa(?:[_-]code)?|sig|sas|jwt|pat|creds?|dsn|hmac|salt|nonce|[cx]srf|sid|pem|assertion|licen[sc]e)"
"""Says it as the last word of a name: ``--db-pass``, ``?sig=``. Inside one it means other things: ``--pin-memory``."""
_FLAG = re.compile(rf"^--?(?:[\w.\-]*{_SECRET_WORD}[\w.\-]*|(?:[\w.\-]*[._\-])?{_LAST_WORD})$", re.IGNORECASE)
_LOGIN = re.compile(r"^(?:-u|--?(?:[\w.\-]*[._\-])?(?:user|login))$", re.IGNORECASE)
"""Options whose value may be ``name:password``."""
_VALUE = r"""(?P<value>[bru]?\\*"[^"]*"|[bru]?\\*'[^']*'|\[[^\]]{0,999}\]|\([^)]{0,999}\)|[^\s,&;"'}\]]+)"""
_SHORT_ASSIGNMENT = re.compile(
    # With a colon only where it is a key for sure: in quotes, or alone at the beginning of a line.
    rf"""(?P<name>(?<![A-Za-z0-9]){_LAST_WORD}(?:\\*["']\s*[=:]\s*|\s*(?:=|%3D)\s*)|^[ \t]{{0,60}}(?:[\w.\-]{{0,60}}[._\-])?{_LAST_WORD}[ \t]*:[ \t]+)"""
    rf"""{_VALUE}""",
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNMENT = re.compile(
    rf"""(?P<name>{_SECRET_WORD}[\w.\-]{{0,60}}(?<!error)(?<!exception)(?<!warning)\\*["']?\s*(?:[=:]|%3D)\s*){_VALUE}""",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"""(?P<name>(?<!\S)--?(?:[\w.\-]{{0,60}}{_SECRET_WORD}[\w.\-]{{0,60}}|(?:[\w.\-]{{0,60}}[._\-])?{_LAST_WORD})[ \t]{{1,9}})(?!-){_VALUE}""",
    re.IGNORECASE,
)
"""An option and its value within one text: ``sh -c "train --token X"``."""
_LOGIN_OPTION = re.compile(
    r"((?<!\S)(?:-u|--?(?:[\w.\-]{0,60}[._\-])?(?:user|login))[ \t=]{1,9}[\"']?[^\s:\"']{1,99}:)(?!//)[^\s\"']+",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"\b(authorization\s*[:=]\s*)(.+)", re.IGNORECASE | re.DOTALL)
_COOKIE = re.compile(r"\b((?:set-)?cookie\s*[:=]\s*)([^\n\"']+)", re.IGNORECASE)
_NETRC = re.compile(r"\b(login\s+\S+\s+password\s+)\S+", re.IGNORECASE)
_CODE = re.compile(r"([?&](?:code|state)=)[^&\s\"'#]+", re.IGNORECASE)
"""What OAuth hands back in an address."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL
)
_WEBHOOK = re.compile(
    # Chat and alerting services: whoever knows the address may write. The path after the word that says so is the secret.
    r"(https?://(?:[^/\s\"']{0,99}hook[^/\s\"']{0,99}/|[^\s\"'?]{0,200}?(?:hook[\w\-]{0,30}|/integration|/with/key)/))[^\s\"']+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.\-+/=~]{6,}", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.\-]{0,30}://)[^/\s@]{1,999}@", re.IGNORECASE)
_KNOWN_TOKENS = re.compile(
    r"""\b(?:
        hf_\w{8,} | sk-[\w\-]{8,} | gh[opsur]_\w{16,} | github_pat_\w{16,} | glpat-[\w\-]{12,}
      | xox[abeprs]-[\w\-]{8,} | xapp-[\w\-]{8,} | A[KS]IA[0-9A-Z]{12,} | AIza[\w\-]{20,} | ya29\.[\w\-]{8,}
      | [rs]k_(?:live|test)_\w{8,} | npm_\w{16,} | pypi-[\w\-]{16,} | do[opr]_v1_\w{16,} | SG\.[\w\-]{8,}\.[\w\-]{8,}
      | nvapi-[\w\-]{8,} | gsk_\w{16,} | dapi[0-9a-f]{16,} | lin_api_\w{16,} | AGE-SECRET-KEY-\w{8,}
      | dckr_pat_[\w\-]{16,} | hv[bs]\.[\w\-]{16,} | sq0[a-z]{3}-[\w\-]{16,} | shp(?:at|ss|ca|pa)_\w{16,} | gl(?:sa|c)_\w{16,}
      | r8_\w{16,} | tgp_v1_[\w\-]{16,} | whsec_\w{16,} | tskey-[\w\-]{16,} | xai-\w{16,} | pplx-\w{16,} | lsv2_\w{16,} | jina_\w{16,}
      | ops_\w{16,} | phc_\w{16,} | sbp_\w{16,} | figd_[\w\-]{16,} | ATATT3\w{8,} | PMAK-[\w\-]{16,} | sntrys_\w{16,} | pul-[0-9a-f]{16,}
      | (?:bot)?\d{8,10}:[A-Za-z0-9_\-]{35,}
      | eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*
    )""",
    re.VERBOSE,
)
_LONG_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{20,}(?![A-Za-z0-9])")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")
_HASH_BEFORE = re.compile(
    r"(?:/|\b(?:[\w.\-]*(?:rev|revision|commit|sha\d*|hash|md5|digest|checksum|etag))\W{1,4})$", re.IGNORECASE
)
"""What a long hexadecimal word is after: part of a path, or something that is named as a hash."""

_ENVIRONMENT = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_LOCALID",
        "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_RESTART_COUNT",
        "PBS_JOBID", "LSB_JOBID", "JOB_COMPLETION_INDEX",
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_LOGS", "TORCHDYNAMO_DISABLE",
    }
)  # fmt: skip
_ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "ROCR_", "HIP_")


def redact_text(text: str) -> str:
    """One string with secrets replaced: assignments, credentials in addresses, bearer strings, known token shapes."""
    # At the start of a run a thousand lines of rule files pass here; few have what most of the patterns need.
    assigns = ":" in text or "=" in text or "%" in text
    if "-----BEGIN" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    if assigns:
        text = _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", text)
        text = _WEBHOOK.sub(rf"\1{REDACTED}", text)
        text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
        text = _COOKIE.sub(rf"\1{REDACTED}", text)
        text = _LOGIN_OPTION.sub(rf"\1{REDACTED}", text)
        text = _CODE.sub(rf"\1{REDACTED}", text)
    text = _NETRC.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1\2{REDACTED}", text)
    if assigns:
        text = _ASSIGNMENT.sub(_replace_value, text)
        text = _SHORT_ASSIGNMENT.sub(_replace_value, text)
    if "-" in text:
        text = _OPTION.sub(_replace_value, text)
    text = _KNOWN_TOKENS.sub(REDACTED, text)
    return _LONG_WORD.sub(_replace_random, text)


def _replace_random(match: re.Match[str]) -> str:
    """A long word that nobody made up: a key of a service whose prefix no list knows.

    Drawn from both cases of the alphabet and digits, six neighbours of ten are of another class; in names of classes
    (``Qwen3OmniMoeTalkerTextMLP``) up to five are, and they hold two digits at most. What is drawn from hexadecimal digits
    might be a hash, and stays where it is named as one.
    """
    word = match[0]
    if _HEX.fullmatch(word):
        hash_of_something = _HASH_BEFORE.search(match.string, max(0, match.start() - 40), match.start())
        return word if hash_of_something or word.isdigit() else REDACTED
    classes = ["digit" if c.isdigit() else c.isupper() for c in word]
    changes = sum(a != b for a, b in itertools.pairwise(classes))
    needed = (0.45 if classes.count("digit") > 2 else 0.6) * (len(word) - 1)
    return REDACTED if len({*classes}) == 3 and changes > needed else word


def _replace_value(match: re.Match[str]) -> str:
    value = match["value"].lstrip("bru\\") if match["value"][-1:] in "\"'" else match["value"]
    quote = value[0] if len(value) > 1 and value[0] in "\"'" else ""
    return f"{match['name']}{quote}{REDACTED}{quote}"


def redact_argv(argv: Iterable[str]) -> list[str]:
    """A command line with secrets replaced; its length and order stay.

    Everything after an option that sounds like a secret (``--api-key``, ``--db-pass``) up to the next option
    counts as that option's value, since an option may take several.
    """
    result: list[str] = []
    hiding = login = False
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            hiding = _FLAG.match(word) is not None
            login = _LOGIN.match(word) is not None
            result.append(redact_text(word))
        elif login and ":" in word and "://" not in word:
            result.append(f"{word.partition(':')[0]}:{REDACTED}")
        else:
            result.append(REDACTED if hiding else redact_text(word))
    return result


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be recorded: launcher, device and thread settings, by an allow-list.

    A variable that fits but sounds like a secret (``NCCL_TOKEN``) is left out.
    """
    found = {}
    for name in sorted(environ):
        wanted = name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        if wanted and (name in _ENVIRONMENT or _FLAG.match(f"--{name}") is None):
            found[name] = redact_text(environ[name])
    return found
