"""Take secrets out of command lines and texts before they are written anywhere. Standard library only.

Better one harmless value too many than one token in a file: ``--tokenizer gpt2`` loses its value as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REDACTED = "<redacted>"

# What names and values of secrets look like: the keyword lists of detect-secrets (plugins/keyword.py), gitleaks
# (config/gitleaks.toml) and GitHub's secret scanning patterns, cut down to what command lines and addresses hold.
_SECRET_WORD = r"(?:key|token|secret|passw|passphrase|passcode|credential|auth|cookie|signature|private|bearer)"
"""Says it anywhere in a name."""
_LAST_WORD = r"(?:pass|pwd|pswd|psw|pin|otp|sig|sas|jwt|pat|creds?|dsn)"
"""Says it as the last word of a name: ``--db-pass``, ``?sig=``. Inside one it means other things: ``--pin-memory``."""
_FLAG = re.compile(rf"^--?(?:[\w.\-]*{_SECRET_WORD}[\w.\-]*|(?:[\w.\-]*[._\-])?{_LAST_WORD})$", re.IGNORECASE)
_SHORT_ASSIGNMENT = re.compile(
    # With a colon only where it is a key for sure: in quotes, or alone at the beginning of a line.
    rf"""(?P<name>(?<![A-Za-z0-9])(?:[\w.\-]*[._\-])?{_LAST_WORD}(?:["']\s*[=:]\s*|\s*=\s*)|^\s*(?:[\w.\-]*[._\-])?{_LAST_WORD}\s*:\s+)"""
    rf"""(?P<value>"[^"]*"|'[^']*'|[^\s,&;"'}}\]]+)""",
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNMENT = re.compile(
    rf"""(?P<name>["']?[\w.\-]*{_SECRET_WORD}[\w.\-]*["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,&;"'}}\]]+)""",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"\b(authorization\s*[:=]\s*)(.+)", re.IGNORECASE | re.DOTALL)
_COOKIE = re.compile(r"\b((?:set-)?cookie\s*[:=]\s*)([^\n\"']+)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s\"']+", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.\-+/=~]{6,}", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^/\s@]+@", re.IGNORECASE)
_KNOWN_TOKENS = re.compile(
    r"""\b(?:
        hf_\w{8,} | sk-[\w\-]{8,} | gh[opsur]_\w{16,} | github_pat_\w{16,} | glpat-[\w\-]{12,}
      | xox[abeprs]-[\w\-]{8,} | A[KS]IA[0-9A-Z]{12,} | AIza[\w\-]{20,} | ya29\.[\w\-]{8,}
      | [rs]k_(?:live|test)_\w{8,} | npm_\w{16,} | pypi-[\w\-]{16,} | dop_v1_\w{16,} | SG\.[\w\-]{8,}\.[\w\-]{8,}
      | nvapi-[\w\-]{8,} | gsk_\w{16,} | dapi[0-9a-f]{16,} | lin_api_\w{16,} | AGE-SECRET-KEY-\w{8,}
      | \d{8,10}:[A-Za-z0-9_\-]{35}
      | eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*
    )""",
    re.VERBOSE,
)

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
    assigns = ":" in text or "=" in text
    if "-----BEGIN" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    if assigns:
        text = _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", text)
        text = _WEBHOOK.sub(rf"\1{REDACTED}", text)
        text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
        text = _COOKIE.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1\2{REDACTED}", text)
    if assigns:
        text = _ASSIGNMENT.sub(_replace_value, text)
        text = _SHORT_ASSIGNMENT.sub(_replace_value, text)
    return _KNOWN_TOKENS.sub(REDACTED, text)


def _replace_value(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[0] if value[0] in "\"'" and len(value) > 1 else ""
    return f"{match['name']}{quote}{REDACTED}{quote}"


def redact_argv(argv: Iterable[str]) -> list[str]:
    """A command line with secrets replaced; its length and order stay.

    Everything after an option that sounds like a secret (``--api-key``, ``--db-pass``) up to the next option
    counts as that option's value, since an option may take several.
    """
    result: list[str] = []
    hiding = False
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            hiding = _FLAG.match(word) is not None
            result.append(redact_text(word))
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
