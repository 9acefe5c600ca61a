"""Under ``healthcheck run``, a framework that the script uses gets its native adapter by itself.

No framework and no adapter is imported here: where a script comes by a trainer is wrapped once the script has imported
that. A script that adds our callback itself keeps that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.run.session import Session


class Companions:
    """Adds the adapters of one session to trainers as they are made.

    A trainer's ``attach`` function may name ``makers``: ``(module, name, class)`` of a class whose objects it attaches
    to, or of a function that returns one; where that returns None, an object of the class is returned in its place.
    ``found(session, object)`` then attaches to what a maker has made, or returns None.
    """

    def __init__(self, session: Session, patches: Patches, imports: AfterImport) -> None:
        self._session = session
        self._patches = patches
        self._imports = imports

    def install(self) -> None:
        for attach in self._session.host.registry.trainers.values():
            for module, name, otherwise in getattr(attach, "makers", ()):
                follow = functools.partial(self._follow, attach.found, name, otherwise)  # type: ignore[attr-defined]
                self._imports.when(module, follow)

    def _follow(self, found: Callable[..., Any], name: str, otherwise: str, module: ModuleType) -> None:
        def attach(made: Any) -> None:
            if self._patches.active:
                guarded(self._session, self._attach, found, made)

        def constructor(original: Callable[..., Any]) -> Callable[..., Any]:
            def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
                original(made, *args, **kwargs)
                attach(made)

            return __init__

        def function(original: Callable[..., Any]) -> Callable[..., Any]:
            def make(*args: Any, **kwargs: Any) -> Any:
                made = original(*args, **kwargs)
                if made is None and self._patches.active:
                    made = getattr(module, otherwise)()
                attach(made)
                return made

            return make

        maker = getattr(module, name)
        if isinstance(maker, type):
            self._patches.replace(maker, "__init__", constructor)
        else:
            self._patches.replace(module, name, function)

    def _attach(self, found: Callable[..., Any], made: Any) -> None:
        """An unmodified script prints and logs what it always did, unless ``log_prefix`` asks for ours.

        A callback of the script's own is left as it is.
        """
        adapter = found(self._session, made)
        if adapter is not None and adapter.watch.given is self._session:
            adapter.watch.forwards = bool(self._session.settings.get("log_prefix"))
