"""Any training script, unmodified: it is run in this process, and torch tells us what it does."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.errors import StopTraining, UsageError
from healthcheck.outcome import Ending
from healthcheck.trainers import current
from healthcheck.trainers.controls import TorchControls, capabilities_of
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.patching import AfterImport, Patches
from healthcheck.trainers.resume.continuation import Continuation, StateStore
from healthcheck.trainers.script.children import Children
from healthcheck.trainers.script.companions import Companions
from healthcheck.trainers.script.hooks import TorchHooks
from healthcheck.trainers.script.loggers import LoggedMetrics
from healthcheck.trainers.script.signals import TerminationReport
from healthcheck.trainers.script.target import MainModule, Target
from healthcheck.trainers.script.tracebacks import show
from healthcheck.trainers.source import TorchSource
from healthcheck.trainers.steps.training import TrainingSteps
from healthcheck.trainers.stopping import StopSwitch, caused_by_stop

if TYPE_CHECKING:
    from healthcheck.session import Session


class ScriptTrainer:
    """Runs a script under a session. Nothing is attached when nobody wants to know anything.

    :param store: where detectors are kept at checkpoints, for a later run that loads one.
    :param leave: ends a process whose script does not heed the stop; ``os._exit`` but for tests.
    """

    def __init__(
        self, session: Session, *, store: StateStore | None = None, leave: Callable[[int], Any] = os._exit
    ) -> None:
        self.session = session
        self._leave = leave
        self._view = FoundModel()
        self._stop = StopSwitch(session.stop, self._script_does_not_stop)
        self._controls = TorchControls(session, self._view, self._stop, capabilities_of("script"))
        self._steps = TrainingSteps(session, self._view, self._controls)
        self._patches = Patches()
        self._imports = AfterImport(session.monitor_error, self._patches)
        self._hooks = TorchHooks(self._steps, self._patches, self._imports)
        self._store = store
        self._children = Children(self._patches, self._imports)
        self._finishing = self._hurried = self._failing = False
        session.bind(self._controls)

    def run(self, target: str, argv: list[str], as_module: bool = False, *, restore: bool = True) -> int:
        """Run the script to its end and return the exit code of the run.

        :param restore: give back ``sys.argv``, ``sys.path`` and ``__main__`` afterwards; a process
            that is about to end keeps them for the script's exit functions.

        Raises ``UsageError`` for a target that cannot be run; nothing of it was executed then.
        """
        main = MainModule(Target(target, list(argv), as_module))
        if not restore:
            atexit.register(self._part)  # before the script registers any: the last comes first
        if self.session.watching:
            self._attach()
        try:
            ending = self._execute(main)
            return self._finish(ending)
        finally:
            self._detach()
            if restore:
                main.restore()

    def _attach(self) -> None:
        current.enter(self.session, TorchSource(self._steps, self._controls, shared=True))
        TerminationReport(self._terminated, self._patches).install()
        self._patches.replace(os, "_exit", self._exit_at_once)
        self._patches.replace(threading, "excepthook", quiet_stop)
        self._hooks.install()
        if self._store is not None:
            Continuation(self.session, self._steps, self._store, self._patches, self._imports).install()
        Companions(self.session, self._patches, self._imports).install()
        self._children.install()
        LoggedMetrics(self._steps.phases.logged, self.session, self._patches, self._imports).install()

    def _detach(self) -> None:
        self._patches.restore()
        current.leave(self.session)

    def _execute(self, main: MainModule) -> Ending:
        try:
            code = main.enter()
            exec(code, vars(main.module))
            self._wait_for_threads()
        except StopTraining:
            return Ending()
        except SystemExit as error:
            return self._exited(error)
        except KeyboardInterrupt as error:
            show(error)
            return Ending(interrupted=True)
        except UsageError:
            raise
        except BaseException as error:
            if self.session.stop.raised and caused_by_stop(error):
                return Ending()
            show(error)
            return Ending(exception=error)
        return Ending(script_exit_code=0)

    def _exited(self, error: SystemExit) -> Ending:
        if self.session.stop.raised and caused_by_stop(error.__context__):
            return Ending()
        code = error.code
        if code is not None and not isinstance(code, int):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.write(f"{code}\n")
            code = 1
        self._wait_for_threads()
        return Ending(script_exit_code=(code or 0) & 0xFF)

    @staticmethod
    def _wait_for_threads() -> None:
        """The interpreter waits for threads that are no daemons; they may be the ones that train."""
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()

    def _finish(self, ending: Ending) -> int:
        self._finishing = True
        self._steps.finish()
        unwatched = self._children.unwatched()
        if unwatched:
            who = ", ".join(dict.fromkeys(unwatched))
            self.session.note(
                f"{len(unwatched)} child process{'es' if len(unwatched) > 1 else ''} trained and "
                f"{'were' if len(unwatched) > 1 else 'was'} not watched ({who}): start them with "
                "torchrun --no-python healthcheck run, or call healthcheck.watch() inside"
            )
        elif self.session.watching and not self._hooks.torch_seen and _came_to_its_end(ending):
            self.session.note("the script never imported torch: there was no training to watch")
        report = self.session.finish(ending)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        code = int(report.get("exit_code", ending.script_exit_code or 0))
        self._failing = code != 0 and report.get("exit_reason") != "script_error"
        return code

    def _part(self) -> None:
        """The last thing that this process does; a status that is ours must not cost the other ranks their end."""
        agreement = self.session.controls.agreement if self.session.controls is not None else None
        if agreement is not None and os.getpid() == self.session.pid:
            agreement.leave(failing=self._failing, hurried=lambda: self._hurried)

    # -- ends that do not come back ---------------------------------------------------

    def _terminated(self, number: int) -> bool:
        """Write the report. True if the process shall die of the signal then.

        One that is at its end anyhow goes on to it: a launcher ends all ranks when the first has stopped.
        """
        if self._finishing:
            self._hurried = True
            return False
        with contextlib.suppress(Exception):
            code = self._finish(Ending(signal=number))
            if self.session.stop.request is not None and self.session.stop.request.rule:
                self._part()
                self._leave(code)
        return True

    def _exit_at_once(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        def _exit(status: int) -> Any:
            if self._patches.active and os.getpid() == self.session.pid:
                self._patches.active = False
                with contextlib.suppress(Exception):
                    status = self._finish(Ending(script_exit_code=status & 0xFF))
                    self._part()
            return original(status)

        return _exit

    def _script_does_not_stop(self) -> None:
        """The stop was swallowed three times: write the report and end the process."""
        self.session.note("the script caught the stop three times and went on; its process is ended now")
        code = self._finish(Ending())
        self._part()
        self._patches.active = False
        self._leave(code)


def quiet_stop(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A deliberate stop in a training thread is no error to print."""

    def excepthook(args: Any) -> Any:
        if args.exc_type is not StopTraining:
            original(args)

    return excepthook


def _came_to_its_end(ending: Ending) -> bool:
    """Whether nothing broke it off: else what it did not do says nothing about it."""
    return ending.exception is None and ending.signal is None and not ending.interrupted
