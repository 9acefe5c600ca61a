"""A stand-in for torchvision: its data sets hold pictures made here, its transforms work on tensors."""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(f"torchvision.{name}")
    vars(module).update(content)
    sys.modules[f"torchvision.{name}"] = module
    return module


class _Pictures(torch.utils.data.Dataset[Any]):
    """Pictures of ten classes: a bright patch whose place tells the class, in noise."""

    shape: tuple[int, ...] = (28, 28)
    rows = 2048

    def __init__(
        self,
        root: str = "",
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Any = None,
        download: bool = False,
        **more: Any,
    ) -> None:
        drawn = torch.Generator().manual_seed(1 if train else 2)
        rows = self.rows if train else self.rows // 3
        self.targets = torch.randint(0, 10, (rows,), generator=drawn)
        self.data = torch.randint(0, 60, (rows, *self.shape), generator=drawn, dtype=torch.uint8)
        side = self.shape[0] // 5
        for row, label in enumerate(self.targets.tolist()):
            top, left = (label // 5) * 2 * side + side // 2, (label % 5) * side
            self.data[row, top : top + side, left : left + side] = 230
        self.classes = [str(n) for n in range(10)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = self.data[index].float() / 255
        picture = picture.unsqueeze(0) if picture.dim() == 2 else picture.permute(2, 0, 1)
        return (picture if self.transform is None else self.transform(picture)), int(self.targets[index])


class CIFAR10(_Pictures):
    shape = (32, 32, 3)


class CIFAR100(CIFAR10):
    rows = 1024


class ImageFolder(CIFAR10):
    """Two classes, as in the bees and ants of the transfer learning tutorial."""

    rows = 64

    def __init__(self, root: str = "", transform: Any = None, **more: Any) -> None:
        super().__init__(transform=transform)
        self.targets = self.targets % 2
        self.classes = ["ants", "bees"]


class FakeData(_Pictures):
    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 64, 64),
        num_classes: int = 10,
        transform: Any = None,
        **more: Any,
    ):
        self.shape, self.rows = (*image_size[1:], image_size[0]), min(size, 320)
        super().__init__(transform=transform)


class Compose:
    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __call__(self, picture: Any) -> Any:
        for step in self.steps:
            picture = step(picture)
        return picture


class Normalize:
    def __init__(self, mean: Any, std: Any, inplace: bool = False) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, picture: Any) -> Any:
        return (picture - self.mean) / self.std


class Resize:
    def __init__(self, size: Any, **more: Any) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, picture: Any) -> Any:
        return torch.nn.functional.interpolate(picture.unsqueeze(0), size=self.size)[0]


class RandomCrop:
    def __init__(self, size: int, padding: int = 0) -> None:
        self.size, self.padding = size, padding

    def __call__(self, picture: Any) -> Any:
        picture = torch.nn.functional.pad(picture, (self.padding,) * 4)
        top, left = (int(torch.randint(0, n - self.size + 1, ())) for n in picture.shape[-2:])
        return picture[:, top : top + self.size, left : left + self.size]


def _same(*given: Any, **more: Any) -> Callable[[Any], Any]:
    return lambda picture: picture


def _flip(*given: Any, **more: Any) -> Callable[[Any], Any]:
    return lambda picture: picture.flip(-1) if float(torch.rand(())) < 0.5 else picture


class _Block(torch.nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(after)
        self.downsample = torch.nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.bn1(self.conv1(x)) + self.downsample(x))


class ResNet(torch.nn.Module):
    """The parts of a ResNet under their names, a tenth as deep; weights drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(64)
        self.relu = torch.nn.ReLU()
        self.maxpool = torch.nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2 = _Block(64, 64), _Block(64, 128)
        self.avgpool = torch.nn.AdaptiveAvgPool2d(1)
        self.fc = torch.nn.Linear(128, 1000)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


def resnet18(*args: Any, **more: Any) -> ResNet:
    return ResNet()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


datasets = _module(
    "datasets",
    MNIST=_Pictures,
    FashionMNIST=_Pictures,
    CIFAR10=CIFAR10,
    CIFAR100=CIFAR100,
    FakeData=FakeData,
    ImageFolder=ImageFolder,
)
transforms = _module(
    "transforms",
    **{kind.__name__: kind for kind in (Compose, Normalize, Resize, RandomCrop)},
    **dict.fromkeys(("ToTensor", "CenterCrop", "ToPILImage", "Pad", "ColorJitter", "RandomRotation"), _same),
    **dict.fromkeys(("RandomHorizontalFlip", "RandomVerticalFlip"), _flip),
    RandomResizedCrop=Resize,
    Lambda=lambda function: function,
)
utils = _module("utils", save_image=_nothing, make_grid=_nothing)
models = _module("models", resnet18=resnet18)
