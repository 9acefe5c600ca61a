"""Metrics that scripts log already: TensorBoard, Weights & Biases, MLflow, Stable-Baselines3. Taken, never altered."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.core.names import canonical_metric
from healthcheck.extend.background import SenderThread
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_OFF = (False, "off", "none")


class LoggedMetrics:
    """Listens to loggers if the script imports them.

    Setting ``capture``: ``off``, or a list of names (``eval.*``) that narrows what is taken. Names
    are matched as the script writes them and in their canonical form.

    :param take: called with ``{name as written: value}``.
    """

    def __init__(
        self, take: Callable[[Mapping[str, Any]], None], session: Session, patches: Patches, imports: AfterImport
    ) -> None:
        self._take = take
        self._session = session
        self._patches = patches
        self._imports = imports
        self._inside = threading.local()  # a call of another thread is none of this one's
        wanted = session.settings.get("capture", True)
        self._off = wanted in _OFF if not isinstance(wanted, (list, tuple)) else not wanted
        self._only = [str(name) for name in wanted] if isinstance(wanted, (list, tuple)) else None

    def install(self) -> None:
        if self._off:
            return
        when = self._imports.when
        when("torch.utils.tensorboard.writer", self._tensorboard)
        when("tensorboardX.writer", self._tensorboard)
        when("wandb.sdk.wandb_run", lambda module: self._patches.replace(module.Run, "log", self._run_log))
        when("wandb", lambda module: self._patches.replace(module, "log", self._mapping))
        when("mlflow", self._mlflow)
        when("stable_baselines3.common.logger", lambda module: self._patches.replace(module.Logger, "dump", self._dump))

    def _tensorboard(self, module: ModuleType) -> None:
        self._patches.replace(module.SummaryWriter, "add_scalar", self._add_scalar)

    def _mlflow(self, module: ModuleType) -> None:
        self._patches.replace(module, "log_metric", self._pair)
        self._patches.replace(module, "log_metrics", self._mapping)

    # -- wrappers ---------------------------------------------------------------------

    def _add_scalar(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_scalar(writer: Any, tag: Any, scalar_value: Any, *args: Any, **kwargs: Any) -> Any:
            self._logged({tag: scalar_value})
            return self._call(original, writer, tag, scalar_value, *args, **kwargs)

        return add_scalar

    def _dump(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dump(logger: Any, *args: Any, **kwargs: Any) -> Any:
            self._logged(dict(logger.name_to_value))  # what it forgets once it is written
            return self._call(original, logger, *args, **kwargs)

        return dump

    def _run_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(run: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            self._logged(data)
            return self._call(original, run, data, *args, **kwargs)

        return log

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, **kwargs: Any) -> Any:
            self._logged(args[0] if args else kwargs.get("data", kwargs.get("metrics")))
            return self._call(original, *args, **kwargs)

        return log

    def _pair(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log_metric(*args: Any, **kwargs: Any) -> Any:
            key = args[0] if args else kwargs.get("key")
            value = args[1] if len(args) > 1 else kwargs.get("value")
            self._logged({key: value})
            return self._call(original, *args, **kwargs)

        return log_metric

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Loggers that call each other are heard once."""
        inside = self._inside
        before, inside.now = getattr(inside, "now", False), True
        try:
            return original(*args, **kwargs)
        finally:
            inside.now = before

    # -- taking -----------------------------------------------------------------------

    def _logged(self, metrics: Any) -> None:
        if getattr(self._inside, "now", False) or not self._patches.active:
            return
        if isinstance(metrics, Mapping) and not isinstance(threading.current_thread(), SenderThread):
            guarded(self._session, self._hand_on, metrics)

    def _hand_on(self, metrics: Mapping[Any, Any]) -> None:
        taken = {
            name: value
            for name, value in metrics.items()
            if isinstance(name, str) and _is_number(value) and self._wanted(name)
        }
        if taken:
            self._take(taken)

    def _wanted(self, name: str) -> bool:
        if self._only is None:
            return True
        known = (name, canonical_metric(name))
        return any(fnmatch.fnmatchcase(one, pattern) for pattern in self._only for one in known)


def _is_number(value: Any) -> bool:
    """Numbers, numpy scalars and one-element tensors; no images, texts or histograms."""
    if isinstance(value, (bool, str)):
        return False
    if isinstance(value, (int, float)):
        return True
    shape = getattr(value, "shape", None)
    return shape is not None and hasattr(value, "dtype") and _size(shape) == 1


def _size(shape: Any) -> int:
    size = 1
    for length in shape:
        size *= int(length)
    return size
