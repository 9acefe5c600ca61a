"""One small training in each library: ``python loops.py LIBRARY MODE``, where MODE is healthy, nan, spike, leak, save or resume.

``save`` trains for two of three epochs and saves as the library does; ``resume`` loads that and trains the third. The fault comes in the 25th pass over a training batch (``leak``: in each). Prints the held-out loss of each epoch as the
library tells it, and at the end whether all weights are finite.
"""

import os
import pathlib
import socket
import sys
import tempfile

library, mode = sys.argv[1:3]
os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch

torch.manual_seed(0)
np.random.seed(0)
rng = np.random.default_rng(0)
X = rng.standard_normal((240, 8)).astype("float32")
Y = X.sum(1, keepdims=True)
HELD_X, HELD_Y = X[200:], Y[200:]
X, Y = X[:200], Y[:200]
EPOCHS = 2 if mode == "save" else 3
DONE = 2 if mode == "resume" else 0
"""Epochs that the process before has made."""


class Net(torch.nn.Module):
    """Linear regression with a hidden layer; the fault is in its forward pass."""

    def __init__(self, inputs=8):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.passes, self.kept = 0, []

    def forward(self, x):
        out = self.layers(x)
        return fault(self, out) if self.training else out


def fault(owner, out):
    owner.passes += 1
    if mode == "nan" and owner.passes == 25:
        return out * float("nan")
    if mode == "spike" and owner.passes == 25:
        return out * 100
    if mode == "leak":
        owner.kept.append(torch.ones(4_000_000))
    return out


def finish(weights):
    print("FINITE", all(bool(np.isfinite(np.asarray(w)).all()) for w in weights), flush=True)


def weights_of(module):
    return [p.detach().numpy() for p in module.parameters()]


def loader(x, y, shuffle=False):
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=shuffle)


def keras():
    import keras

    class Faulty(keras.layers.Layer):
        def build(self, shape):
            self.passes, self.kept = 0, []

        def call(self, x, training=False):
            return fault(self, x) if training and x.device.type != "meta" else x

    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1), Faulty()]
    )
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse")
    if DONE:
        model = keras.models.load_model("model.keras", custom_objects={"Faulty": Faulty})
    try:
        history = model.fit(
            X, Y, epochs=EPOCHS, batch_size=8, validation_data=(HELD_X, HELD_Y), verbose=0, shuffle=False, initial_epoch=DONE
        )  # fmt: skip
        if mode == "save":
            model.save("model.keras")
        print("HELD", *history.history["val_loss"])
    finally:
        finish(model.get_weights())


def fastai():
    import fastai.callback.schedule
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import MSELossFlat

    rows = lambda x, y: list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True))  # noqa: E731
    net = Net()
    learner = Learner(
        DataLoaders(DataLoader(rows(X, Y), bs=8), DataLoader(rows(HELD_X, HELD_Y), bs=8)), net, loss_func=MSELossFlat()
    )
    learner.path = pathlib.Path.cwd()
    if DONE:
        learner.create_opt()
        learner.load("kept")
    try:
        with learner.no_bar():
            learner.fit(EPOCHS, 1e-2, start_epoch=DONE)
        if mode == "save":
            learner.save("kept")
        print("HELD", *(values[1] for values in learner.recorder.values[DONE:]))
    finally:
        finish(weights_of(net))


def skorch():
    from skorch import NeuralNetRegressor
    from skorch.dataset import Dataset
    from skorch.helper import predefined_split

    net = NeuralNetRegressor(
        Net, max_epochs=EPOCHS, lr=1e-2, batch_size=8, optimizer=torch.optim.AdamW, verbose=0,
        train_split=predefined_split(Dataset(HELD_X, HELD_Y)),
    )  # fmt: skip
    files = {"f_params": "params.pt", "f_optimizer": "optimizer.pt", "f_history": "history.json"}
    try:
        if DONE:
            net.set_params(max_epochs=EPOCHS - DONE)
            net.initialize()
            net.load_params(**files)
            net.partial_fit(X, Y)
        else:
            net.fit(X, Y)
        if mode == "save":
            net.save_params(**files)
        print("HELD", *net.history[DONE:, "valid_loss"])
    finally:
        finish(weights_of(net.module_))


def ignite():
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import Loss

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    trainer = create_supervised_trainer(net, optimizer, torch.nn.functional.mse_loss)
    evaluator = create_supervised_evaluator(net, metrics={"loss": Loss(torch.nn.functional.mse_loss)})
    held = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(_):
        evaluator.run(loader(HELD_X, HELD_Y))
        held.append(evaluator.state.metrics["loss"])

    parts = {"model": net, "optimizer": optimizer, "trainer": trainer}
    if mode == "save":
        saver = Checkpoint(parts, DiskSaver("kept", require_empty=False), global_step_transform=lambda *_: 0)
        trainer.add_event_handler(Events.COMPLETED, saver)
    if DONE:
        (kept,) = pathlib.Path("kept").iterdir()
        Checkpoint.load_objects(to_load=parts, checkpoint=torch.load(kept))
    try:
        trainer.run(loader(X, Y), max_epochs=EPOCHS)
        print("HELD", *held)
    finally:
        finish(weights_of(net))


def timm():
    import vision_shim
    from timm.models import resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, CheckpointSaver, NativeScaler

    net = Net()
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-2)
    schedule, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, updates_per_epoch=25)
    scaler, updates, held = NativeScaler(device="cpu"), 25 * DONE, []
    loss_of = torch.nn.MSELoss()
    if DONE:
        resume_checkpoint(net, "kept/last.pth.tar", optimizer)
        schedule.step(DONE)
    try:
        for epoch in range(DONE, EPOCHS):
            net.train()
            for x, y in loader(X, Y):
                loss = loss_of(net(x), y)
                optimizer.zero_grad()
                scaler(loss, optimizer, clip_grad=1.0, parameters=net.parameters())
                updates += 1
                schedule.step_update(num_updates=updates)
            schedule.step(epoch + 1)
            net.eval()
            meter = AverageMeter()
            with torch.inference_mode():
                for x, y in loader(HELD_X, HELD_Y):
                    meter.update(loss_of(net(x), y).item(), len(x))
            held.append(meter.avg)
            if mode == "save":
                os.makedirs("kept", exist_ok=True)
                CheckpointSaver(net, optimizer, checkpoint_dir="kept", decreasing=True).save_checkpoint(
                    epoch, meter.avg
                )
        print("HELD", *held)
    finally:
        finish(weights_of(net))


def stable_baselines3():
    import gymnasium as gym
    from stable_baselines3 import PPO

    class Features(torch.nn.Module):
        pass

    if DONE:
        agent = PPO.load("agent.zip", env=gym.make("CartPole-v1"), device="cpu")
    else:
        agent = PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=0, verbose=0, n_steps=64, batch_size=32)
    original = agent.policy.evaluate_actions
    owner = Net()

    def evaluate_actions(*given, **named):
        values, chances, entropy = original(*given, **named)
        return fault(owner, values), chances, entropy

    agent.policy.evaluate_actions = evaluate_actions
    assert gym is not None
    try:
        agent.learn(256 if mode in ("save", "resume") else 512, reset_num_timesteps=not DONE)
        if mode == "save":
            agent.policy.__dict__.pop("evaluate_actions")
            agent.save("agent.zip")
    finally:
        finish(weights_of(agent.policy))


def sentence_transformers():
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tempfile.mkdtemp()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(60)]
    BertModel(
        BertConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained(folder)
    BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(folder, max_seq_length=16), Pooling(32)], device="cpu")
    pairs = {
        "anchor": [f"w{i % 60} w{(i + 1) % 60}" for i in range(200)],
        "positive": [f"w{(i + 1) % 60} w{i % 60}" for i in range(200)],
    }
    data = Dataset.from_dict(pairs)

    class Loss(losses.MultipleNegativesRankingLoss):
        def __init__(self, model):
            super().__init__(model)
            self.passes, self.kept = 0, []

        def forward(self, *given, **named):
            loss = super().forward(*given, **named)
            return fault(self, loss) if self.training else loss

    options = SentenceTransformerTrainingArguments(
        os.path.abspath("kept"), num_train_epochs=EPOCHS, per_device_train_batch_size=8, per_device_eval_batch_size=8, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="epoch" if mode == "save" else "no", eval_strategy="epoch", learning_rate=1e-4,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model, options, train_dataset=data, eval_dataset=data.select(range(32)), loss=Loss(model)
    )
    try:
        trainer.train(resume_from_checkpoint=bool(DONE))
        print("HELD", *(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry))
    finally:
        finish(weights_of(model))


def deepspeed():
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    model = Net()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3), config=settings
    )
    held = []
    if DONE:
        engine.load_checkpoint("kept")
    try:
        for _ in range(DONE, EPOCHS):
            engine.train()
            for x, y in loader(X, Y, shuffle=True):
                engine.backward(torch.nn.functional.mse_loss(engine(x), y))
                engine.step()
            engine.eval()
            with torch.no_grad():
                losses = [torch.nn.functional.mse_loss(engine(x), y).item() for x, y in loader(HELD_X, HELD_Y)]
            held.append(sum(losses) / len(losses))
        if mode == "save":
            engine.save_checkpoint("kept")
        print("HELD", *held)
    finally:
        finish(weights_of(model))


def ultralytics():
    import vision_shim

    os.environ["YOLO_OFFLINE"] = "1"
    import random

    import cv2
    from ultralytics import YOLO
    from ultralytics.nn.tasks import DetectionModel

    folder = tempfile.mkdtemp()
    random.seed(0)
    for part in ("train", "val"):
        os.makedirs(f"{folder}/images/{part}")
        os.makedirs(f"{folder}/labels/{part}")
        for i in range(20 if part == "train" else 4):
            image = np.full((64, 64, 3), 30, np.uint8)
            x, y = random.randint(12, 50), random.randint(12, 50)
            cv2.rectangle(image, (x - 8, y - 8), (x + 8, y + 8), (0, 200, 255), -1)
            cv2.imwrite(f"{folder}/images/{part}/{i}.png", image)
            with open(f"{folder}/labels/{part}/{i}.txt", "w") as file:
                file.write(f"0 {x / 64} {y / 64} .25 .25\n")
    with open(f"{folder}/d.yaml", "w") as file:
        file.write(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {{0: box}}\n")
    original, owner, trained = DetectionModel.loss, Net(), []

    def loss(model, *given, **named):
        total, items = original(model, *given, **named)
        if model.training:
            trained[:] = [model]
            total = fault(owner, total)
        return total, items

    DetectionModel.loss = loss
    yolo = YOLO("kept/train/weights/last.pt" if DONE else "yolov8n.yaml")
    if mode == "save":  # ended from outside: of a training that is over it keeps no optimizer
        yolo.add_callback("on_model_save", lambda trainer: sys.exit(0) if trainer.epoch == EPOCHS - 1 else None)
    try:
        yolo.train(
            data=f"{folder}/d.yaml", epochs=3, resume=bool(DONE), imgsz=64, batch=2, nbs=2, device="cpu", workers=0, project=os.path.abspath("kept"),
            plots=False, verbose=False, amp=False, val=True, mosaic=0.0, scale=0.0, translate=0.0,  # boxes are in all images then
        )  # fmt: skip
    finally:
        finish(weights_of(trained[0]))


globals()[library]()
