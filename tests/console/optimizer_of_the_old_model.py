"""The model is built again after the optimizer: the optimizer holds weights that nobody uses."""

import torch


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


torch.manual_seed(0)
model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model = build()
x = torch.randn(512, 8)
y = (x[:, 0] > 0).long()
for _ in range(60):
    chosen = torch.randint(0, 512, (32,))
    loss = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    model.zero_grad()
    loss.backward()
    optimizer.step()
