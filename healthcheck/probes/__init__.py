"""The torch edge: probes turn events into samples.

Built-in probes are registered through the public hook, from one explicit tuple. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.protocols import Probe
from healthcheck.extend.hookspecs import hookimpl
from healthcheck.probes.activations import ActivationProbe, BatchLayoutProbe, DeadUnitProbe
from healthcheck.probes.batches import BatchProbe
from healthcheck.probes.clipping import ClippingProbe, UnclippedGradientProbe
from healthcheck.probes.frozen import FrozenProbe
from healthcheck.probes.gradients import GradientProbe, RecentGradients
from healthcheck.probes.language import PaddingProbe, TokenProbe
from healthcheck.probes.leaked import LabelLeakProbe
from healthcheck.probes.learning_rate import LearningRateProbe, ScheduleReachProbe
from healthcheck.probes.leftover import LeftoverProbe
from healthcheck.probes.loaders import DryLoaderProbe, PassOrderProbe, WorkerDrawProbe
from healthcheck.probes.loss import LossProbe
from healthcheck.probes.loss_balance import LossBalanceProbe
from healthcheck.probes.loss_construction import LossGraphProbe, LossKindProbe, LossSignProbe
from healthcheck.probes.memory import (
    HostMemoryProbe,
    KeptGraphProbe,
    LiveTensorProbe,
    MemoryEpochProbe,
    MemoryEventProbe,
    MemoryForecastProbe,
    MemoryProbe,
)
from healthcheck.probes.modes import EvalStartProbe, EvaluationModeProbe, ModeProbe
from healthcheck.probes.movement import MovementProbe
from healthcheck.probes.optimizers import (
    IdleOptimizerProbe,
    OptimizerCountProbe,
    RebuiltOptimizerProbe,
    ResumedOptimizerProbe,
)
from healthcheck.probes.padded_positions import PaddedPositionsProbe
from healthcheck.probes.predictions import FrequencyProbe, LatentProbe, PredictionProbe
from healthcheck.probes.reported import EvaluationProbe, ScriptMetricsProbe
from healthcheck.probes.restored import LoadedStateProbe, RestoredWeightProbe
from healthcheck.probes.schedule_steps import ScheduleStepsProbe
from healthcheck.probes.step_order import DiscardedGradientProbe, StepOrderProbe, UnsyncedGradientProbe
from healthcheck.probes.timing import CompilationProbe, OwnCostProbe, PaceProbe, StepPartsProbe, StepTimeProbe
from healthcheck.probes.traits import RunTraitsProbe
from healthcheck.probes.updates import HeartbeatProbe, LossScaleProbe, SkippedUpdateProbe, StepCountProbe
from healthcheck.probes.weight_size import InitialWeightProbe, WeightGrowthProbe
from healthcheck.probes.weights import OptimizerStateProbe, RunningStatisticsProbe, TiedWeightProbe, WeightProbe
from healthcheck.probes.wiring import ForgottenParameterProbe, WiringProbe
from healthcheck.probes.wrong_parameters import WrongParametersProbe

PROBES: tuple[type[Probe], ...] = (
    LossProbe,
    LossBalanceProbe,
    GradientProbe,
    LearningRateProbe,
    OptimizerCountProbe,
    ClippingProbe,
    LossScaleProbe,
    SkippedUpdateProbe,
    MemoryProbe,
    HostMemoryProbe,
    LiveTensorProbe,
    KeptGraphProbe,
    MemoryEpochProbe,
    MemoryEventProbe,
    MemoryForecastProbe,
    StepTimeProbe,
    StepPartsProbe,
    HeartbeatProbe,
    StepCountProbe,
    WiringProbe,
    ForgottenParameterProbe,
    MovementProbe,
    WeightGrowthProbe,
    RestoredWeightProbe,
    LeftoverProbe,
    StepOrderProbe,
    DiscardedGradientProbe,
    UnclippedGradientProbe,
    UnsyncedGradientProbe,
    ModeProbe,
    EvaluationModeProbe,
    EvalStartProbe,
    WeightProbe,
    RunningStatisticsProbe,
    LoadedStateProbe,
    TiedWeightProbe,
    InitialWeightProbe,
    OptimizerStateProbe,
    RebuiltOptimizerProbe,
    IdleOptimizerProbe,
    FrozenProbe,
    ScheduleStepsProbe,
    WrongParametersProbe,
    ScheduleReachProbe,
    ResumedOptimizerProbe,
    BatchProbe,
    DryLoaderProbe,
    PassOrderProbe,
    WorkerDrawProbe,
    PaddingProbe,
    PaddedPositionsProbe,
    DeadUnitProbe,
    ActivationProbe,
    LossGraphProbe,
    FrequencyProbe,
    LossKindProbe,
    TokenProbe,
    LabelLeakProbe,
    PaceProbe,
    LossSignProbe,
    PredictionProbe,
    LatentProbe,
    BatchLayoutProbe,
    CompilationProbe,
    OwnCostProbe,
    EvaluationProbe,
    ScriptMetricsProbe,
    RunTraitsProbe,
)
"""All built-in probe classes, in the order in which they are asked."""


@hookimpl
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Fresh instances for every session: probes hold the state of one run."""
    gradients = RecentGradients()  # what one of them knows of a step's gradients, the other says beside a bad loss
    shared: dict[type[Probe], Probe] = {LossProbe: LossProbe(gradients), GradientProbe: GradientProbe(gradients)}
    for probe in PROBES:
        register(shared.get(probe) or probe())
