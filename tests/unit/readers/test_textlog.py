"""Text logs of public tools, and patterns of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.errors import UsageError
from healthcheck.readers.base import UnreadableRunError
from healthcheck.readers.find import find_runs
from healthcheck.readers.series import RecordedRun

Read = Callable[..., RecordedRun]
Points = Callable[[RecordedRun, str], object]

LOGS: dict[str, tuple[str, dict[str, Any]]] = {
    "nanoGPT": (
        "batch_size = 12\nlearning_rate = 6e-4 # max\nstep 0: train loss 10.5, val loss 10.75\n"
        "iter 0: loss 10.25, time 500.00ms, mfu -100.00%\niter 10: loss nan, time 250.00ms, mfu 3.21%\n",
        {"loss": [(0, 10.25), (10, "nan")], "eval.loss": [(0, 10.75)], "time.step": [(0, 0.5), (10, 0.25)]},
    ),
    "Megatron-LM": (
        " [2024-01-15 10:30:00] iteration      100/  500000 | consumed samples: 3200 | elapsed time per iteration (ms): 500.0 "
        "| learning rate: 5.000E-01 | lm loss: 9.500000E+00 | loss scale: 131072.0 | grad norm: 2.5 | number of skipped iterations: 0 |\n"
        " [2024-01-15 10:30:41] iteration      200/  500000 | consumed samples: 6400 | elapsed time per iteration (ms): 250.0 "
        "| learning rate: 5.000E-01 | lm loss: 8.500000E+00 | loss scale: 131072.0 | grad norm: 1.5 | number of skipped iterations: 1 |\n"
        " validation loss at iteration 200 | lm loss value: 8.25E+00 | lm loss PPL: 3.3E+03 |\n",
        {
            "loss": [(100, 9.5), (200, 8.5)],
            "grad_norm": [(100, 2.5), (200, 1.5)],
            "amp.scale": [(100, 131072.0), (200, 131072.0)],
            "amp.skipped": [(100, 0.0), (200, 1.0)],
            "time.step": [(100, 0.5), (200, 0.25)],
            "eval.loss": [(200, 8.25)],
        },
    ),
    "DeepSpeed-Chat": (
        "epoch: 0|step: 0|ppo_ep: 1|act_loss: 0.25|cri_loss: 0.125|unsuper_loss: 0.0\naverage reward score: 1.5\n"
        "epoch: 0|step: 1|ppo_ep: 1|act_loss: 0.5|cri_loss: 0.25|unsuper_loss: 0.0\n",
        {"loss[optimizer=critic]": [(0, 0.125), (1, 0.25)], "loss[part=act]": [(0, 0.25), (1, 0.5)]},
    ),
    "mmdet": (
        "2023-01-01 00:00:00,000 - mmdet - INFO - Epoch [1][50/100]\tlr: 5.0e-01, eta: 1:20:30, time: 0.5, loss_cls: 1.5, loss: 2.5\n"
        "2023-01-01 00:00:30,000 - mmdet - INFO - Epoch [1][100/100]\tlr: 5.0e-01, eta: 1:20:30, time: 0.5, loss_cls: 1.0, loss: 2.0\n"
        "2023-01-01 00:01:00,000 - mmdet - INFO - Epoch(val) [1][20]\tbbox_mAP: 0.25\n"
        "2023-01-01 00:02:00,000 - mmdet - INFO - Epoch [2][50/100]\tlr: 5.0e-01, eta: 1:20:30, time: 0.75, loss_cls: 0.5, loss: 1.5\n",
        {"loss": [(50, 2.5), (100, 2.0), (150, 1.5)], "eval.map": [(100, 0.25)]},
    ),
    "Keras": (
        "Epoch 1/2\n 50/100 [======>......] - ETA: 2s - loss: 0.9\n100/100 [======] - 5s 50ms/step - loss: 0.5 - val_loss: 0.75\n"
        "Epoch 2/2\n100/100 [======] - 5s 50ms/step - loss: 0.25 - val_loss: 1.0\n",
        {"loss": [(1, 0.5), (2, 0.25)], "eval.loss": [(1, 0.75), (2, 1.0)]},
    ),
    "HuggingFace console": (
        "  0%|          | 0/100 [00:00<?, ?it/s]\n{'loss': 0.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
        "{'loss': 0.25, 'grad_norm': nan, 'learning_rate': 4e-05, 'epoch': 0.2}\n{'eval_loss': 0.5, 'epoch': 0.2}\n",
        {"loss": [(1, 0.5), (2, 0.25)], "grad_norm": [(1, 1.25), (2, "nan")], "eval.loss": [(3, 0.5)]},
    ),
    "dictionaries alone, with whole epochs": (
        "{'loss': 0.75, 'grad_norm': 50.0, 'epoch': 1.0}\n{'eval_loss': 0.5, 'epoch': 1.0}\n"
        "{'loss': 0.5, 'grad_norm': 40.0, 'epoch': 2.0}\n{'eval_loss': 0.25, 'epoch': 2.0}\n",
        {"loss": [(1, 0.75), (2, 0.5)], "grad_norm": [(1, 50.0), (2, 40.0)], "eval.loss": [(1, 0.5), (2, 0.25)]},
    ),
    "dictionaries behind progress bars": (
        "***** Running training *****\n  0%|          | 0/500 [00:00<?, ?it/s]\n"
        "  2%|▏ | 10/500 [00:05<04:00,  2.04it/s]   {'loss': '0.75', 'grad_norm': '50', 'learning_rate': '0.5', 'epoch': '0.1'}\n"
        "  4%|▏ | 20/500 [00:05<04:00,  2.04it/s]\n"
        "[rank0] {'loss': nan, 'grad_norm': np.float64(1.5), 'learning_rate': tensor(0.25, device='cuda:0'), 'epoch': 0.2}\n"
        "{'train_runtime': 5.0, 'train_loss': 0.6, 'epoch': 0.3}\n",
        {"loss": [(1, 0.75), (2, "nan")], "grad_norm": [(1, 50.0), (2, 1.5)], "lr": [(1, 0.5), (2, 0.25)]},
    ),
    "dictionaries behind the step, time and phase": (
        "2024-05-01 12:00:00,000 - INFO - step 10: {'loss': 0.75, 'kl': 0.125}\nValidation: {'loss': 0.875}\n"
        "2024-05-01 12:00:01,000 - INFO - step 20: {'loss': 0.5, 'kl': 0.25}\n",
        {"loss": [(10, 0.75), (20, 0.5)], "kl": [(10, 0.125), (20, 0.25)], "eval.loss": [(10, 0.875)]},
    ),
    "dictionaries that say their step as part of a whole (ms-swift)": (
        "{'loss': 2.5, 'memory(GiB)': 12.25, 'epoch': 0.01, 'global_step/max_steps': '1/870', 'elapsed_time': '4s'}\n"
        "{'loss': 1.5, 'memory(GiB)': 12.25, 'epoch': 0.02, 'global_step/max_steps': '5/870', 'elapsed_time': '9s'}\n",
        {"loss": [(1, 2.5), (5, 1.5)]},
    ),
    "dictionaries of dictionaries": (
        "Epoch 1: {'train': {'loss': 0.75}, 'val': {'loss': 1.0}}\nEpoch 2: {'train': {'loss': 0.5}, 'val': {'loss': 1.5}}\n",
        {"loss": [(1, 0.75), (2, 0.5)], "eval.loss": [(1, 1.0), (2, 1.5)]},
    ),
    "verl on the console, through Ray": (
        "(TaskRunner pid=12, ip=10.0.0.1) step:1 - actor/entropy:0.5 - actor/pg_loss:-0.25 - critic/rewards/mean:0.125 - response_length/mean:201.5\n"
        "(TaskRunner pid=12, ip=10.0.0.1) step:2 - actor/entropy:0.25 - actor/pg_loss:0.25 - critic/rewards/mean:0.25 - response_length/mean:203.5\n",
        {
            "reward": [(1, 0.125), (2, 0.25)],
            "entropy": [(1, 0.5), (2, 0.25)],
            "completion_length": [(1, 201.5), (2, 203.5)],
            "loss[part=actor_pg]": [(1, -0.25), (2, 0.25)],
        },
    ),
    "epoch and step in brackets": (
        "Epoch [1/3], Step [1/4], Loss: 9.5, Perplexity: 13359.7\nEpoch [1/3], Step [4/4], Loss: 8.5, Perplexity: 4914.8\n"
        "Epoch [2/3], Step [1/4], Loss: 7.5, Perplexity: 1808.0\n",
        {"loss": [(1, 9.5), (4, 8.5), (5, 7.5)]},
    ),
    "epoch in brackets and iterations of it": (
        "2025-06-12 13:31:13,075 - INFO - Epoch: [ 0/200] Iter [  10/100] || Time: 3.5 sec || lr: 0.5 || Loss: 2.5\n"
        "2025-06-12 13:31:16,271 - INFO - Epoch: [ 1/200] Iter [  10/100] || Time: 6.5 sec || lr: 0.5 || Loss: 1.5\n",
        {"loss": [(10, 2.5), (110, 1.5)], "lr": [(10, 0.5), (110, 0.5)]},
    ),
    "PyTorch-GAN": (
        "[Epoch 0/200] [Batch 1/10] [D loss: 0.75] [G loss: 0.5]\n[Epoch 1/200] [Batch 1/10] [D loss: 0.5] [G loss: 1.5]\n",
        {"loss[optimizer=discriminator]": [(1, 0.75), (11, 0.5)], "loss[optimizer=generator]": [(1, 0.5), (11, 1.5)]},
    ),
    "Keras-GAN": (
        "0 [D loss: 0.75, acc.: 50.00%] [G loss: 0.5]\n1 [D loss: 0.5, acc.: 75.00%] [G loss: 1.5]\n",
        {"loss[optimizer=discriminator]": [(0, 0.75), (1, 0.5)], "loss[optimizer=generator]": [(0, 0.5), (1, 1.5)]},
    ),
    "BicycleGAN": (
        "(epoch: 1, iters: 100, time: 0.5, data: 0.25) G_GAN: 0.5 D: 0.75 G_L1: 1.5 kl: 0.25 \n"
        "(epoch: 1, iters: 200, time: 0.5, data: 0.25) G_GAN: 1.5 D: 0.5 G_L1: 1.25 kl: 0.25 \n",
        {
            "loss[optimizer=discriminator]": [(100, 0.75), (200, 0.5)],
            "loss[optimizer=generator]": [(100, 0.5), (200, 1.5)],
        },
    ),
    "the first PyTorch tutorial": (
        "[1,  2000] loss: 2.250\n[1,  4000] loss: 1.750\n[2,  2000] loss: 1.500\n",
        {"loss": [(2000, 2.25), (4000, 1.75), (6000, 1.5)]},
    ),
    "a loss at a step": (
        "2017-08-18 02:45:14,344:\tLoss at step 1: 8.5\n2017-08-18 02:45:15,257:\tLoss at step 2: 8.25\n",
        {"loss": [(1, 8.5), (2, 8.25)]},
    ),
    "a cost after an iteration": (
        "Cost after iteration 0: 0.75\nCost after iteration 100: nan\n",
        {"loss": [(0, 0.75), (100, "nan")]},
    ),
    "TensorFlow's logger, beside absl": (
        "INFO:tensorflow:[  5000] | gnorm  8.5 lr  0.25 | loss  5.5\n"
        "I1212 15:10:27.449019 128529813321536 train.py:298] [  5000] | gnorm  8.5 lr  0.25 | loss  5.5\n"
        "INFO:tensorflow:[ 10000] | gnorm  0.5 lr  0.25 | loss  5.25\n",
        {"loss": [(5000, 5.5), (10000, 5.25)], "grad_norm": [(5000, 8.5), (10000, 0.5)]},
    ),
    "PaddleVideo": (
        "[12/25 14:29:44] epoch:[  1/25 ] train step:0    loss: 3.5 lr: 0.5 top1: 0.25\n"
        "[12/25 14:30:14] epoch:[  1/25 ] train step:20   loss: 3.0 lr: 0.5 top1: 0.25\n"
        "[12/25 14:30:44] epoch:[  1/25 ] val step:0    loss: 4.5 top1: 0.25\n"
        "[12/25 14:31:44] epoch:[  2/25 ] train step:40   loss: 2.5 lr: 0.5 top1: 0.5\n"
        "[12/25 14:31:54] epoch:[  2/25 ] train step:60   loss: 2.0 lr: 0.5 top1: 0.5\n",
        {"loss": [(0, 3.5), (20, 3.0), (40, 2.5), (60, 2.0)], "eval.loss": [(20, 4.5)]},
    ),
    "a section per epoch, a line per phase": (
        "".join(
            f"Epoch {e}/6:\nTrain - Loss: {1 - e / 8} | Acc: 0.5\nVal - Loss: {1.5 - e / 8} | Acc: 0.5\n"
            for e in range(1, 6)
        ),
        {"loss": [(e, 1 - e / 8) for e in range(1, 6)], "eval.loss": [(e, 1.5 - e / 8) for e in range(1, 6)]},
    ),
    "the PyTorch examples": (
        "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.250000\nTrain Epoch: 1 [640/60000 (1%)]\tLoss: 1.250000\n"
        "\nTest set: Average loss: 0.5, Accuracy: 7500/10000 (75%)\n\nTrain Epoch: 2 [0/60000 (0%)]\tLoss: 0.250000\n",
        {"loss": [(0, 2.25), (640, 1.25), (60000, 0.25)], "eval.loss": [(640, 0.5)], "eval.accuracy": [(640, 0.75)]},
    ),
    "fairseq": (
        "2021-01-01 10:00:00 | INFO | train_inner | epoch 001:    100 / 5000 loss=12.5, nll_loss=11.5, gnorm=3.5, lr=0.5\n"
        "2021-01-01 10:01:00 | INFO | train_inner | epoch 001:    200 / 5000 loss=11.5, nll_loss=10.5, gnorm=2.5, lr=0.5\n"
        "2021-01-01 10:02:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 11.25 | num_updates 200\n",
        {"loss": [(100, 12.5), (200, 11.5)], "grad_norm": [(100, 3.5), (200, 2.5)], "eval.loss": [(200, 11.25)]},
    ),
    "PaddlePaddle": (
        "[2021/11/01 10:00:00] root INFO: epoch: [1/500], global_step: 10, lr: 0.500000, loss: 3.25, avg_reader_cost: 0.5 s\n"
        "[2021/11/01 10:00:10] root INFO: epoch: [1/500], global_step: 20, lr: 0.500000, loss: 2.25, avg_reader_cost: 0.5 s\n",
        {"loss": [(10, 3.25), (20, 2.25)], "lr": [(10, 0.5), (20, 0.5)]},
    ),
    "torchtitan": (
        "[titan] 2024-10-01 10:00:00,123 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.25  \x1b[34mtps: 1,234  \x1b[35mmfu: 12.5%\n"
        "[titan] 2024-10-01 10:00:09,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss: 10.25  \x1b[34mtps: 5,234  \x1b[35mmfu: 32.5%\n",
        {"loss": [(1, 12.25), (10, 10.25)], "throughput": [(1, 1234.0), (10, 5234.0)]},
    ),
    "Composer": (
        "[batch=1/625]:\n\t Train time/batch: 0\n\t Train loss/train/total: 10.5\n"
        "[batch=2/625]:\n\t Train time/batch: 1\n\t Train loss/train/total: 9.5\n",
        {"loss": [(0, 10.5), (1, 9.5)]},
    ),
    "pix2pix and CycleGAN": (
        "================ Training Loss (Thu Jun 10 10:26:25 2021) ================\n"
        "(epoch: 1, iters: 100, time: 0.5, data: 0.25) D_A: 0.5 G_A: 0.75 cycle_A: 1.5 idt_A: 0.5 D_B: 0.25 \n"
        "(epoch: 1, iters: 200, time: 0.5, data: 0.25) D_A: 0.25 G_A: 0.5 cycle_A: 1.0 idt_A: 0.25 D_B: 0.5 \n",
        {
            "loss[optimizer=discriminator]": [(100, 0.5), (200, 0.25)],
            "loss[optimizer=generator]": [(100, 0.75), (200, 0.5)],
            "loss[part=d_b]": [(100, 0.25), (200, 0.5)],
        },
    ),
    "OLMo": (
        "2025-01-01 10:00:00.123\tnode-03:0\tolmo.train:990\tINFO\t[step=10/1000,epoch=0]\n"
        "    optim/total_grad_norm=2.5\n    train/CrossEntropyLoss=9.5\n    throughput/total_tokens=20,971,520\n"
        "2025-01-01 10:00:09.123\tnode-03:0\tolmo.train:990\tINFO\t[step=20/1000,epoch=0]\n"
        "    optim/total_grad_norm=1.5\n    train/CrossEntropyLoss=8.5\n    throughput/total_tokens=41,943,040\n",
        {"loss": [(10, 9.5), (20, 8.5)], "grad_norm": [(10, 2.5), (20, 1.5)]},
    ),
    "a log that was cut while its program wrote on": (
        "\x00" * 5000 + "step 10 | loss 2.5 | lr 0.5\nstep 20 | loss 2.25 | lr 0.5\nstep 30 | loss 2.0 | lr 0.5\n",
        {"loss": [(10, 2.5), (20, 2.25), (30, 2.0)]},
    ),
    "a script under W&B in a Markdown page": (
        "<style>\nc { color: blue; }\n</style>\n# Output\n"
        "Epoch [1/3], Train Loss: 0.5\nEpoch [1/3], Validation Loss: 0.75, Smoothed Validation Loss: 2.0\n"
        "Epoch [2/3], Train Loss: 0.25\nEpoch [2/3], Validation Loss: 0.5, Smoothed Validation Loss: 1.0\n"
        "wandb: Run summary:\nwandb: train_loss 0.25\nwandb:   val_loss 0.5\n",
        {"loss": [(1, 0.5), (2, 0.25)], "eval.loss": [(1, 0.75), (2, 0.5)]},
    ),
    "a home-made script": (
        "Using device cuda:0\n2025-05-09 19:17:05,018 - Epoch [1/20] | Train Loss: 0.5 Acc: 0.75 | Test Loss: 0.25 Acc: 0.875\n"
        "2025-05-09 19:17:26,469 - Epoch [2/20] | Train Loss: 0.25 Acc: 0.875 | Test Loss: 0.5 Acc: 0.75\n",
        {
            "loss": [(1, 0.5), (2, 0.25)],
            "eval.loss": [(1, 0.25), (2, 0.5)],
            "accuracy": [(1, 0.75), (2, 0.875)],
            "eval.accuracy": [(1, 0.875), (2, 0.75)],
        },
    ),
}


@pytest.mark.parametrize("tool", LOGS)
def test_a_text_log_is_read_without_options(tool: str, read: Read, points: Points) -> None:
    text, expect = LOGS[tool]
    run = read("train.log", text)

    assert run.reader.name == "text"
    assert {series: points(run, series) for series in expect} == expect


def test_a_log_is_known_by_its_middle_if_much_is_said_before_training(read: Read, points: Points) -> None:
    talk = "2025-01-01 10:00:00,123 - httpx - INFO - HTTP Request: HEAD https://example.org/a 200 OK\n" * 800
    run = read("train.log", talk + "".join(f"step {i} loss {10 - i / 200:.3f}\n" for i in range(1, 2001)) + talk)

    assert run.reader.name == "text"
    assert points(run, "loss")[:2] == [(1, 9.995), (2, 9.99)]  # type: ignore[index]


def test_a_pattern_reads_what_nobody_recognises(read: Read, points: Points) -> None:
    run = read("odd.txt", "#1 >> 2.5 <<\n#2 >> nan <<\nnoise\n", pattern=r"#(?P<step>\d+) >> (?P<loss>\S+)")

    assert points(run, "loss") == [(1, 2.5), (2, "nan")]
    assert run.notes == ["2 of 3 lines match the pattern"]


def test_a_pattern_without_names_says_how_to_write_one(read: Read) -> None:
    with pytest.raises(UsageError, match="no named group"):
        read("odd.txt", "x\n", pattern=r"loss (\d+)")


def test_a_broken_pattern_is_a_usage_error(read: Read) -> None:
    with pytest.raises(UsageError, match="--pattern"):
        read("odd.txt", "x\n", pattern=r"loss (?P<loss>\d+")


@pytest.mark.parametrize(
    "line",
    ["Epoch [1/3], Step [{}/40], Loss: 0.5\n", "[{}] loss: 0.5\n", "Train Epoch: 1 [{}/60000 (0%)]\tLoss: 0.5\n"],
)
def test_a_log_whose_lines_say_the_step_is_found_in_a_folder(line: str, write: Callable[[str, str], Path]) -> None:
    path = write("runs/train.log", "".join(line.format(i) for i in range(1, 9)))
    assert [run.path for run in find_runs([path.parent])] == [path]


def test_prose_with_numbers_in_brackets_is_no_log(read: Read) -> None:
    with pytest.raises(UnreadableRunError):
        read(
            "notes.txt",
            "[1] Smith et al., loss of plants in 3 fields\n[2] Jones, 7 gains\n1 [see above]\n2 [see below]\n",
        )
