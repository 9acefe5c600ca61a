"""Whatever trains in this process, for a while: in a test, or in a cell.

The parts of the script trainer without those that own a process: no signals, no ``os._exit``, no
children, nothing is run.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from healthcheck.errors import UsageError
from healthcheck.trainers import current
from healthcheck.trainers.controls import TorchControls, capabilities_of
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.patching import AfterImport, Patches
from healthcheck.trainers.script.companions import Companions
from healthcheck.trainers.script.hooks import TorchHooks
from healthcheck.trainers.script.loggers import LoggedMetrics
from healthcheck.trainers.script.watching import quiet_stop
from healthcheck.trainers.source import TorchSource
from healthcheck.trainers.steps.training import TrainingSteps
from healthcheck.trainers.stopping import StopSwitch, caused_by_stop

if TYPE_CHECKING:
    from healthcheck.session import Session


class InProcess:
    """``with InProcess(session) as watch:`` training inside the block is watched; all is given back after it.

    A stop leaves the block as ``StopTraining`` unless the training's own framework ends gracefully;
    :attr:`stopped_by` tells whether an exception was it. Raises ``UsageError`` on entry if another
    session watches this process: two would count every step twice.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._view = FoundModel()
        self._stop = StopSwitch(session.stop)
        self._controls = TorchControls(session, self._view, self._stop, capabilities_of("script"))
        self._steps = TrainingSteps(session, self._view, self._controls)
        self._patches = Patches()
        self._imports = AfterImport(session.monitor_error, self._patches)
        session.bind(self._controls)

    def __enter__(self) -> InProcess:
        running = current.current()
        if running is not None:
            raise UsageError(
                f"another session watches this process already ({running.info.target}); sessions cannot be nested"
            )
        session = self.session
        current.enter(session, TorchSource(self._steps, self._controls, shared=True))
        if session.watching:
            self._patches.replace(threading, "excepthook", quiet_stop)
            TorchHooks(self._steps, self._patches, self._imports).install()
            Companions(session, self._patches, self._imports).install()
            LoggedMetrics(self._steps.phases.logged, session, self._patches, self._imports).install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.finish()
        self._patches.restore()
        current.leave(self.session)

    def stopped_by(self, error: BaseException | None) -> bool:
        """Whether an exception is the stop that this session asked for."""
        return self.session.stop.raised > 0 and caused_by_stop(error)
