"""The torch edge: probes turn events into samples.

Built-in probes are registered through the public hook, from one explicit tuple. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.hookspecs import hookimpl
from healthcheck.probes.activations import ActivationProbe
from healthcheck.probes.batches import BatchProbe
from healthcheck.probes.bystanders import BystanderProbe
from healthcheck.probes.clipping import ClippingProbe
from healthcheck.probes.compilation import CompilationProbe
from healthcheck.probes.dead_units import DeadUnitProbe
from healthcheck.probes.discarded import DiscardedGradientProbe
from healthcheck.probes.dry import DryLoaderProbe
from healthcheck.probes.duel import DuelProbe
from healthcheck.probes.evalmode import EvaluationModeProbe
from healthcheck.probes.evalstart import EvalStartProbe
from healthcheck.probes.forecast import MemoryForecastProbe
from healthcheck.probes.forgotten import ForgottenParameterProbe
from healthcheck.probes.gradients import GradientProbe
from healthcheck.probes.growth import WeightGrowthProbe
from healthcheck.probes.initial import InitialWeightProbe
from healthcheck.probes.keptgraphs import KeptGraphProbe
from healthcheck.probes.latent import LatentProbe
from healthcheck.probes.layout import BatchLayoutProbe
from healthcheck.probes.leaked import LabelLeakProbe
from healthcheck.probes.learning_rate import LearningRateProbe
from healthcheck.probes.leftover import LeftoverProbe
from healthcheck.probes.loaded import LoadedStateProbe
from healthcheck.probes.loss import LossProbe
from healthcheck.probes.lossgraph import LossGraphProbe
from healthcheck.probes.losskind import LossKindProbe
from healthcheck.probes.memory import HostMemoryProbe, LiveTensorProbe, MemoryProbe
from healthcheck.probes.memory_events import MemoryEpochProbe, MemoryEventProbe
from healthcheck.probes.modes import ModeProbe
from healthcheck.probes.movement import MovementProbe
from healthcheck.probes.optimizer_state import OptimizerStateProbe
from healthcheck.probes.optimizers import OptimizerCountProbe
from healthcheck.probes.order import StepOrderProbe
from healthcheck.probes.own_cost import OwnCostProbe
from healthcheck.probes.pace import PaceProbe
from healthcheck.probes.padding import PaddingProbe
from healthcheck.probes.passes import PassOrderProbe
from healthcheck.probes.predictions import PredictionProbe
from healthcheck.probes.progress import HeartbeatProbe, StepCountProbe
from healthcheck.probes.reach import ScheduleReachProbe
from healthcheck.probes.rebuilt import RebuiltOptimizerProbe
from healthcheck.probes.reported import EvaluationProbe, ScriptMetricsProbe
from healthcheck.probes.restored import RestoredWeightProbe
from healthcheck.probes.resumed import ResumedOptimizerProbe
from healthcheck.probes.running_stats import RunningStatisticsProbe
from healthcheck.probes.scaling import LossScaleProbe
from healthcheck.probes.schedule import ScheduleProbe
from healthcheck.probes.sign import LossSignProbe
from healthcheck.probes.skipping import SkippedUpdateProbe
from healthcheck.probes.timing import StepPartsProbe, StepTimeProbe
from healthcheck.probes.tokens import TokenProbe
from healthcheck.probes.unsynced import UnsyncedGradientProbe
from healthcheck.probes.warmups import WarmupProbe
from healthcheck.probes.weights import TiedWeightProbe, WeightProbe
from healthcheck.probes.wiring import WiringProbe
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
    PaddingProbe,
    DeadUnitProbe,
    ActivationProbe,
    LossGraphProbe,
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
    for probe in PROBES:
        register(probe())
