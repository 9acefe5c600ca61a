"""Any training script, unmodified: run as ``python`` would run it, in this process, with torch showing what it does."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.errors import StopTraining, UsageError
from healthcheck.core.runinfo import Elsewhere
from healthcheck.instrument.children import Children
from healthcheck.instrument.companions import Companions
from healthcheck.instrument.controls import StopSwitch, TorchControls, capabilities_of, caused_by_stop, ending_of
from healthcheck.instrument.hooks import TorchHooks
from healthcheck.instrument.libraries import Libraries
from healthcheck.instrument.loggers import LoggedMetrics
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.places import PlaceHooks
from healthcheck.instrument.resume import Continuation
from healthcheck.instrument.signals import StepBoundary, TerminationReport
from healthcheck.instrument.sources import TorchFeed
from healthcheck.run import current
from healthcheck.run.checkpoints import StateStore
from healthcheck.run.ending import Ending

if TYPE_CHECKING:
    from healthcheck.run.session import Session


@dataclass(slots=True)
class Target:
    """What is to be run. ``as_module`` is ``python -m NAME``."""

    name: str
    argv: list[str]
    """Arguments of the script, without its name."""
    as_module: bool = False

    @property
    def shown(self) -> str:
        return f"-m {self.name}" if self.as_module else self.name

    def folder(self) -> str:
        """What ``python`` puts first on ``sys.path``."""
        if self.as_module:
            return os.getcwd()
        path = os.path.realpath(self.name)
        return path if os.path.isdir(path) else os.path.dirname(path)


class MainModule:
    """The interpreter's view of a program, put in place for one run.

    :meth:`restore` gives the former view back; the module itself is kept, for exit functions that
    still use its globals.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.module = ModuleType("__main__")
        self._before = (sys.argv, list(sys.path), sys.modules.get("__main__"), getattr(sys, "orig_argv", None))

    def enter(self) -> CodeType:
        """Set everything up and return the code to run.

        Raises ``UsageError`` for a target that cannot be run, ``SyntaxError`` for one with mistakes,
        and whatever the parent package of a module raises.
        """
        target = self.target
        sys.modules["__main__"] = self.module
        namespace = vars(self.module)
        namespace["__builtins__"] = sys.modules["builtins"]
        if sys.version_info < (3, 14):
            namespace["__annotations__"] = {}
        self._set_path()
        flags = ["-m", target.name] if target.as_module else [target.name]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = [sys.executable, *flags, *target.argv]
        if target.as_module:
            sys.argv = ["-m", *target.argv]
            spec, code = _module_code(target.name)
            sys.argv = [spec.origin or target.name, *target.argv]
            self._describe(spec.origin, spec.loader, spec, spec.parent)
            return code
        sys.argv = [target.name, *target.argv]
        path = Path(target.name)
        if path.is_dir() or path.suffix in (".zip", ".pyz"):
            sys.path[0] = os.path.abspath(target.name)
            spec, code = _main_inside(target.name)
            self._describe(spec.origin, spec.loader, spec, spec.parent)
            return code
        full = os.path.abspath(target.name)
        if path.suffix == ".pyc":
            compiled = SourcelessFileLoader("__main__", full)
            self._describe(full, compiled, None, None)
            found = compiled.get_code("__main__")
            assert found is not None, "a sourceless loader always has code"
            return found
        loader = SourceFileLoader("__main__", full)
        self._describe(full, loader, None, None)
        return _compile(full)

    def restore(self) -> None:
        argv, path, main, orig_argv = self._before
        sys.argv = argv
        sys.path[:] = path
        if main is not None:
            sys.modules["__main__"] = main
        if orig_argv is not None:
            sys.orig_argv = orig_argv

    def _set_path(self) -> None:
        if getattr(sys.flags, "safe_path", False):
            return
        first = self.target.folder()
        if sys.path:
            sys.path[0] = first
        else:
            sys.path.append(first)

    def _describe(self, file: str | None, loader: Any, spec: ModuleSpec | None, package: str | None) -> None:
        vars(self.module).update(
            __file__=file,
            __cached__=spec.cached if spec is not None else None,
            __doc__=None,
            __loader__=loader,
            __package__=package,
            __spec__=spec,
        )


def _compile(full: str) -> CodeType:
    with open(full, "rb") as file:
        source = file.read()
    return compile(source, full, "exec", dont_inherit=True)


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Spec and code of ``python -m name``; a package means its ``__main__``."""
    if name.startswith("."):
        raise UsageError(f"-m {name}: relative module names cannot be run; give the full name")
    parent = name.rpartition(".")[0]
    if parent:
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{parent}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"-m {name}: there is no module named {error.name}") from None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}") from None
    if spec is None:
        hint = f"; did you mean -m {name[:-3]}?" if name.endswith(".py") else ""
        raise UsageError(f"-m {name}: there is no module of this name{hint}")
    if spec.submodule_search_locations is not None:
        if importlib.util.find_spec(f"{name}.__main__") is None:
            raise UsageError(f"-m {name}: this is a package without __main__.py")
        return _module_code(f"{name}.__main__")
    code = spec.loader.get_code(name) if spec.loader is not None and hasattr(spec.loader, "get_code") else None
    if code is None:
        raise UsageError(f"-m {name}: there is no Python code for this module")
    return spec, code


def _main_inside(path: str) -> tuple[ModuleSpec, CodeType]:
    """``__main__.py`` of a folder or a zip file."""
    importer = get_importer(os.path.abspath(path))
    spec = importer.find_spec("__main__") if importer is not None else None
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code("__main__") if loader is not None else None
    if spec is None or code is None:
        raise UsageError(f"{path}: there is no __main__.py in it")
    return spec, code


# --------------------------------------------------------------------------------------------------
# Any training script, unmodified: it is run in this process, and torch shows us what it does.
#
# :class:`InProcess` watches whatever trains in this process for a while; :class:`ScriptTrainer` owns the process as well:
# it runs the script, and writes the report however that ends.


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FUNCTIONAL = ("torch.func", "torch._functorch", "functorch")
"""Modules of the functions that ``torch.func`` offers."""
_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")


class InProcess:
    """``with InProcess(session) as watch:`` training inside the block is watched; all is given back after it.

    For a test, or a cell: no signals, no ``os._exit``, no children, nothing is run. A stop leaves the block as
    ``StopTraining`` unless the training's own framework ends gracefully; :attr:`stopped_by` says whether an exception was
    it. Raises ``UsageError`` on entry if another session watches this process: two would count every step twice.

    :param give_up: ends the process of a script that does not heed the stop; see :class:`StopSwitch`.
    """

    def __init__(self, session: Session, give_up: Callable[[], None] | None = None) -> None:
        self.session = session
        view, self.stop = FoundModel(), StopSwitch(session.stop, give_up)
        self._controls = TorchControls(session, view, self.stop, capabilities_of("script"))
        self.machine = StepMachine(session, view, self._controls)
        self.patches = Patches()
        self.imports = AfterImport(session.monitor_error, self.patches)
        self.hooks = TorchHooks(self.machine, self.patches, self.imports)
        session.bind(self._controls)

    def attach(self) -> None:
        """From now on training in this process is watched."""
        session = self.session
        current.enter(session, TorchFeed(self.machine, self._controls, shared=True))
        if session.watching:
            self.patches.replace(threading, "excepthook", quiet_stop)
            self.hooks.install()
            PlaceHooks(session.facts.places, self.patches, self.imports, lambda: self.machine.started).install()
            Companions(session, self.patches, self.imports).install()
            Libraries(self.machine, self.hooks, self._controls).install(self.patches, self.imports)
            LoggedMetrics(self.machine.evaluations.logged, session, self.patches, self.imports).install()

    def detach(self) -> None:
        self.patches.restore()
        current.leave(self.session)

    def __enter__(self) -> InProcess:
        running = current.current()
        if running is not None:
            raise UsageError(
                f"another session watches this process already ({running.info.target}); sessions cannot be nested"
            )
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.machine.finish()
        self.detach()

    def stopped_by(self, error: BaseException | None) -> bool:
        """Whether an exception is the stop that this session asked for."""
        return self.session.stop.raised > 0 and caused_by_stop(error)


def trained_unseen(names: Sequence[str]) -> str:
    """One sentence about child processes that trained while nobody watched them."""
    many = len(names) > 1
    return (
        f"{len(names)} child process{'es' if many else ''} trained and {'were' if many else 'was'} not watched "
        f"({', '.join(dict.fromkeys(names))}): start what trains with healthcheck run, or call healthcheck.watch() inside"
    )


def uses_functional_gradients(names: Mapping[str, Any]) -> bool:
    """Whether a module's globals hold functions of ``torch.func``."""
    return any(
        str(getattr(value, "__module__", "")).startswith(_FUNCTIONAL) or getattr(value, "__name__", "") == "torch.func"
        for value in list(names.values())
    )


class WatchedJob(Protocol):
    """The processes of one command; see :class:`healthcheck.record.job.Job`."""

    def tell(self, environ: MutableMapping[str, str]) -> None: ...
    def ended(self, target: str, report: Mapping[str, Any]) -> None: ...
    def not_watched(self) -> list[str]: ...
    def summary(self) -> tuple[Elsewhere, str]: ...


class ScriptTrainer:
    """Runs a script under a session. Nothing is attached when nobody wants to know anything.

    :param store: where detectors are kept at checkpoints, for a later run that loads one.
    :param leave: ends a process whose script does not heed the stop; ``os._exit`` but for tests.
    :param job: the processes that the script starts are watched as well, and leave word here.
    """

    def __init__(
        self,
        session: Session,
        *,
        store: StateStore | None = None,
        leave: Callable[[int], Any] = os._exit,
        job: WatchedJob | None = None,
    ) -> None:
        self.session = session
        self._job = job
        self._begins_job = False
        self._leave = leave
        self._inside = InProcess(session, self._script_does_not_stop)
        self._patches = self._inside.patches
        self._store = store
        self._children = Children(self._patches, self._inside.imports)
        self._finishing = self._hurried = self._failing = False
        self._argv: list[str] = []
        self._ends_process = False
        """Whether this process has nothing to do after the script."""
        self._main: MainModule | None = None

    def run(self, target: str, argv: list[str], as_module: bool = False, *, restore: bool = True) -> int:
        """Run the script to its end and return the exit code of the run.

        :param restore: give back ``sys.argv``, ``sys.path`` and ``__main__`` afterwards; a process
            that is about to end keeps them for the script's exit functions.

        Raises ``UsageError`` for a target that cannot be run; nothing of it was executed then.
        """
        main = self._main = MainModule(Target(target, list(argv), as_module))
        self._argv = list(argv)
        self._ends_process = not restore
        if self._ends_process:
            atexit.register(self._part)  # before the script registers any: the last comes first
        if self.session.watching:
            self._attach()
        if self._job is not None:
            self._begins_job = True
            self._job.tell(os.environ)
        try:
            ending = self._execute(main)
            return self._finish(ending)
        finally:
            self._detach()
            if restore:
                main.restore()
                # torch's compiler keeps what it found in the place of torch's functions, and with it all of us: not the
                # script's model as well, which the next run of this process would take for a copy of its own.
                self._main = None

    def watch_from_here(self, loaded: Sequence[str] = ()) -> None:
        """The program of this process runs already, and is about to train: watch it to its end, whatever that is.

        :param loaded: files that it has loaded by torch so far.
        """
        self._ends_process = True
        ending = Ending(script_exit_code=0)

        def uncaught(original: Callable[..., Any]) -> Callable[..., Any]:
            def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
                ended = ending_of(error)
                ending.exception, ending.interrupted = ended.exception, ended.interrupted
                if not self._inside.stopped_by(error):
                    original(kind, error, trace)

            return excepthook

        def at_exit() -> None:
            if self._patches.active and os.getpid() == self.session.pid and not self._finishing:
                self._finish(ending)
                self._part()
                self._detach()

        atexit.register(at_exit)
        self._patches.replace(sys, "excepthook", uncaught)
        self._attach(loaded)

    def _attach(self, loaded: Sequence[str] = ()) -> None:
        inside, patches, imports = self._inside, self._patches, self._inside.imports
        TerminationReport(self._terminated, patches).install()
        StepBoundary(self.session, inside.machine, patches).install()
        patches.replace(os, "_exit", self._exit_at_once)
        inside.attach()
        if self._store is not None:
            Continuation(self.session, inside.machine, self._store, patches, imports).install(loaded)
        self._children.install()

    def _detach(self) -> None:
        self._inside.detach()

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
            if self._inside.stopped_by(error):
                return Ending()
            show(error)
            # Ctrl-C reaches loader workers too: what breaks while a step is finished for it is no fault of the script.
            return Ending(interrupted=True) if self.session.stop.interrupted else Ending(exception=error)
        return Ending(script_exit_code=0, interrupted=self.session.stop.interrupted)

    def _exited(self, error: SystemExit) -> Ending:
        if self._inside.stopped_by(error.__context__):
            return Ending()
        code = error.code
        if code is not None and not isinstance(code, int):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.write(f"{code}\n")
            code = 1
        self._wait_for_threads()
        return Ending(script_exit_code=(code or 0) & 0xFF)

    def _wait_for_threads(self) -> None:
        """The interpreter waits for threads that are no daemons; they may be the ones that train.

        As the interpreter does, pools are asked first to finish what was submitted: their threads wait for more else,
        for ever. In a process that goes on, pools may be anybody's, and are left alone.
        """
        pooled: Collection[threading.Thread] = ()
        if self._ends_process:
            for end_of_pools in reversed(getattr(threading, "_threading_atexits", ())):
                end_of_pools()
        elif "concurrent.futures.thread" in sys.modules:
            pooled = sys.modules["concurrent.futures.thread"]._threads_queues.keys()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon and thread not in pooled:
                thread.join()

    def _finish(self, ending: Ending) -> int:
        self._finishing = True
        self._inside.machine.finish()
        unwatched = self._children.unwatched()
        if (
            self._job is not None and self._begins_job
        ):  # of a child's siblings it says nothing: whoever has begun the job does
            unwatched += self._job.not_watched()
            ending.children, ending.watched = self._job.summary()
        if unwatched and (self.session.step or ending.watched):
            self.session.note(trained_unseen(unwatched))
        ending.advice = ending.watched or self._advice(unwatched)
        report = self.session.finish(ending)
        if self._job is not None:
            self._job.ended(self.session.info.target, report)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        code = int(report.get("exit_code", ending.script_exit_code or 0))
        self._failing = code != 0 and report.get("verdict") != "script failed"
        return code

    def _advice(self, unwatched: list[str]) -> str:
        """Why a script came to its end without a step that was seen, and what helps."""
        if self.session.step or not self.session.watching:
            return ""
        if unwatched:
            return trained_unseen(unwatched)
        if not self._inside.hooks.torch_seen:
            return "the script never imported torch: there was no training to watch"
        if {"-h", "--help"} & set(self._argv):
            return "the script only printed its help: leave --help out to watch a training"
        if self._main is not None and uses_functional_gradients(vars(self._main.module)):
            return (
                "torch.func computes gradients without backward(), which nobody sees: call healthcheck.watch(model) in the "
                "script and its step(loss=loss) once per step, and run it with plain python"
            )
        return (
            "no optimizer stepped and no backward() ran in this process: is this the command that trains, and does it "
            "train here?"
        )

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


# -- tracebacks as plain `python` would print them ----------------------------------------


def trimmed(error: BaseException) -> BaseException:
    """Take our frames out of an exception's traceback, and of those it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _without_ours(current.__traceback__)
        current = current.__cause__ or current.__context__
    return error


def show(error: BaseException) -> None:
    """Print an uncaught exception the way the interpreter does, the script's own hook included."""
    trimmed(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.startswith(_OURS):
            while kept and kept[-1].tb_frame.f_code.co_filename.endswith(_COMPILER):
                kept.pop()  # the frame that keeps the compiler out of ours
        else:
            kept.append(tb)
        tb = tb.tb_next
    for here, following in zip(kept, [*kept[1:], None], strict=False):
        here.tb_next = following
    return kept[0] if kept else None
