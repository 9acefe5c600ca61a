"""A regression that draws its batches itself."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
x = torch.randn(512, 8)
y = x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(512, 1)
for _ in range(80):
    chosen = torch.randint(0, 512, (32,))
    loss = torch.nn.functional.mse_loss(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
