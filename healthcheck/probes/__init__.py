"""The torch edge: probes turn events into samples.

Built-in probes are registered through the public hook, from one explicit tuple. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.hookspecs import hookimpl
from healthcheck.probes.data.batches import BatchProbe
from healthcheck.probes.data.dry import DryLoaderProbe
from healthcheck.probes.data.leaked import LabelLeakProbe
from healthcheck.probes.data.padding import PaddingProbe
from healthcheck.probes.data.passes import PassOrderProbe
from healthcheck.probes.data.tokens import TokenProbe
from healthcheck.probes.data.workers import WorkerDrawProbe
from healthcheck.probes.gradients.blame import RecentGradients
from healthcheck.probes.gradients.clipping import ClippingProbe
from healthcheck.probes.gradients.discarded import DiscardedGradientProbe
from healthcheck.probes.gradients.leftover import LeftoverProbe
from healthcheck.probes.gradients.norms import GradientProbe
from healthcheck.probes.gradients.order import StepOrderProbe
from healthcheck.probes.gradients.unclipped import UnclippedGradientProbe
from healthcheck.probes.gradients.unsynced import UnsyncedGradientProbe
from healthcheck.probes.loss.duel import DuelProbe
from healthcheck.probes.loss.frequency import FrequencyProbe
from healthcheck.probes.loss.kind import LossKindProbe
from healthcheck.probes.loss.latent import LatentProbe
from healthcheck.probes.loss.loss import LossProbe
from healthcheck.probes.loss.predictions import PredictionProbe
from healthcheck.probes.loss.shape import LossGraphProbe
from healthcheck.probes.loss.sign import LossSignProbe
from healthcheck.probes.memory.events import MemoryEpochProbe, MemoryEventProbe
from healthcheck.probes.memory.forecast import MemoryForecastProbe
from healthcheck.probes.memory.keptgraphs import KeptGraphProbe
from healthcheck.probes.memory.memory import HostMemoryProbe, LiveTensorProbe, MemoryProbe
from healthcheck.probes.model.activations import ActivationProbe
from healthcheck.probes.model.dead_units import DeadUnitProbe
from healthcheck.probes.model.evalmode import EvaluationModeProbe
from healthcheck.probes.model.evalstart import EvalStartProbe
from healthcheck.probes.model.forgotten import ForgottenParameterProbe
from healthcheck.probes.model.layout import BatchLayoutProbe
from healthcheck.probes.model.modes import ModeProbe
from healthcheck.probes.model.running_stats import RunningStatisticsProbe
from healthcheck.probes.model.wiring import WiringProbe
from healthcheck.probes.optimizer.bystanders import BystanderProbe
from healthcheck.probes.optimizer.learning_rate import LearningRateProbe
from healthcheck.probes.optimizer.progress import HeartbeatProbe, StepCountProbe
from healthcheck.probes.optimizer.reach import ScheduleReachProbe
from healthcheck.probes.optimizer.rebuilt import RebuiltOptimizerProbe
from healthcheck.probes.optimizer.resumed import ResumedOptimizerProbe
from healthcheck.probes.optimizer.scaling import LossScaleProbe
from healthcheck.probes.optimizer.schedule import ScheduleProbe
from healthcheck.probes.optimizer.several import OptimizerCountProbe
from healthcheck.probes.optimizer.skipping import SkippedUpdateProbe
from healthcheck.probes.optimizer.state import OptimizerStateProbe
from healthcheck.probes.optimizer.warmups import WarmupProbe
from healthcheck.probes.reported import EvaluationProbe, ScriptMetricsProbe
from healthcheck.probes.speed.compilation import CompilationProbe
from healthcheck.probes.speed.own_cost import OwnCostProbe
from healthcheck.probes.speed.pace import PaceProbe
from healthcheck.probes.speed.timing import StepPartsProbe, StepTimeProbe
from healthcheck.probes.weights.growth import WeightGrowthProbe
from healthcheck.probes.weights.initial import InitialWeightProbe
from healthcheck.probes.weights.loaded import LoadedStateProbe
from healthcheck.probes.weights.movement import MovementProbe
from healthcheck.probes.weights.restored import RestoredWeightProbe
from healthcheck.probes.weights.weights import TiedWeightProbe, WeightProbe
from healthcheck.protocols import Probe

PROBES: tuple[type[Probe], ...] = (
    LossProbe,
    DuelProbe,
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
    ScheduleProbe,
    RebuiltOptimizerProbe,
    BystanderProbe,
    ScheduleReachProbe,
    WarmupProbe,
    ResumedOptimizerProbe,
    BatchProbe,
    DryLoaderProbe,
    PassOrderProbe,
    WorkerDrawProbe,
    PaddingProbe,
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
)
"""All built-in probe classes, in the order in which they are asked."""


@hookimpl
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Fresh instances for every session: probes hold the state of one run."""
    gradients = RecentGradients()  # what one of them knows of a step's gradients, the other says beside a bad loss
    shared: dict[type[Probe], Probe] = {LossProbe: LossProbe(gradients), GradientProbe: GradientProbe(gradients)}
    for probe in PROBES:
        register(shared.get(probe) or probe())
