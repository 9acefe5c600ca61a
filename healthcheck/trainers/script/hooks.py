"""What is replaced in torch while a script runs, and given back afterwards.

No module hooks: they would switch off torch's fast paths for attention, and change results.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.modelview import living_optimizers, parameters_of
from healthcheck.trainers.patching import AfterImport, Patches
from healthcheck.trainers.resume.loads import seen_loads
from healthcheck.trainers.steps.compiled import step_hooks, step_seen, two_faced
from healthcheck.trainers.steps.passes import seen_draws
from healthcheck.trainers.steps.training import TrainingSteps
from healthcheck.trainers.steps.workers import WorkerDraws


class TorchHooks:
    """Feeds :class:`TrainingSteps` from torch's own functions.

    :meth:`install` may be called before torch is imported.
    """

    def __init__(self, steps: TrainingSteps, patches: Patches, imports: AfterImport) -> None:
        self._steps: TrainingSteps | None = steps
        self.patches = patches
        patches.on_restore(self._let_go)
        self.imports = imports
        self.torch_seen = False
        self._pid = os.getpid()
        self._norm: Any = None
        self._scaler: Any = None
        """The scaler whose factor the gradients of this step carry, by weak reference."""
        self._stepped = False
        self.worker_draws = WorkerDraws()

    def install(self) -> None:
        self.imports.when("torch", self._torch_is_there)
        self.imports.when("torch.utils.data.dataloader", self._patch_loader)
        self.imports.when("safetensors.torch", lambda m: self.patches.replace(m, "save_file", self._save_file))

    def _torch_is_there(self, torch: ModuleType) -> None:
        self.torch_seen = True
        for action in self.steps.session.actor.actions.values():
            if hasattr(action, "torch_is_there"):
                guarded(self.steps.session, action.torch_is_there)
        patches = self.patches
        self.patch_backward(torch)
        self.patch_scaler(torch)
        patches.replace(torch, "save", self._save)
        self._replace(torch.nn.Module, "eval", self._eval)
        patches.replace(torch.nn.Module, "load_state_dict", lambda original: seen_loads(original, self))
        self.patch_clipping(torch)
        self._watch_all_optimizers()
        self.imports.when("transformers.modeling_utils", lambda m: self._replace(m.PreTrainedModel, "eval", self._eval))

    def _replace(self, owner: Any, name: str, make: Callable[..., Any], note: Callable[..., Any] | None = None) -> None:
        """Replace a function that a compiled region may call; ``note`` is all that its trace sees of us."""
        self.patches.replace(owner, name, lambda original: two_faced(original, make, note))

    def patch_backward(self, torch: ModuleType) -> None:
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.GradScaler, "scale", self._scale)

    def patch_scaler(self, torch: ModuleType) -> None:
        """A scaler that skips a step calls no hook of the optimizer."""
        self._replace(torch.amp.GradScaler, "step", self._scaler_step)

    def patch_clipping(self, torch: ModuleType) -> None:
        """The inner functions, which also those reach who imported the outer ones long ago."""
        notes = self.steps.region
        clip = torch.nn.utils.clip_grad
        for owner, total, scale in (
            (clip, "_get_total_norm", "_clip_grads_with_norm_"),
            (torch.nn.utils, "get_total_norm", "clip_grads_with_norm_"),
        ):
            self._replace(owner, total, self._total_norm, notes.norm_taken)
            self._replace(owner, scale, self._clip_with_norm, notes.norm_clipped)
        for owner in (clip, torch.nn.utils):
            self._replace(owner, "clip_grad_value_", self._clip_value, notes.values_clipped)

    def _watch_all_optimizers(self) -> None:
        from torch.optim.optimizer import (
            Optimizer,
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        before, after = self._hooks()
        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            self.patches.on_restore(handle.remove)
        for optimizer in living_optimizers():
            self._see_step(optimizer)

        def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
            def _patch_step_function(optimizer: Any) -> None:
                original(optimizer)
                if self.on:
                    guarded(self.steps.session, self._see_step, optimizer)

            return _patch_step_function

        self.patches.replace(Optimizer, "_patch_step_function", hooked)

    def watch_optimizer(self, optimizer: Any) -> None:
        """Listen to one optimizer only."""
        before, after = self._hooks()
        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            self.patches.on_restore(handle.remove)
        self._see_step(optimizer)

    def _hooks(self) -> list[Callable[..., Any]]:
        held = lambda: self._steps is not None and self._steps.held_back  # noqa: E731
        return step_hooks(self._pre, self._post, held, self.steps.region)

    def _see_step(self, optimizer: Any) -> None:
        undo = step_seen(optimizer)
        if undo is not None:
            self.patches.on_restore(undo)

    def _let_go(self) -> None:
        """Torch's compiler keeps functions that it has met, ours among them: they must not keep a session."""
        if self._steps is not None:
            self._steps.region.forget()
        self._steps = None

    @property
    def steps(self) -> TrainingSteps:
        assert self._steps is not None, "wrappers pass calls through once the patches are restored"
        return self._steps

    @property
    def on(self) -> bool:
        """Whether this process is being watched."""
        return self.patches.active and os.getpid() == self._pid

    def _watching(self) -> TrainingSteps | None:
        """The steps of this process, if it is being watched: what is called several times a step asks in one go."""
        return self._steps if self.patches.active and os.getpid() == self._pid else None

    # -- optimizers -------------------------------------------------------------------

    def _pre(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stepped = True
        steps = self._watching()
        return None if steps is None else guarded(steps.session, steps.update_begins, optimizer, args, kwargs)

    def _post(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps = self._watching()
        if steps is not None:
            guarded(steps.session, steps.update_done, optimizer)

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            self._stepped, self._scaler = False, None
            self.steps.scaler_steps(scaler._scale)
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._stepped and hasattr(optimizer, "param_groups"):
                guarded(self.steps.session, self.steps.update_skipped, optimizer, scaler._scale)
            return result

        return step

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            if not self.on or not scaler.is_enabled():
                return original(scaler, outputs)
            result = original(scaler, outputs)
            self._scaler = weakref.ref(scaler)
            guarded(self.steps.session, self.steps.losses.was_scaled, outputs, result, scaler._scale)
            return result

        return scale

    # -- gradients --------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._watching()
            if steps is None or steps.backward_depth:
                return original(tensors, *args, **kwargs)
            if not hasattr(tensors, "detach"):
                tensors = tuple(tensors)
            guarded(steps.session, steps.backward_begins, tensors)
            steps.backward_depth += 1
            try:
                result = original(tensors, *args, **kwargs)
            finally:
                steps.backward_depth -= 1
            guarded(steps.session, steps.backward_done)
            return result

        return backward

    def _total_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            result = original(tensors, norm_type, *args, **kwargs)
            self._norm = result if float(norm_type) == 2.0 else None
            return result

        return get_total_norm

    def _clip_with_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
                known = self._norm is total_norm
                self._norm = None
                self._clipping(parameters, total_norm if known else None, max_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm_

    def _clip_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
                self._clipping(parameters, None, None)
            return original(parameters, *args, **kwargs)

        return clip_grad_value_

    def _clipping(self, parameters: list[Any], norm: Any, max_norm: Any) -> None:
        steps = self.steps
        if steps.only is not None:
            watched = {id(p) for optimizer in steps.only for p in parameters_of(optimizer)}
            if not any(id(p) in watched for p in parameters):
                return
        limit = None if max_norm is None or hasattr(max_norm, "detach") else float(max_norm)
        looks_only = limit == float("inf")  # a norm that is wanted for itself
        limit = None if looks_only else limit
        guarded(steps.session, steps.clipping, norm, limit, self._still_scaled(), None if looks_only else parameters)

    def _still_scaled(self) -> bool:
        """Whether the loss was scaled and ``unscale_`` was called for no optimizer since."""
        scaler = None if self._scaler is None else self._scaler()
        states = getattr(scaler, "_per_optimizer_states", None)
        return states is not None and all(getattr(s.get("stage"), "name", "") == "READY" for s in states.values())

    # -- data, evaluation, checkpoints ------------------------------------------------

    def _patch_loader(self, dataloader: ModuleType) -> None:
        self.patches.replace(dataloader._BaseDataLoaderIter, "__next__", lambda original: seen_draws(original, self))
        self.patches.replace(dataloader._utils.worker, "_worker_loop", self.worker_draws.seen_worker)

    def _eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def eval(module: Any) -> Any:
            if self.on:
                guarded(self.steps.session, self._set_to_evaluation, module)
            return original(module)

        return eval

    def _set_to_evaluation(self, module: Any) -> None:
        """Evaluation of what is being trained; a frozen part set aside for good is none."""
        optimizers = self.steps.view.optimizers()
        if not self.steps.started or not optimizers:
            return
        held = {id(p) for p in parameters_of(optimizers[0])}
        own = sum(id(p) in held for p in module.parameters())
        if 2 * own > len(held):
            self.steps.phases.begin()

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(obj, f, *args, **kwargs)
            self._saved(f)
            return result

        return save

    def _save_file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensors, filename, *args, **kwargs)
            self._saved(filename)
            return result

        return save_file

    def _saved(self, where: Any) -> None:
        if self.on and isinstance(where, (str, os.PathLike)):
            guarded(self.steps.session, self.steps.checkpoint_saved, os.fspath(where))
