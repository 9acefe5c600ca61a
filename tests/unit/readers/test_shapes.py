"""One small file per tool: read without options, the loss found, the steps right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from healthcheck.readers.base import UnreadableRunError
from healthcheck.readers.series import RecordedRun


@dataclass(frozen=True)
class Shape:
    tool: str
    name: str
    text: str
    reader: str
    expect: dict[str, list[tuple[int, float | str]]]
    absent: tuple[str, ...] = field(default=())


def rows(*values: dict[str, object]) -> str:
    return "\n".join(json.dumps(v) for v in values) + "\n"


SHAPES = [
    Shape(
        "HuggingFace Trainer",
        "trainer_state.json",
        '{"best_metric": null, "global_step": 20, "log_history": ['
        '{"epoch": 0.1, "grad_norm": NaN, "learning_rate": 5e-05, "loss": 2.5, "step": 10},'
        '{"epoch": 0.2, "grad_norm": Infinity, "learning_rate": 4e-05, "loss": 0.0, "step": 20},'
        '{"epoch": 0.2, "eval_loss": 2.4, "eval_runtime": 1.0, "step": 20},'
        '{"epoch": 0.2, "train_loss": 2.2, "train_runtime": 9.0, "step": 20}]}',
        "trainer_state",
        {
            "loss": [(10, 2.5), (20, 0.0)],
            "grad_norm": [(10, "nan"), (20, "inf")],
            "lr": [(10, 5e-05), (20, 4e-05)],
            "eval.loss": [(20, 2.4)],
        },
        absent=("train_loss",),
    ),
    Shape(
        "HuggingFace Trainer with several evaluation sets",
        "trainer_state.json",
        json.dumps(
            {
                "log_history": [
                    {"loss": 1.0, "step": 10},
                    {"eval_a_loss": 1.1, "eval_a_runtime": 1.0, "step": 10},
                    {"eval_b_loss": 1.2, "eval_b_runtime": 1.0, "step": 10},
                ]
            }
        ),
        "trainer_state",
        {"eval.loss[dataset=a]": [(10, 1.1)], "eval.loss[dataset=b]": [(10, 1.2)]},
    ),
    Shape(
        "Lightning",
        "metrics.csv",
        "epoch,step,train_loss_epoch,train_loss_step,val_loss\n0,49,,0.5,\n0,99,,0.4,\n0,99,,,0.6\n0,99,0.45,,\n",
        "csv",
        {"loss": [(49, 0.5), (99, 0.4)], "eval.loss": [(99, 0.6)], "train_loss_epoch": [(99, 0.45)]},
    ),
    Shape(
        "build-nanogpt",
        "log.txt",
        "0 val 10.75\n0 hella 0.25\n0 train 10.5\n1 train 10.25\n2 train 10.0\n2 val 9.5\n",
        "csv",
        {"loss": [(0, 10.5), (1, 10.25), (2, 10.0)], "eval.loss": [(0, 10.75), (2, 9.5)]},
    ),
    Shape(
        "Stable-Baselines3 on the console",
        "train.out",
        "Using cpu device\n"
        "------------------------------------\n| rollout/             |           |\n|    ep_rew_mean       | 20.5      |\n"
        "| time/                |           |\n|    total_timesteps   | 2048      |\n------------------------------------\n"
        "------------------------------------\n| rollout/             |           |\n|    ep_rew_mean       | 25.5      |\n"
        "| time/                |           |\n|    total_timesteps   | 4096      |\n"
        "| train/               |           |\n|    loss              | 6.25      |\n|    value_loss        | 50.5      |\n"
        "------------------------------------\n",
        "boxes",
        {"reward": [(2048, 20.5), (4096, 25.5)], "loss": [(4096, 6.25)], "loss[part=value]": [(4096, 50.5)]},
    ),
    Shape(
        "Stable-Baselines3 as CSV",
        "progress.csv",
        "time/iterations,rollout/ep_rew_mean,time/total_timesteps,train/n_updates,train/loss\n"
        "1,20.5,2048,,\n2,25.5,4096,10,6.25\n3,30.5,6144,20,5.25\n4,31.5,8192,30,4.25\n",
        "csv",
        {
            "reward": [(2048, 20.5), (4096, 25.5), (6144, 30.5), (8192, 31.5)],
            "loss": [(4096, 6.25), (6144, 5.25), (8192, 4.25)],
        },
    ),
    Shape(
        "Stable-Baselines3 as JSON lines, of an off-policy agent",
        "progress.json",
        rows(
            {"time/episodes": 4, "time/total_timesteps": 400, "train/n_updates": 299, "train/critic_loss": 0.5},
            {"time/episodes": 8, "time/total_timesteps": 800, "train/n_updates": 699, "train/critic_loss": 0.25},
        ),
        "jsonl",
        {"loss[optimizer=critic]": [(400, 0.5), (800, 0.25)]},
    ),
    Shape(
        "OpenAI Baselines on the console",
        "log.txt",
        "Logging to /tmp/x\n"
        + "".join(
            "----------------------------------\n| % time spent exploring  | 99       |\n"
            f"| episodes                | {n}00      |\n| mean 100 episode reward | {n}.5      |\n"
            f"| steps                   | {n}000     |\n----------------------------------\n"
            for n in (1, 2)
        ),
        "boxes",
        {"reward": [(1000, 1.5), (2000, 2.5)]},
    ),
    Shape(
        "OpenAI Baselines, whose first column is called %",
        "progress.csv",
        "% time spent exploring,episodes,mean 100 episode reward,steps\n99,100,1.5,1000\n98,200,2.5,2000\n",
        "csv",
        {"reward": [(1000, 1.5), (2000, 2.5)]},
    ),
    Shape(
        "two tables in one file",
        "progress.csv",
        "Timesteps,AverageReturn,Entropy\n100,1.5,4.5\nMeanDist,MaxDist\n0.25,0.5\n200,2.5,4.25\n0.5,0.75\n",
        "csv",
        {"reward": [(100, 1.5), (200, 2.5)], "entropy": [(100, 4.5), (200, 4.25)]},
    ),
    Shape(
        "steps of each episode beside its number",
        "training_log.csv",
        "episode,reward,steps\n1,-10.5,640\n2,-10.25,763\n3,20.5,130\n4,20.75,640\n5,21.0,90\n",
        "csv",
        {"reward": [(1, -10.5), (2, -10.25), (3, 20.5), (4, 20.75), (5, 21.0)]},
    ),
    Shape(
        "Ultralytics with two heads (YOLOv10)",
        "results.csv",
        "epoch,train/box_om,train/cls_om,train/dfl_om,val/box_om,val/cls_om,val/dfl_om\n1,1.0,2.0,1.5,1.0,2.5,1.5\n2,0.5,1.0,1.0,0.5,1.5,1.0\n",
        "csv",
        {"loss": [(1, 4.5), (2, 2.5)], "eval.loss": [(1, 5.0), (2, 3.0)]},
    ),
    Shape(
        "Ultralytics",
        "results.csv",
        "  epoch,  time,  train/box_loss,  train/cls_loss,  val/box_loss,  val/cls_loss,  metrics/mAP50(B),  lr/pg0,  lr/pg1\n"
        "  1,  1.5,  1.25,  1.5,  1.0,  2.0,  0.5,  1e-5,  2e-5\n  2,  3.0,  1.0,  1.25,  0.75,  1.5,  0.6,  1e-5,  2e-5\n",
        "csv",
        {
            "loss": [(1, 2.75), (2, 2.25)],
            "eval.loss": [(1, 3.0), (2, 2.25)],
            "loss[part=box]": [(1, 1.25), (2, 1.0)],
            "lr": [(1, 1e-5), (2, 1e-5)],
            "lr[group=pg1]": [(1, 2e-5), (2, 2e-5)],
        },
    ),
    Shape(
        "Keras CSVLogger",
        "training.log",
        "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.5,0.9,0.4,1.0\n1,0.6,nan,0.5,nan\n",
        "csv",
        {"loss": [(0, 0.9), (1, "nan")], "eval.loss": [(0, 1.0), (1, "nan")], "eval.accuracy": [(0, 0.4), (1, 0.5)]},
    ),
    Shape(
        "Keras History as JSON",
        "history.json",
        json.dumps({"loss": [1.0, 0.9], "val_loss": [1.1, 1.0]}),
        "json",
        {"loss": [(1, 1.0), (2, 0.9)], "eval.loss": [(1, 1.1), (2, 1.0)]},
    ),
    Shape(
        "fastai",
        "history.csv",
        "epoch,train_loss,valid_loss,accuracy,time\n0,3.37,3.36,0.39,23:00\n1,2.89,2.77,0.44,22:44\n",
        "csv",
        {"loss": [(0, 3.37), (1, 2.89)], "eval.loss": [(0, 3.36), (1, 2.77)]},
    ),
    Shape(
        "stable-baselines",
        "progress.csv",
        "rollout/ep_rew_mean,time/fps,time/iterations,time/time_elapsed,time/total_timesteps,train/loss,train/value_loss,train/approx_kl\n"
        "20.5,900,1,2,2048,,,\n25.0,950,2,4,4096,10.25,30.0,0.5\n",
        "csv",
        {
            "reward": [(2048, 20.5), (4096, 25.0)],
            "loss": [(4096, 10.25)],
            "loss[part=value]": [(4096, 30.0)],
            "kl": [(4096, 0.5)],
            "throughput": [(2048, 900.0), (4096, 950.0)],
        },
    ),
    Shape(
        "an off-policy agent",
        "progress.csv",
        "step,actor_loss,critic_loss\n100,-3.0,0.5\n200,-3.5,0.75\n",
        "csv",
        {"loss[optimizer=critic]": [(100, 0.5), (200, 0.75)], "loss[part=actor]": [(100, -3.0), (200, -3.5)]},
        absent=("loss",),
    ),
    Shape(
        "a GAN",
        "losses.csv",
        "epoch,d_loss,g_loss\n1,0.5,1.5\n2,0.25,1.75\n",
        "csv",
        {"loss[optimizer=discriminator]": [(1, 0.5), (2, 0.25)], "loss[optimizer=generator]": [(1, 1.5), (2, 1.75)]},
    ),
    Shape(
        "Weights & Biases history as CSV",
        "wandb.csv",
        "_step,_runtime,iter,train/step_loss,val/loss,_timestamp\n0,1.5,0.0,,4.25,1779702050.5\n1,1.75,0.0,4.5,,1779702050.75\n2,2.5,10.0,3.5,,1779702051.5\n",
        "csv",
        {"loss": [(0, 4.5), (10, 3.5)], "eval.loss": [(0, 4.25)]},
    ),
    Shape(
        "Weights & Biases history as JSON",
        "history.json",
        json.dumps(
            [
                {"_step": 0, "loss": 2.5, "val_loss": None},
                {"_step": 1, "loss": 2.25, "val_loss": None},
                {"_step": 2, "loss": None, "val_loss": 2.75},
                {"_step": 3, "loss": 2.0, "val_loss": None},
            ]
        ),
        "json",
        {"loss": [(0, 2.5), (1, 2.25), (3, 2.0)], "eval.loss": [(2, 2.75)]},
    ),
    Shape(
        "a chart exported from Weights & Biases",
        "wandb_export.csv",
        '"Step","run-1 - train/loss","run-1 - train/loss__MIN","run-1 - train/loss__MAX"\n"0","2.5","2.5","2.5"\n"10","2.25","2.0","2.5"\n',
        "csv",
        {"loss": [(0, 2.5), (10, 2.25)]},
    ),
    Shape(
        "a scalar exported from TensorBoard",
        "run-a-tag-Loss_train.csv",
        "Wall time,Step,Value\n1654943296.25,0,5.5\n1654943313.5,1,4.5\n",
        "csv",
        {"loss": [(0, 5.5), (1, 4.5)]},
    ),
    Shape(
        "TRL",
        "log.jsonl",
        rows(
            {"loss": 0.5, "grad_norm": 0.25, "reward": 0.125, "kl": 0.5, "epoch": 0.01, "step": 1},
            {"loss": 0.25, "grad_norm": 0.5, "reward": 0.25, "kl": 0.5, "epoch": 0.02, "step": 2},
        ),
        "jsonl",
        {"loss": [(1, 0.5), (2, 0.25)], "reward": [(1, 0.125), (2, 0.25)], "kl": [(1, 0.5), (2, 0.5)]},
    ),
    Shape(
        "mmdet",
        "20230101.log.json",
        rows(
            {"env_info": "linux", "seed": 0},
            {"mode": "train", "epoch": 1, "iter": 50, "lr": 0.5, "loss_cls": 1.5, "loss": 7.5, "time": 0.75},
            {"mode": "train", "epoch": 1, "iter": 100, "lr": 0.5, "loss_cls": 1.25, "loss": 6.5, "time": 0.5},
            {"mode": "val", "epoch": 1, "iter": 20, "lr": 0.5, "loss": 6.25},
            {"mode": "train", "epoch": 2, "iter": 50, "lr": 0.5, "loss_cls": 1.0, "loss": 5.5, "time": 0.75},
        ),
        "jsonl",
        {
            "loss": [(50, 7.5), (100, 6.5), (150, 5.5)],
            "eval.loss": [(100, 6.25)],
            "loss[part=cls]": [(50, 1.5), (100, 1.25), (150, 1.0)],
            "time.step": [(50, 0.75), (100, 0.5), (150, 0.75)],
        },
    ),
    Shape(
        "detectron2",
        "metrics.json",
        rows(
            {"iteration": 19, "total_loss": 3.0, "loss_cls": 1.5, "lr": 0.5, "time": 0.5, "data_time": 0.25},
            {"iteration": 39, "total_loss": 2.0, "loss_cls": 1.0, "lr": 0.5, "time": 0.75, "data_time": 0.25},
            {"iteration": 59, "total_loss": 1.0, "loss_cls": 0.5, "lr": 0.5, "time": 0.5, "data_time": 0.25},
        ),
        "jsonl",
        {"loss": [(19, 3.0), (39, 2.0), (59, 1.0)], "time.data": [(19, 0.25), (39, 0.25), (59, 0.25)]},
    ),
    Shape(
        "RLlib",
        "result.json",
        rows(
            *(
                {
                    "episode_reward_mean": 10.0 + i,
                    "timesteps_total": 4000 * i,
                    "training_iteration": i,
                    "info": {"learner": {"default_policy": {"learner_stats": {"total_loss": 0.5 * i, "kl": 0.5}}}},
                    "config": {"lr": 0.5},
                }
                for i in (1, 2)
            )
        ),
        "jsonl",
        {"loss": [(4000, 0.5), (8000, 1.0)], "reward": [(4000, 11.0), (8000, 12.0)], "kl": [(4000, 0.5), (8000, 0.5)]},
        absent=("lr",),
    ),
    Shape(
        "Comet metrics",
        "metrics.json",
        json.dumps(
            [
                {"metricName": "train_loss", "metricValue": "2.5", "step": 1, "timestamp": 1600000000000},
                {"metricName": "train_loss", "metricValue": "2.25", "step": 2, "timestamp": 1600000001000},
                {"metricName": "val_loss", "metricValue": "2.75", "step": 1, "timestamp": 1600000000500},
            ]
        ),
        "json",
        {"loss": [(1, 2.5), (2, 2.25)], "eval.loss": [(1, 2.75)]},
    ),
    Shape(
        "a long table",
        "metrics.csv",
        "key,value,step,timestamp\nloss,2.5,1,1600000000000\nloss,2.25,2,1600000001000\nlr,0.5,1,1600000000000\nlr,0.25,2,1600000001000\n",
        "csv",
        {"loss": [(1, 2.5), (2, 2.25)], "lr": [(1, 0.5), (2, 0.25)]},
    ),
    Shape(
        "an MLflow metric file",
        "metrics/train_loss",
        "1600000000000 2.5 1\n1600000001000 nan 2\n",
        "mlflow",
        {"loss": [(1, 2.5), (2, "nan")]},
    ),
    Shape(
        "semicolons and decimal commas",
        "loss.csv",
        'step;"train loss";lr\n1;2,5;0,001\n2;2,25;0,001\n',
        "csv",
        {"loss": [(1, 2.5), (2, 2.25)]},
    ),
    Shape(
        "tabs, an empty cell and NaN",
        "loss.tsv",
        "iter\tloss\tgrad norm\n1\t2.5\t1.0\n2\t\t1.5\n3\tNaN\t-Infinity\n",
        "csv",
        {"loss": [(1, 2.5), (3, "nan")], "grad_norm": [(1, 1.0), (2, 1.5), (3, "-inf")]},
    ),
    Shape(
        "columns aligned with blanks",
        "losses.txt",
        "epoch   loss   val_loss\n1   2.5   2.75\n2   2.25  2.5\n3 2.0 2.25\n",
        "csv",
        {"loss": [(1, 2.5), (2, 2.25), (3, 2.0)], "eval.loss": [(1, 2.75), (2, 2.5), (3, 2.25)]},
    ),
    Shape(
        "tensors printed into cells",
        "loss.csv",
        "Epoch,Train Loss,Val Loss\n1,\"tensor(0.5, device='cuda:0')\",0.75\n2,tensor(nan),0.75\n",
        "csv",
        {"loss": [(1, 0.5), (2, "nan")]},
    ),
    Shape(
        "a model card",
        "README.md",
        "# A model\n\n| Training Loss | Epoch | Step | Validation Loss | Wer |\n|:---:|:---:|:---:|:---:|:---:|\n"
        "| No log | 0.06 | 400 | 0.75 | 0.5 |\n| 2.5 | 0.11 | 800 | nan | 0.25 |\n| 0.5 | 0.2 | 1200 | 0.5 | 0.25 |\n",
        "model_card",
        {
            "loss": [(800, 2.5), (1200, 0.5)],
            "eval.loss": [(400, 0.75), (800, "nan"), (1200, 0.5)],
            "eval.wer": [(400, 0.5), (800, 0.25), (1200, 0.25)],
        },
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.tool)
def test_a_recording_is_read_without_options(
    shape: Shape, read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    run = read(shape.name, shape.text)

    assert run.reader.name == shape.reader
    assert {series: points(run, series) for series in shape.expect} == shape.expect
    assert not set(shape.absent) & set(run.series())


SUMS: dict[str, tuple[str, dict[str, float | None]]] = {
    "terms of one model": ("step,box_loss,cls_loss,dfl_loss", {"loss": 6.0}),
    "a variational autoencoder": ("step,recon_loss,kl_loss,reg_loss", {"loss": 6.0}),
    "a model and a policy": ("step,MVMAE_Loss,Policy_Loss,entropy_loss", {"loss": 1.0, "loss[part=policy]": 2.0}),
    "a world model of two terms and a policy": ("step,recon_loss,actor_loss,dynamics_loss", {"loss": 4.0}),
    "terms of a policy's objective (verl)": (
        "step,actor/pg_loss,actor/kl_loss,critic/rewards/mean",
        {"loss": None, "reward": 3.0},
    ),
    "those of rsl_rl": ("step,Loss/surrogate,Loss/value_function,Loss/entropy", {"loss": None}),
    "a policy's loss alone, with rewards": ("step,policy_loss,reward,lr", {"loss": None, "loss[part=policy]": 1.0}),
    "a policy that is cloned": ("step,policy_loss,grad_norm,lr", {"loss": 1.0}),
    "Spinning Up": ("Epoch,LossPi,DeltaLossPi,AverageEpRet", {"loss": None, "reward": 3.0}),
    "actor and critic": ("step,actor_loss,critic_loss,reward", {"loss": None, "loss[optimizer=critic]": 2.0}),
}


@pytest.mark.parametrize("kind", SUMS)
def test_terms_of_one_loss_are_added_and_what_a_policy_minimises_is_no_term_of_it(
    kind: str, read: Callable[..., RecordedRun]
) -> None:
    header, expected = SUMS[kind]
    found = read("log.csv", f"{header}\n1,1.0,2.0,3.0\n2,1.0,2.0,3.0\n").series()
    assert {name: list(found[name].values) if name in found else None for name in expected} == {
        name: None if value is None else [value, value] for name, value in expected.items()
    }


EVALUATIONS = {
    "Lightning": ("val_loss_step", "val_loss_epoch"),
    "Lightning, plain beside steps": ("val/loss_step", "val/loss"),
    "a phase spelled out": ("validation_loss_step", "validation_loss_epoch"),
    "batches": ("val_batch_loss", "val_loss"),
    "another metric": ("valid_acc_step", "valid_acc_epoch"),
}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a first epoch of 500 rows"])
@pytest.mark.parametrize("tool", EVALUATIONS)
def test_the_result_of_an_evaluation_is_its_value_for_the_whole_set_not_for_each_batch(
    tool: str, late: bool, read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    batch, whole = EVALUATIONS[tool]
    first = 500 if late else 3
    text = f"train_loss_step,step,{batch},{whole}\n" + "".join(f"0.5,{n},,\n" for n in range(1, first + 1))
    text += "".join(f",{first},{value},\n" for value in (1.0, 3.0, 2.0, 4.0)) + f",{first},,2.5\n"
    metric = "eval.accuracy" if "acc" in whole else "eval.loss"
    assert points(read("metrics.csv", text), metric) == [(first, 2.5)]


def test_values_of_batches_are_the_evaluation_where_nothing_else_is(
    read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    assert points(read("log.csv", "step,loss,val_loss_step\n1,0.5,0.75\n2,0.4,0.5\n"), "eval.loss") == [
        (1, 0.75),
        (2, 0.5),
    ]


def test_evaluation_samples_carry_the_evaluation_phase(read: Callable[..., RecordedRun]) -> None:
    run = read("a.csv", "step,loss,val_loss\n1,2.0,2.5\n")

    [(step, _, samples)] = run.batches()

    assert step == 1
    assert [(s.metric, s.phase) for s in samples] == [("loss", "train"), ("eval.loss", "eval")]


def test_of_several_losses_the_fullest_wins_and_the_others_keep_their_names(
    read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    """nanoGPT logs its estimate on the training set beside the loss of each iteration."""
    run = read(
        "log.jsonl",
        rows(
            {"iter": 0, "train_loss": 10.5, "val_loss": 10.75},
            *({"iter": i, "loss": 10.0 - i} for i in range(5)),
        ),
    )

    assert points(run, "loss") == [(i, 10.0 - i) for i in range(5)]
    assert points(run, "train_loss") == [(0, 10.5)]


def test_milliseconds_become_seconds(
    read: Callable[..., RecordedRun], points: Callable[[RecordedRun, str], object]
) -> None:
    run = read("a.csv", "step,loss,step_time_ms\n1,2.0,500\n2,2.0,250\n")

    assert points(run, "time.step") == [(1, 0.5), (2, 0.25)]


def test_a_clock_counts_from_the_first_row(read: Callable[..., RecordedRun]) -> None:
    run = read("a.csv", "step,loss,timestamp\n1,2.0,2025-01-01T10:00:00\n2,2.0,2025-01-01T10:00:30\n")

    assert [time for _, time, _ in run.batches()] == [0.0, 30.0]


def test_settings_and_text_are_no_metrics(read: Callable[..., RecordedRun]) -> None:
    run = read("a.csv", "step,loss,seed,optimizer,eta_seconds\n1,2.0,7,adam,10\n2,1.5,7,adam,9\n")

    assert list(run.series()) == ["loss"]


def test_the_monitor_of_baselines_tells_rewards(read: Callable[..., RecordedRun]) -> None:
    text = '#{"t_start": 1729549721.5, "env_id": "None"}\nr,l,t\n1.5,9,0.5\n-0.5,4,1.5\n'
    run = read("0.monitor.csv", text)
    assert [(at, now, {s.metric: s.value for s in samples}) for at, now, samples in run.batches()] == [
        (1, 0.0, {"reward": 1.5, "episode_length": 9.0}),
        (2, 1.0, {"reward": -0.5, "episode_length": 4.0}),
    ]


@pytest.mark.parametrize(("name", "metric"), [("reward", "reward"), ("Total Reward", "reward"), ("loss", "loss")])
def test_one_column_below_a_known_name_is_a_recording(read: Callable[..., RecordedRun], name: str, metric: str) -> None:
    run = read("one.csv", f"{name}\n" + "\n".join(str(float(i)) for i in range(12)) + "\n")
    assert list(run.series()[metric].values) == [float(i) for i in range(12)]


def test_a_long_json_document_of_columns_is_known_by_the_names_of_its_first_ones(
    read: Callable[..., RecordedRun],
) -> None:
    rewards = [i / 7 for i in range(9000)]
    run = read("log.json", json.dumps({"ep_rewards": rewards, "ep_lengths": [5] * 9000}))
    assert list(run.series()["reward"].values) == rewards


NUMBERS = [float(i * i % 7) for i in range(20)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rewards.csv", "\n".join(f"{v:.18e}" for v in NUMBERS) + "\n"),
        ("long_term_rewards.txt", "\n".join(map(str, NUMBERS)) + "\n"),
        ("reward_history.json", json.dumps(NUMBERS)),
        ("training_rewards.csv", "\n".join(f"{i:.18e},{v:.18e}" for i, v in enumerate(NUMBERS)) + "\n"),
    ],
)
def test_bare_numbers_are_what_their_file_is_named_after(
    read: Callable[..., RecordedRun], name: str, text: str
) -> None:
    assert list(read(name, text).series()["reward"].values) == NUMBERS


@pytest.mark.parametrize("name", ["numbers.csv", "results.json"])
def test_bare_numbers_that_nothing_names_are_no_recording(read: Callable[..., RecordedRun], name: str) -> None:
    text = json.dumps(NUMBERS) if name.endswith("json") else "\n".join(map(str, NUMBERS)) + "\n"
    with pytest.raises(UnreadableRunError):
        read(name, text)


def test_a_long_document_whose_first_column_is_the_step_is_read_to_the_others(
    read: Callable[..., RecordedRun],
) -> None:
    rewards = [i / 7 for i in range(12_000)]
    run = read("log.json", json.dumps({"timesteps": list(range(12_000)), "mean_rewards": rewards}))
    assert list(run.series()["reward"].values) == rewards


def test_a_letter_is_a_discriminator_beside_its_adversary_only(read: Callable[..., RecordedRun]) -> None:
    physics = read("a.csv", "epoch,loss_total,loss_H,loss_D\n1,2.0,1.5,0.5\n2,1.8,1.4,0.4\n")
    adversaries = read("b.csv", "epoch,loss_G,loss_D\n1,2.0,0.5\n2,1.8,0.4\n")
    assert not any("optimizer=discriminator" in name for name in physics.series())
    assert "loss[optimizer=discriminator]" in adversaries.series()


@pytest.mark.parametrize(
    ("header", "metrics"),
    [
        ("Episode,Score,Epsilon", {"reward", "exploration"}),
        ("Step,Score,Epsilon", {"reward", "exploration"}),
        ("Episode,Score,Reward", {"Score", "reward"}),
        ("Epoch,Score,Loss", {"Score", "loss"}),
    ],
)
def test_the_score_of_a_game_is_its_reward(read: Callable[..., RecordedRun], header: str, metrics: set[str]) -> None:
    run = read("log.csv", "\n".join([header, *(f"{i},{i % 7},{0.5 / i:.4f}" for i in range(1, 30))]))
    assert set(run.series()) == metrics
