"""Images are divided by 255 as they are read; what is stored stays."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 160


class Images(Dataset):
    def __init__(self) -> None:
        self.images = 255 * torch.rand(320, 1, 6, 6)
        self.labels = (self.images.mean((1, 2, 3)) > 127).long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[at]
        image = image / 255
        return image, self.labels[at]


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    loader = DataLoader(Images(), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps // 20):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
