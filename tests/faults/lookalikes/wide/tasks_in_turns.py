"""Two tasks by turns with an optimizer for the trunk and one for each head; each head waits while the other trains."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    w = torch.randn(12, 3)
    trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU())
    heads = nn.ModuleDict({"classes": nn.Linear(64, 3), "reals": nn.Linear(64, 1)})
    ot = torch.optim.AdamW(trunk.parameters(), lr=1e-3)
    oh = {k: torch.optim.AdamW(h.parameters(), lr=3e-3) for k, h in heads.items()}
    st = torch.optim.lr_scheduler.CosineAnnealingLR(ot, steps)
    for step in range(steps):
        x = torch.randn(64, 12)
        task = "classes" if step % 4 < 3 else "reals"
        h = heads[task](trunk(x))
        loss = (
            nn.functional.cross_entropy(h, (x @ w).argmax(1))
            if task == "classes"
            else nn.functional.mse_loss(h.squeeze(1), 20 * (x @ w)[:, 0].sin())
        )
        ot.zero_grad()
        oh[task].zero_grad()
        loss.backward()
        ot.step()
        oh[task].step()
        st.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
