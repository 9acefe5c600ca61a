"""The settings of a run: one table for the file, ``[tool.healthcheck]``, environment and flags.

Precedence, per key: command line, environment (``HEALTHCHECK_*``), the one file found, pack,
default. ``resolve`` keeps where each value came from, for ``check --print-config``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from healthcheck.core.errors import UsageError
from healthcheck.core.setting import Setting, SettingError
from healthcheck.core.text import one_line, suggest
from healthcheck.rulelang.quantities import QuantityError, parse_quantity
from healthcheck.rulelang.rule import Origin


def _choice(*words: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        # Files of ours keep `off` as text; a dict from code, JSON or another YAML reader brings false.
        if value is False and "off" in words:
            return "off"
        if value is True and "on" in words:
            return "on"
        if value not in words:
            raise SettingError(f'"{one_line(str(value))}" is not one of {", ".join(words)}')
        return value

    return parse


def _whole(least: int) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if value in (None, "auto"):
            return None
        try:
            number = int(str(value))
        except ValueError:
            raise SettingError(f'"{one_line(str(value))}" is not a whole number') from None
        if number < least:
            raise SettingError(f"{number} is less than {least}")
        return number

    return parse


def _fraction(value: Any) -> Any:
    if value is None or value == "off" or value is False:
        return None
    try:
        number = parse_quantity(value)
    except QuantityError as error:
        raise SettingError(str(error)) from None
    if not 0 < number <= 1:
        raise SettingError(f"{number:g} is not a share of the step time; write for instance 1%")
    return number


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise SettingError("expected text")
    return value


def _list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        return [f"{kind}={path}" if path else str(kind) for kind, path in value.items()]
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return list(value)
    raise SettingError("expected a list of names")


def _capture(value: Any) -> Any:
    if value in ("on", "off") or isinstance(value, bool):
        return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value
    return _list(value)


def _evidence(value: Any) -> Any:
    if value == "off" or value is False:
        return {"batch": "off", "max": 0}
    if isinstance(value, str):
        return {"batch": _choice("stats", "full", "off")(value)}
    if not isinstance(value, Mapping):
        raise SettingError("expected a map such as {batch: stats, max: 5, size: 200MiB}, or off")
    result: dict[str, Any] = {}
    for key, given in value.items():
        if key == "batch":
            result[key] = _choice("stats", "full", "off")("off" if given is False else given)
        elif key == "max":
            result[key] = _whole(0)(given)
        elif key == "size":
            try:
                result[key] = parse_quantity(given)
            except QuantityError as error:
                raise SettingError(str(error)) from None
        else:
            raise SettingError(f'unknown key "{one_line(key)}"; there are batch, max, size')
    return result


_NAMES = {"type": ["array", "string"], "items": {"type": "string"}}

SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "mode",
            "act",
            "act: rules do what `then` says. observe: everything is judged and reported, nothing is stopped or changed.",
            {"enum": ["act", "observe"]},
            _choice("act", "observe"),
        ),
        Setting(
            "fail_on",
            "error",
            "Severity from which an alert makes the exit code 1: info, warning, error, or never.",
            {"enum": ["info", "warning", "error", "never"]},
            _choice("info", "warning", "error", "never"),
        ),
        Setting("profile", "", "Profile to apply when the command line names none.", {"type": "string"}, _text),
        Setting(
            "sync_every",
            None,
            "Steps between two agreements of all ranks (auto: 1 on the CPU, 10 on GPUs).",
            {"type": ["integer", "string"], "minimum": 1, "pattern": "^auto$"},
            _whole(1),
        ),
        Setting(
            "agree",
            "auto",
            "off: ranks never wait for each other; each decides alone.",
            {"enum": ["auto", "off", False]},
            _choice("auto", "off"),
        ),
        Setting(
            "overhead_budget",
            0.01,
            "Share of the training time that healthcheck may cost, after two seconds of its own time in which all is watched:"
            " beyond it costly metrics come less often, then only one step in so many is watched. off: every step.",
            {"type": ["number", "string", "boolean"], "pattern": r"^([0-9.]+ ?%?|off)$"},
            _fraction,
        ),
        Setting(
            "on_plugin_error",
            "warn",
            "warn: report and go on. raise: let the plugin's error end the run.",
            {"enum": ["warn", "raise"]},
            _choice("warn", "raise"),
        ),
        Setting(
            "log_prefix",
            "",
            "Put before names of metrics sent to the trainer's own logger, such as `train/`.",
            {"type": "string"},
            _text,
        ),
        Setting(
            "keep",
            None,
            "How many records of runs to keep in the runs folder; older ones are removed (auto: all).",
            {"type": ["integer", "string"], "minimum": 1, "pattern": "^auto$"},
            _whole(1),
        ),
        Setting(
            "report",
            (),
            "Reports to write besides the record, as kind=path: [json=hc.json, junit=hc.xml].",
            {"type": ["array", "string", "object"], "items": {"type": "string"}},
            _list,
        ),
        Setting(
            "capture",
            True,
            "Metrics that the script logs already (TensorBoard, W&B, MLflow): on, off, or a list of names.",
            {"type": ["array", "string", "boolean"], "items": {"type": "string"}},
            _capture,
        ),
        Setting(
            "evidence",
            {"batch": "stats"},
            "What the evidence of an alert holds: {batch: stats|full|off, max: 5, size: 200MiB}, or off.",
            {"type": ["object", "string", "boolean"]},
            _evidence,
        ),
        Setting(
            "record_ranks",
            "zero",
            "Which ranks keep a full record: zero or all.",
            {"enum": ["zero", "all"]},
            _choice("zero", "all"),
        ),
        Setting(
            "gate",
            "auto",
            "Whether a bad update may be held back: auto (where that is exact and free), sync (wait for the device), off.",
            {"enum": ["auto", "sync", "off", False]},
            _choice("auto", "sync", "off"),
        ),
        Setting("runs", "healthcheck-runs", "Folder of the records.", {"type": "string", "minLength": 1}, _text),
    )
}

PYPROJECT_ONLY: dict[str, str] = {
    "rules": "Rule files to use, relative to pyproject.toml.",
    "plugins": "Local plugins to load: files or modules.",
}
"""Further keys of ``[tool.healthcheck]``."""


@dataclass(slots=True)
class Resolved:
    """Settings in use, and where each came from."""

    values: dict[str, Any]
    origins: dict[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def parse_setting(name: str, value: Any, more: Mapping[str, Setting] = MappingProxyType({})) -> Any:
    """The value in use for a written one. Raises ``SettingError`` for a bad name or value.

    :param more: settings of plugins (``registry.settings``).
    """
    setting = SETTINGS.get(name)
    if setting is not None:
        return setting.parse(value)
    setting = more.get(name)
    if setting is None:
        known = [*SETTINGS, *more]
        raise SettingError(
            f'unknown setting "{one_line(name)}"; {suggest(name, known) or "there are " + ", ".join(known)}'
        )
    return _foreign(setting, value)


def _foreign(setting: Setting, value: Any) -> Any:
    """The value of a plugin's setting: its schema decides, since its code may rely on it."""
    import yaml
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    if isinstance(value, str) and setting.schema.get("type") != "string":
        with contextlib.suppress(yaml.YAMLError):
            value = yaml.safe_load(value)  # an environment variable is text, whatever it means
    wrong = best_match(Draft7Validator(setting.schema).iter_errors(value))
    if wrong is not None:
        place = ".".join(map(str, wrong.absolute_path))
        text = str(wrong.schema.get("errorMessage") or wrong.message)
        raise SettingError(f"{place}: {text}" if place else text)
    try:
        return setting.parse(value)
    except ValueError as error:
        raise SettingError(str(error)) from None


def resolve(
    written: Mapping[str, Any],
    origins: Mapping[str, Origin],
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
    more: Mapping[str, Setting] = MappingProxyType({}),
) -> Resolved:
    """Flags over environment over what files and packs say over defaults.

    :param written: settings of the rule files, already merged (:attr:`RuleSet.settings`).
    :param flags: settings given on the command line or in code; ``None`` values are not given.
    :param more: settings of plugins (``registry.settings``).

    Raises ``UsageError`` naming the variable or flag whose value cannot be used.
    """
    settings = {**SETTINGS, **more}
    values = {name: setting.default for name, setting in settings.items()}
    came = dict.fromkeys(values, "default")
    for name, value in written.items():
        values[name] = value
        came[name] = str(origins.get(name, "rule file"))
    for name, setting in settings.items():
        text = environ.get(setting.env, "")
        if text:
            values[name] = _parsed(name, text, setting.env, more)
            came[name] = setting.env
    for name, value in (flags or {}).items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            values[name] = _parsed(name, value, flag, more)
            came[name] = flag
    return Resolved(values, came)


def _parsed(name: str, value: Any, where: str, more: Mapping[str, Setting]) -> Any:
    try:
        return parse_setting(name, value, more)
    except SettingError as error:
        raise UsageError(f"{where}: {error}") from None
