"""The torch edge: probes turn events into samples.

Built-in probes are registered through the public hook, from one explicit tuple. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.protocols import Probe
from healthcheck.extend.hookspecs import hookimpl
from healthcheck.probes.activations import ActivationProbe, BatchLayoutProbe, DeadUnitProbe
from healthcheck.probes.arrangement import ArrangementProbe
from healthcheck.probes.attended_padding import AttendedPaddingProbe
from healthcheck.probes.attention import AttentionProbe
from healthcheck.probes.batch_axis import BatchAxisProbe
from healthcheck.probes.batches import BatchProbe
from healthcheck.probes.channel_order import ChannelOrderProbe
from healthcheck.probes.class_labels import (
    LabelOrderProbe,
    RareLabelProbe,
    TrainedClasses,
    TrainedClassProbe,
    UnseenClassProbe,
)
from healthcheck.probes.clipping import ClippingProbe, LossScaleProbe, MicroBatchClippingProbe, UnclippedGradientProbe
from healthcheck.probes.compilation import CompilationProbe
from healthcheck.probes.constant_terms import ConstantTermProbe
from healthcheck.probes.copies import CopyProbe
from healthcheck.probes.data_scale import DataDriftProbe, InputProbe, NoiseScaleProbe
from healthcheck.probes.evaluation_data import (
    AugmentedEvaluationProbe,
    EvaluationScaleProbe,
    HeldOutRowsProbe,
    RenumberedClassProbe,
    TrainedOnEvaluationProbe,
)
from healthcheck.probes.experts import ExpertProbe
from healthcheck.probes.frozen import FrozenMovedProbe, FrozenProbe, SharedMemoryProbe, ZeroFactorProbe
from healthcheck.probes.game import GameProbe, LossBalanceProbe
from healthcheck.probes.gradients import GradientProbe, RecentGradients
from healthcheck.probes.habits import CutSampleProbe, HabitProbe, PenaltyProbe
from healthcheck.probes.language import PaddingProbe, TokenProbe
from healthcheck.probes.leaked import LabelLeakProbe
from healthcheck.probes.learning_rate import LearningRateProbe, ScheduleReachProbe
from healthcheck.probes.leftover import IncompleteGroupProbe, LeftoverProbe, LossShareProbe, OtherLossProbe
from healthcheck.probes.loaders import DryLoaderProbe, PassOrderProbe, WorkerDrawProbe
from healthcheck.probes.loss import LossProbe
from healthcheck.probes.loss_comparisons import LossComparisonProbe
from healthcheck.probes.loss_construction import AdvantageProbe, LossGraphProbe, LossKindProbe, LossSignProbe
from healthcheck.probes.loss_mistakes import MissingDetachProbe
from healthcheck.probes.loss_values import ClassWeightProbe, LossValueProbe
from healthcheck.probes.memory import (
    HostMemoryProbe,
    KeptGraphProbe,
    LiveTensorProbe,
    MemoryEpochProbe,
    MemoryEventProbe,
    MemoryForecastProbe,
    MemoryProbe,
)
from healthcheck.probes.modes import (
    EvalStartProbe,
    EvaluationDropoutProbe,
    EvaluationModeProbe,
    ModeProbe,
    TrainModeLossProbe,
)
from healthcheck.probes.movement import MovementProbe, RestoredWeightProbe
from healthcheck.probes.optimizers import (
    IdleOptimizerProbe,
    LoadedStateProbe,
    OptimizerCountProbe,
    RebuiltOptimizerProbe,
    ResumedOptimizerProbe,
)
from healthcheck.probes.out_of_memory import OutOfMemoryProbe
from healthcheck.probes.output_range import ConstantTargetProbe, UnreachableTargetProbe
from healthcheck.probes.padded_positions import PaddedPositionsProbe
from healthcheck.probes.position_marks import PositionMarksProbe
from healthcheck.probes.predictions import FrequencyProbe, LatentProbe, PredictionProbe
from healthcheck.probes.rank_times import RankTimesProbe
from healthcheck.probes.recurrent import CarriedStateProbe, HalfReadProbe
from healthcheck.probes.replicas import ReplicaProbe
from healthcheck.probes.reported import EvaluationProbe, ScriptMetricsProbe
from healthcheck.probes.schedule_plan import GroupRateProbe, SchedulePlanProbe, ScheduleStepsProbe
from healthcheck.probes.settings import IgnoredSettingProbe, SamplerProbe, SmallEpsilonProbe, UnusualSettingProbe
from healthcheck.probes.step_order import DiscardedGradientProbe, StepOrderProbe, UnsyncedGradientProbe
from healthcheck.probes.steps import (
    HeartbeatProbe,
    OwnCostProbe,
    PaceProbe,
    SkippedUpdateProbe,
    StepCountProbe,
    StepPartsProbe,
    StepTimeProbe,
)
from healthcheck.probes.traits import RunTraitsProbe
from healthcheck.probes.undefined_derivatives import UndefinedDerivativeProbe
from healthcheck.probes.untrained_parameters import FreshParameterProbe, LossParameterProbe, WrongParametersProbe
from healthcheck.probes.weights import (
    InitialWeightProbe,
    OptimizerStateProbe,
    RunningStatisticsProbe,
    TiedWeightProbe,
    WeightGrowthProbe,
    WeightProbe,
)
from healthcheck.probes.wiring import ForgottenParameterProbe, WiringProbe

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
    OutOfMemoryProbe,
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
    LossParameterProbe,
    FreshParameterProbe,
    CopyProbe,
    MovementProbe,
    WeightGrowthProbe,
    RestoredWeightProbe,
    ExpertProbe,
    LeftoverProbe,
    StepOrderProbe,
    DiscardedGradientProbe,
    IncompleteGroupProbe,
    LossShareProbe,
    OtherLossProbe,
    UnclippedGradientProbe,
    MicroBatchClippingProbe,
    UnsyncedGradientProbe,
    ReplicaProbe,
    RankTimesProbe,
    ModeProbe,
    EvaluationModeProbe,
    EvaluationDropoutProbe,
    EvalStartProbe,
    TrainModeLossProbe,
    WeightProbe,
    RunningStatisticsProbe,
    LoadedStateProbe,
    TiedWeightProbe,
    InitialWeightProbe,
    OptimizerStateProbe,
    SmallEpsilonProbe,
    RebuiltOptimizerProbe,
    IdleOptimizerProbe,
    FrozenProbe,
    ZeroFactorProbe,
    SharedMemoryProbe,
    FrozenMovedProbe,
    IgnoredSettingProbe,
    UnusualSettingProbe,
    SamplerProbe,
    ScheduleStepsProbe,
    WrongParametersProbe,
    ScheduleReachProbe,
    SchedulePlanProbe,
    GroupRateProbe,
    ResumedOptimizerProbe,
    BatchProbe,
    DryLoaderProbe,
    PassOrderProbe,
    WorkerDrawProbe,
    LabelOrderProbe,
    PaddingProbe,
    PaddedPositionsProbe,
    ArrangementProbe,
    BatchAxisProbe,
    ChannelOrderProbe,
    DeadUnitProbe,
    ActivationProbe,
    LossGraphProbe,
    LossValueProbe,
    ClassWeightProbe,
    MissingDetachProbe,
    LossComparisonProbe,
    UndefinedDerivativeProbe,
    UnreachableTargetProbe,
    FrequencyProbe,
    TrainedClassProbe,
    UnseenClassProbe,
    LossKindProbe,
    AdvantageProbe,
    TokenProbe,
    AttentionProbe,
    AttendedPaddingProbe,
    PositionMarksProbe,
    HabitProbe,
    CutSampleProbe,
    PenaltyProbe,
    ConstantTermProbe,
    LabelLeakProbe,
    PaceProbe,
    LossSignProbe,
    GameProbe,
    PredictionProbe,
    RareLabelProbe,
    DataDriftProbe,
    NoiseScaleProbe,
    InputProbe,
    HeldOutRowsProbe,
    EvaluationScaleProbe,
    TrainedOnEvaluationProbe,
    RenumberedClassProbe,
    AugmentedEvaluationProbe,
    ConstantTargetProbe,
    LatentProbe,
    BatchLayoutProbe,
    CarriedStateProbe,
    HalfReadProbe,
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
    classes = TrainedClasses()
    shared: dict[type[Probe], Probe] = {
        LossProbe: LossProbe(gradients),
        GradientProbe: GradientProbe(gradients),
        TrainedClassProbe: TrainedClassProbe(classes),
        UnseenClassProbe: UnseenClassProbe(classes),
    }
    for probe in PROBES:
        register(shared.get(probe) or probe())
