"""The loss explodes and is not finite a few steps later."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
for _ in range(120):
    chosen = torch.randint(0, 512, (32,))
    loss = torch.nn.functional.mse_loss(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
