"""The training loop as events. The first file to read if you want to know what can be observed.

::

    train_start
      epoch_start
        step_start                 one step = one attempted update
          batch_ready              per micro-batch
          loss                     per micro-batch, after forward; value still on the device
          backward_end             once, after the last micro-batch, before clipping
          before_update            gradients as the optimizer will use them; last moment to skip
          after_update
        step_end
        eval_start  eval_step  eval_end        (named evaluation sets; several per evaluation)
        test_start  test_step  test_end
        checkpoint_saved
      epoch_end
    exception
    train_end

An adapter (``healthcheck/trainers``) builds an :class:`Event` only when somebody listens to that
kind. Facts that a framework cannot show are ``None``; the adapter says so in its
:class:`~healthcheck.core.protocols.Capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from healthcheck.core.runinfo import RunFacts, StateLoads


class EventKind(str, Enum):
    """The kinds of event, in the order in which a run meets them (see the module's picture)."""

    TRAIN_START = "train_start"
    EPOCH_START = "epoch_start"
    STEP_START = "step_start"
    BATCH_READY = "batch_ready"
    LOSS = "loss"
    BACKWARD_END = "backward_end"
    BEFORE_UPDATE = "before_update"
    AFTER_UPDATE = "after_update"
    STEP_END = "step_end"
    EVAL_START = "eval_start"
    EVAL_STEP = "eval_step"
    EVAL_END = "eval_end"
    TEST_START = "test_start"
    TEST_STEP = "test_step"
    TEST_END = "test_end"
    CHECKPOINT_SAVED = "checkpoint_saved"
    EPOCH_END = "epoch_end"
    EXCEPTION = "exception"
    TRAIN_END = "train_end"

    def __str__(self) -> str:
        return self.value


PAUSES = {EventKind.EVAL_START: True, EventKind.EVAL_END: False, EventKind.TEST_START: True, EventKind.TEST_END: False}
"""Events at which the time of training stops (True) or goes on."""


@runtime_checkable
class ModelView(Protocol):
    """Named parameters and modules of what is being trained.

    Names are canonical: the prefixes ``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.`` and
    ``_checkpoint_wrapped_module.`` are stripped, so that rules and saved state survive DDP and
    compile. A parameter that belongs to no known module is called ``group0.param3``.
    """

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        """Parameters that the optimizers hold and those of the modules found, each once."""

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        """Modules found, each once; empty if none is known."""

    def optimizers(self) -> Sequence[Any]:
        """Optimizers seen so far, in the order of their first step."""


@dataclass(slots=True)
class Event:
    """One point of the training loop, with what is known there.

    ``step`` is the attempted update that this event belongs to, counted from 1: during the first
    step every event carries ``step=1``. An optimizer step that a ``GradScaler`` skipped counts.
    """

    kind: EventKind
    step: int
    phase: str = "train"
    """``train``, ``eval`` or ``test``."""
    epoch: float | None = None
    user_state: dict[str, Any] = field(default_factory=dict)
    """One dict for the whole run, shared by all plugins. Yours to use; prefix your keys."""
    late: bool = False
    """True where nobody has said that the step begins (``step_start``): it is inferred from the backward pass or from the
    update, when the forward pass is over."""
    run: RunFacts | None = None
    """What the session knows of the run so far; the session sets it."""

    row: Any = None
    """The :class:`~healthcheck.core.rows.StepRow` in which the step is noted as well, where it is and is not finished."""
    model: ModelView | None = None
    """Named parameters and modules of what is being trained."""
    optimizer: Any = None
    """The torch optimizer of this update (``before_update``, ``after_update``, ``step_end``)."""
    optimizer_index: int = 0
    """0 for the optimizer seen first; others count up in the order of their first step."""
    loss: Any = None
    """Scalar tensor or float, unscaled. Detached; still on its device. In a ``loss`` event the
    loss of one micro-batch; in a ``step_end`` event the loss of the whole step where the
    framework reports one."""
    loss_graph: Any = None
    """Autograd node of the micro-batch loss (``loss`` events only, where the backward pass is still to
    come). To be looked at within the event: whoever keeps it keeps all activations."""
    losses: Mapping[str, Any] | None = None
    """Named parts of the loss, where the framework tells them apart."""
    loss_weight: float | None = None
    """How micro-batch losses combine: 1.0 = add them up, None = average them."""
    grad_norm: Any = None
    """Global L2 norm before clipping, where the loop computed it already (clipping)."""
    max_norm: float | None = None
    """Clipping threshold that the loop used in this step."""
    clipped_scaled: bool | None = None
    """True if gradients were clipped while they still carried the loss scale of a ``GradScaler``; None without clipping."""
    clipped: Sequence[Any] | None = None
    """Parameters whose gradients the loop clipped for this update, empty if it clipped at the wrong time: before the
    backward pass, or after the update. None where no clipping was seen."""
    kept_gradients: Any = None
    """A list that takes the gradients that a probe has looked at, where a trainer keeps them until its update
    (:class:`healthcheck.probes.gradient_statistics.HeldGradients`). Torch makes a Python object of a gradient at every
    first look, which costs more than all that is done with it, and several probes look."""
    inner_gradients: Any = None
    """What was measured of gradients that are gone by now, because optimizers stepped inside the backward pass
    (:class:`healthcheck.probes.gradient_statistics.InnerPass`)."""
    held_back: Mapping[int, Any] | None = None
    """By index of the optimizer: 1 if a rule kept its update from being applied, else 0; a float or a 0-dim device
    tensor (``step_end``). None where no rule may do that."""
    lr: float | None = None
    """Learning rate, where the framework reports one instead of showing its optimizer."""
    batch: Any = None
    n_samples: int | None = None
    begins_pass: bool = False
    """True for the first batch of a pass over the data in random order (``batch_ready``), where a loader tells."""
    dataset_size: int | None = None
    """Rows of the data set from which the batch was drawn (``batch_ready``), where it has a length."""
    worker_draws: Sequence[Mapping[str, Sequence[str]]] | None = None
    """For each worker of the loader, the random generators that it drew from for its first two batches, with marks of
    their states before each (``batch_ready``, at the batch by which all workers have reported)."""
    n_tokens: int | None = None
    max_steps: int | None = None
    skipped: bool | None = None
    """True if a ``GradScaler`` (or the engine) did not apply this update."""
    loss_scale: Any = None
    """Loss scale of a ``GradScaler`` (float or device tensor)."""
    data_wait: float | None = None
    """Seconds that this step waited for its batches, where it can be measured."""
    metrics: Mapping[str, Any] | None = None
    """Evaluation results (``eval_end``), or metrics that the script logged itself."""
    inferred: str = ""
    """How these metrics were found, where the script has not reported them itself (``eval_end``)."""
    label_counts: Any = None
    """How often each class was a label of the losses computed in a pause (``eval_end``): a tensor (classes), or, of a few hundred
    classes at most, one of (labels, answers) that says what was answered, too; else None."""
    trained_share: float | None = None
    """Part of the rows of the evaluated data set that are rows of the training data set too, of the set with the fewest
    (``eval_end``); None where no loader showed both."""
    dropping: Sequence[str] | None = None
    """Modules in evaluation mode that dropped values in a pause, with their places: ``Attention (train.py:31)``
    (``eval_end``). None where no forward pass of it was looked into."""
    by_batch: Sequence[str] | None = None
    """Modules in evaluation mode that normalised by the statistics of the batch in a pause, with their places (``eval_end``)."""
    dataset: str = ""
    """Name of the evaluation set."""
    path: str | None = None
    """Where a checkpoint was written."""
    loads: StateLoads | None = None
    """State dicts loaded in vain since the last step (``step_end``, ``train_end``); None where there was none. Empty at
    the end of the first step, so that it can be said that all was in order."""
    exception: BaseException | None = None
