"""What is replaced in torch while a training is watched, and given back afterwards: the source of most of what we know.

Torch's public hooks for optimizers, and a few functions of which it has no hooks. No module hooks: they would switch off
torch's fast paths for attention, and change results.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection
from time import monotonic
from types import ModuleType
from typing import Any, Protocol

from healthcheck.core.runinfo import Collectives
from healthcheck.instrument import unseen
from healthcheck.instrument.collectives import FUNCTIONS, modules_of, seen_collective, seen_forward
from healthcheck.instrument.compiled import step_hooks, step_seen, two_faced, when_something_is_compiled
from healthcheck.instrument.data import WorkerDraws, seen_draws
from healthcheck.instrument.guarding import contain, guarded
from healthcheck.instrument.habits import HabitHooks
from healthcheck.instrument.heldout import LOSS_FUNCTIONS
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.modelview import living_optimizers, parameters_of
from healthcheck.instrument.patching import AfterImport, Make, Patches, Replaced
from healthcheck.instrument.places import place_of
from healthcheck.instrument.resume_check import seen_loads

Function = Callable[..., Any]

OTHERS = 64
"""Modules beside the trained model whose calls of ``eval()`` are counted."""


class Passes(Protocol):
    """Whom backward passes are shown to: the step machine, or a source that makes something else of them."""

    def pass_begins(self, tensors: Any) -> None: ...
    def pass_fails(self) -> None: ...
    def pass_ends(self) -> None: ...


class TorchHooks:
    """Feeds a :class:`StepMachine` from torch's own functions.

    :meth:`install` sees everything that a process does, and may be called before torch is imported; :meth:`watch` sees a
    few optimizers.

    :param passes: whom backward passes are shown to, if not the machine.
    """

    def __init__(
        self, machine: StepMachine, patches: Patches, imports: AfterImport, passes: Passes | None = None
    ) -> None:
        self._machine: StepMachine | None = machine
        self._passes: Passes | None = passes or machine
        self.patches = patches
        patches.on_restore(self._let_go)
        self.imports = imports
        self.torch_seen = False
        self._norm: Any = None
        self._scaler: Any = None
        """The scaler whose factor the gradients of this step carry, by weak reference."""
        self._stepped = False
        self._compiling = False
        """Whether something is compiled in this process: then what a compiled region may call has two faces."""
        self._forward: Replaced | None = None
        self._replaced: list[tuple[Replaced, Make, Function | None]] = []
        self._handles: list[Any] = []
        """Of the hooks before and after an optimizer's step, in turn."""
        self._chosen: weakref.WeakSet[Any] | None = None
        """The optimizers that are seen; None: all of this process."""

    # -- what is installed ------------------------------------------------------------

    def install(self) -> None:
        """Whatever trains in this process is seen."""
        self.imports.when("torch", self._torch_is_there)
        self.imports.when("torch.utils.data.dataloader", self._patch_loader)
        self.imports.when("safetensors.torch", lambda m: self.patches.replace(m, "save_file", self._save_file))
        when_something_is_compiled(self._see_compiled_regions, self.patches, self.imports)

    def watch(self, optimizers: Collection[Any], torch: ModuleType, *, passes: bool) -> None:
        """Nothing but these optimizers is seen.

        :param passes: see backward passes as well.
        """
        self._chosen = weakref.WeakSet(optimizers)
        for optimizer in optimizers:
            self._keep(optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post))
        self._patch_clipping(torch)
        self.imports.when("torch.nn.parallel.distributed", self._patch_wrapper)
        self.imports.when("torch.distributed.distributed_c10d", self._patch_collectives)
        self._replace(torch.amp.GradScaler, "step", self._scaler_step)
        if passes:
            self._patch_backward(torch)
        when_something_is_compiled(self._see_compiled_regions, self.patches, self.imports)

    def _torch_is_there(self, torch: ModuleType) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.torch_seen = True
        session = self.machine.session
        for action in session.actor.actions.values():
            if hasattr(action, "torch_is_there"):
                guarded(session, action.torch_is_there)
        self._patch_backward(torch)
        # A scaler that skips a step calls no hook of the optimizer.
        self._replace(torch.amp.GradScaler, "step", self._scaler_step)
        self.patches.replace(torch, "save", self._save)
        self._replace(torch.nn.Module, "eval", self._eval)
        habits = HabitHooks(self.watching)
        loads = functools.partial(seen_loads, watching=self.watching, note=habits.note_loaded)
        self.patches.replace(torch.nn.Module, "load_state_dict", loads)
        for name in LOSS_FUNCTIONS:
            self._patch_loss(torch.nn.functional, name)
        habits.install(torch, self.patches, self.imports)
        self._patch_clipping(torch)
        self._keep(register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post))
        self.imports.when("torch.nn.parallel.distributed", self._patch_wrapper)
        self.imports.when("torch.distributed.distributed_c10d", self._patch_collectives)
        self.imports.when("transformers.modeling_utils", lambda m: self._replace(m.PreTrainedModel, "eval", self._eval))

    def _patch_wrapper(self, distributed: ModuleType) -> None:
        """Wrappers that come and go: which modules have copies on other ranks."""

        def make(original: Function) -> Function:
            def __init__(wrapper: Any, *args: Any, **kwargs: Any) -> None:
                original(wrapper, *args, **kwargs)
                machine = self.watching()
                if machine is not None:
                    guarded(machine.session, self._wrapped, machine, wrapper)

            return __init__

        self.patches.replace(distributed.DistributedDataParallel, "__init__", make)
        forward = lambda original: seen_forward(original, self._collectives)  # noqa: E731
        self._forward = self.patches.replace(distributed.DistributedDataParallel, "forward", forward)

    def _patch_collectives(self, distributed: ModuleType) -> None:
        for module in modules_of(distributed):
            for name in FUNCTIONS:
                self._replace(module, name, functools.partial(seen_collective, name, self._collectives))

    def _collectives(self) -> Collectives | None:
        """What is noted of collectives, if this process is watched and trains with others."""
        machine = self._machine
        if machine is None or not self.patches.active:
            return None
        return machine.session.facts.collectives

    @staticmethod
    def _wrapped(machine: StepMachine, wrapper: Any) -> None:
        import torch.distributed as dist

        machine.session.facts.replicas.note(wrapper, dist.get_process_group_ranks(wrapper.process_group))

    def _patch_backward(self, torch: ModuleType) -> None:
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.GradScaler, "scale", self._scale)

    def _patch_loss(self, functional: ModuleType, name: str) -> None:
        self.patches.replace(functional, name, lambda original: self.machine.evaluations.heldout.seen(name, original))

    def _patch_clipping(self, torch: ModuleType) -> None:
        """The inner functions, which also those reach who imported the outer ones long ago."""
        notes = self.machine.region
        clip = torch.nn.utils.clip_grad
        for owner, total, scale in (
            (clip, "_get_total_norm", "_clip_grads_with_norm_"),
            (torch.nn.utils, "get_total_norm", "clip_grads_with_norm_"),
        ):
            self._replace(owner, total, self._total_norm, notes.norm_taken)
            self._replace(owner, scale, self._clip_with_norm, notes.norm_clipped)
        for owner in (clip, torch.nn.utils):
            self._replace(owner, "clip_grad_value_", self._clip_value, notes.values_clipped)

    def _patch_loader(self, dataloader: ModuleType) -> None:
        draws = WorkerDraws()
        loader = dataloader._BaseDataLoaderIter
        self.patches.replace(loader, "__next__", lambda original: seen_draws(original, self.watching, draws))
        self.patches.replace(dataloader._utils.worker, "_worker_loop", draws.seen_worker)

    def _replace(self, owner: Any, name: str, make: Make, note: Function | None = None) -> None:
        """Replace a function that a compiled region may call; ``note`` is all that its trace sees of us."""
        replaced = self.patches.replace(owner, name, make)
        if replaced is not None:
            self._replaced.append((replaced, make, note))
            if self._compiling:
                replaced.put(lambda original: two_faced(original, make, note))

    def _keep(self, *handles: Any) -> None:
        for handle in handles:
            self._handles.append(handle)
            self.patches.on_restore(handle.remove)

    # -- once something is compiled ---------------------------------------------------

    def _see_compiled_regions(self) -> None:
        """From now on our functions may be called from compiled regions, and must not disturb them."""
        from torch.optim.optimizer import Optimizer

        if self._machine is None:
            return
        self._compiling = True
        if self._forward is not None:
            self._forward.give_back()  # the compiler knows this one by heart
        for replaced, make, note in self._replaced:
            replaced.put(lambda original, make=make, note=note: two_faced(original, make, note))  # type: ignore[misc]
        withheld = lambda: self._machine is not None and self._machine.updates_withheld  # noqa: E731
        hooks = step_hooks(self._pre, self._post, withheld, self._machine.region)
        for number, handle in enumerate(self._handles):
            registered = handle.hooks_dict_ref()
            if registered is not None and handle.id in registered:
                registered[handle.id] = hooks[number % 2]  # in its place among those of others
        for optimizer in living_optimizers() if self._chosen is None else self._chosen:
            self._see_step(optimizer)

        def make_patch(original: Function) -> Function:
            def _patch_step_function(optimizer: Any) -> None:
                original(optimizer)
                if self.on:
                    guarded(self.machine.session, self._see_step, optimizer)

            return _patch_step_function

        if self._chosen is None:
            self.patches.replace(Optimizer, "_patch_step_function", make_patch)

    def _see_step(self, optimizer: Any) -> None:
        undo = step_seen(optimizer)
        if undo is not None:
            self.patches.on_restore(undo)

    # -- whom we feed -----------------------------------------------------------------

    def _let_go(self) -> None:
        """Torch's compiler keeps functions that it has met, ours among them: they must not keep a session."""
        if self._machine is not None:
            self._machine.region.forget()
        self._machine = self._passes = None

    @property
    def machine(self) -> StepMachine:
        assert self._machine is not None, "wrappers pass calls through once the patches are restored"
        return self._machine

    @property
    def on(self) -> bool:
        """Whether this process is being watched."""
        return self.patches.active

    def watching(self) -> StepMachine | None:
        """The machine, if this process is being watched."""
        return self._machine if self.patches.active else None

    # -- optimizers -------------------------------------------------------------------

    # These three are passed at every step: they ask whether we watch, and contain our errors, without a further call.

    def _pre(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stepped = True
        machine = self._machine
        if machine is None:
            return None
        unwatched = machine.unwatched
        if id(optimizer) == unwatched.alone or machine.paused or not self.patches.active:
            return None
        if unwatched.left and unwatched.update_begins(optimizer):
            return None
        try:
            return machine.update_begins(optimizer, args, kwargs)
        except Exception as error:
            contain(machine.session, error, "update_begins")
            return None

    def _post(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        machine = self._machine
        if machine is None or machine.paused or not self.patches.active:
            return
        try:
            unwatched = machine.unwatched
            if unwatched.left:
                if unwatched.single:
                    unwatched.step_over()
                else:
                    unwatched.update_ends(optimizer)
                return
            machine.update_ends(optimizer)
            if unwatched.due:
                unwatched.decide()
        except Exception as error:
            contain(machine.session, error, "update_ends")

    update_begins, update_ends = _pre, _post
    """For optimizers of which torch knows nothing (:mod:`healthcheck.instrument.libraries`)."""

    def _backward(self, original: Function) -> Function:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            machine, passes = self._machine, self._passes
            # Passes nest under activation checkpointing: the outermost is the one that counts.
            if machine is None or passes is None or machine.in_pass or machine.paused:
                return original(tensors, *args, **kwargs)
            if not self.patches.active:
                return original(tensors, *args, **kwargs)
            unwatched = machine.unwatched
            if unwatched.left:
                try:
                    left_out = unwatched.leaves_out(tensors)
                except Exception as error:
                    contain(machine.session, error, "leaves_out")
                    left_out = True
                if left_out and unwatched.by_pass:
                    return unwatched.runs(original, tensors, *args, **kwargs)
                if left_out:
                    return original(tensors, *args, **kwargs)
            if not hasattr(tensors, "detach"):
                tensors = tuple(tensors)
            done = False
            try:
                try:
                    passes.pass_begins(tensors)
                except Exception as error:
                    contain(machine.session, error, "pass_begins")
                result = original(tensors, *args, **kwargs)
                done = True
            finally:
                if not done:
                    passes.pass_fails()
            try:
                collectives = machine.session.facts.collectives
                if collectives is not None:
                    collectives.pass_ended_at = monotonic()
                if passes is machine and machine.unattempted is None and machine.inner.first is None:
                    machine.in_pass = False  # as `pass_ends` does, at one call less in every pass
                else:
                    passes.pass_ends()
                if machine.unwatched.due:
                    machine.unwatched.decide()
            except Exception as error:
                contain(machine.session, error, "pass_ends")
            return result

        return backward

    # -- scalers ----------------------------------------------------------------------

    def _scaler_step(self, original: Function) -> Function:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            machine = self.watching()
            if machine is None or machine.paused or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            self._stepped, self._scaler = False, None
            left_out = machine.unwatched.left
            if not left_out:
                machine.scaled_by(scaler._scale)
            result = original(scaler, optimizer, *args, **kwargs)
            if left_out and not self._stepped:
                guarded(machine.session, machine.unwatched.update_ends, optimizer)
            elif not self._stepped and hasattr(optimizer, "param_groups"):
                guarded(machine.session, unseen.update_skipped, machine, optimizer, scaler._scale)
            return result

        return step

    def _scale(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            machine = self.watching()
            if machine is None or machine.paused or machine.unwatched.left or not scaler.is_enabled():
                return original(scaler, outputs)
            result = original(scaler, outputs)
            self._scaler = weakref.ref(scaler)
            guarded(machine.session, machine.losses.was_scaled, outputs, result, scaler._scale)
            return result

        return scale

    # -- clipping ---------------------------------------------------------------------

    def _total_norm(self, original: Function) -> Function:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            result = original(tensors, norm_type, *args, **kwargs)
            self._norm = result if float(norm_type) == 2.0 else None
            return result

        return get_total_norm

    def _clip_with_norm(self, original: Function) -> Function:
        def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            known, self._norm = total_norm if self._norm is total_norm else None, None
            parameters = self._clipping(parameters, known, max_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm_

    def _clip_value(self, original: Function) -> Function:
        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._clipping(parameters, None, None), *args, **kwargs)

        return clip_grad_value_

    def _clipping(self, parameters: Any, norm: Any, max_norm: Any) -> Any:
        """Gradients are about to be clipped; returns the parameters, which may have come as an iterator, for the original."""
        machine = self.watching()
        if machine is None:
            return parameters
        if machine.unwatched.left:
            machine.unwatched.clipping()
            return parameters
        parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
        if machine.paused or not machine.optimizers.trains(parameters):
            return parameters
        limit = None if max_norm is None or hasattr(max_norm, "detach") else float(max_norm)
        looks_only = limit == float("inf")  # a norm that is wanted for itself
        limit = None if looks_only else limit
        clipped = None if looks_only else parameters
        scaled = self._scaler is not None and self._still_scaled()
        guarded(machine.session, machine.clipped, norm, limit, scaled, clipped)
        return parameters

    def _still_scaled(self) -> bool:
        """Whether the loss was scaled and ``unscale_`` was called for no optimizer since."""
        scaler = None if self._scaler is None else self._scaler()
        states = getattr(scaler, "_per_optimizer_states", None)
        return states is not None and all(getattr(s.get("stage"), "name", "") == "READY" for s in states.values())

    # -- evaluation, checkpoints ------------------------------------------------------

    def _eval(self, original: Function) -> Function:
        def eval(module: Any) -> Any:
            machine = self.watching()
            if machine is not None:
                guarded(machine.session, self._set_to_evaluation, machine, module)
            return original(module)

        return eval

    def _set_to_evaluation(self, machine: StepMachine, module: Any) -> None:
        """Evaluation of what is being trained; a frozen part set aside for good is none."""
        optimizers = machine.view.optimizers()
        if not machine.started or not optimizers:
            return
        trained = {id(p) for p in parameters_of(optimizers[0])}
        own = [id(p) in trained for p in module.parameters()]
        facts = machine.session.facts
        if own and not any(own) and (module in facts.set_to_eval or len(facts.set_to_eval) < OTHERS):
            facts.set_to_eval[module] = facts.set_to_eval.get(module, 0) + 1
        if 2 * sum(own) > len(trained):
            facts.model_evaluated = True
            machine.session.facts.places.note_call("eval", place_of(sys._getframe(1)))
            machine.evaluations.begin()

    def _save(self, original: Function) -> Function:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(obj, f, *args, **kwargs)
            self._saved(f)
            return result

        return save

    def _save_file(self, original: Function) -> Function:
        def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensors, filename, *args, **kwargs)
            self._saved(filename)
            return result

        return save_file

    def _saved(self, where: Any) -> None:
        machine = self.watching()
        if machine is not None and isinstance(where, (str, os.PathLike)):
            guarded(machine.session, machine.checkpoint_saved, os.fspath(where))
