"""Watches a Python process that a watched command has started, once it trains. Standard library only.

The folder of this file, which holds nothing else, stands first on PYTHONPATH in what ``healthcheck run`` starts (and where
``healthcheck env`` was evaluated). Every Python that starts there runs this file, most of which never train: package
managers, compilers, workers of pools and loaders. So nothing is imported here. Once somebody imports torch, three functions
are replaced by ones that only wait: for the first backward pass, the first update, the first trainer of a framework. Then,
and no sooner, healthcheck is imported and watches this process.

A ``sitecustomize`` that this one hides is run as well.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_MAKERS = {
    "transformers.trainer": "Trainer",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "accelerate.accelerator": "Accelerator",
    "keras.src.trainers.trainer": "Trainer",
    "fastai.learner": "Learner",
    "skorch.net": "NeuralNet",
    "ignite.engine.engine": "Engine",
}
"""Trainers that are watched from the moment at which one is made, so that its evaluations and epochs are known."""


class _Armed:
    """Waits for torch, then for the first sign of training."""

    def __init__(self):
        self.undo = []
        self.searching = False
        self.updated = False
        self.loaded = []

    # -- imports -----------------------------------------------------------------------

    def find_spec(self, name, path=None, target=None):
        if self.searching or (name not in ("torch", "safetensors.torch") and name not in _MAKERS):
            return None
        self.searching = True
        try:
            spec = None
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        break
        finally:
            self.searching = False
        loader = getattr(spec, "loader", None)
        original = getattr(loader, "exec_module", None)
        if original is None:
            return spec

        def exec_module(module):
            try:
                del loader.exec_module
            except AttributeError:
                pass
            original(module)
            try:
                if name == "torch":
                    self._torch(module)
                elif name == "safetensors.torch":
                    self._replace(module, "load_file", self._loads)
                else:
                    self._maker(module, _MAKERS[name])
            except Exception:
                pass  # another torch than we know: then this process is not watched

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            pass
        return spec

    def _replace(self, owner, name, make):
        original = getattr(owner, name)
        replacement = make(original)
        own = name in vars(owner)
        setattr(owner, name, replacement)

        def give_back():
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original) if own else delattr(owner, name)

        self.undo.append(give_back)

    def _torch(self, torch):
        compiling = torch.compiler.is_compiling

        def backward(original):
            def first_backward(*args, **kwargs):
                if compiling():
                    return original(*args, **kwargs)
                self.start()
                return torch.autograd.backward(*args, **kwargs)

            return first_backward

        def grad(original):
            def gradients(*args, **kwargs):
                if self.updated and not compiling():  # a loop that sets its gradients by hand
                    self.start()
                return original(*args, **kwargs)

            return gradients

        def updated(*given):
            self.updated = True

        self._replace(torch.autograd, "backward", backward)
        self._replace(torch.autograd, "grad", grad)
        self._replace(torch, "load", self._loads)
        optimizer = sys.modules["torch.optim.optimizer"]  # torch takes the attribute away
        handle = optimizer.register_optimizer_step_post_hook(updated)
        self.undo.append(handle.remove)
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK")) == "0":  # other ranks need not wait for its record then
            self._leave_word("rank-0-%s" % "".join(filter(str.isalnum, os.environ.get("MASTER_PORT", ""))))

    def _loads(self, original):
        """Remembers what is loaded: one of these may be the checkpoint from which a training goes on."""

        def load(*args, **kwargs):
            where = args[0] if args else kwargs.get("f", kwargs.get("filename"))
            try:
                self.loaded.append(os.path.abspath(os.fsdecode(getattr(where, "name", where))))
                del self.loaded[:-20]
            except (TypeError, ValueError, OSError):
                pass  # no file
            return original(*args, **kwargs)

        load.__name__, load.__doc__, load.__wrapped__ = original.__name__, original.__doc__, original
        return load

    def _maker(self, module, name):
        kind = getattr(module, name)

        def constructor(original):
            def __init__(made, *args, **kwargs):
                self.start()
                kind.__init__(made, *args, **kwargs)

            __init__.__doc__, __init__.__wrapped__ = original.__doc__, original  # its signature is asked for
            return __init__

        self._replace(kind, "__init__", constructor)

    # -- the moment --------------------------------------------------------------------

    def start(self):
        """Watch this process from here on."""
        while self.undo:
            self.undo.pop()()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if not os.environ.get("HEALTHCHECK_WATCH"):
            return
        try:
            from healthcheck.cli.child import watch_this_process
        except ImportError:  # another environment than the one of `healthcheck run`
            what = "%s (healthcheck is not installed in %s)" % (" ".join(sys.argv[:1]), sys.executable)
            self._leave_word("%d.unreached" % os.getpid(), what)
            return
        watch_this_process(self.loaded)

    @staticmethod
    def _leave_word(name, text=""):
        import json

        try:
            job = json.loads(os.environ["HEALTHCHECK_WATCH"]).get("job")
            with open(os.path.join(job, name), "w") as file:
                file.write(text)
        except (OSError, ValueError, TypeError, KeyError):
            pass


if os.environ.get("HEALTHCHECK_WATCH") and os.environ.get("HEALTHCHECK", "").lower() not in ("off", "0", "false", "no"):
    sys.meta_path.insert(0, _Armed())


def _run_the_hidden_one():
    from _frozen_importlib_external import PathFinder

    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from _frozen_importlib import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_run_the_hidden_one()
