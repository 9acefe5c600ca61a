"""Nobody clears the gradients."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(512, 8)
y = x[:, :3].sum(1, keepdim=True)
for _ in range(60):
    chosen = torch.randint(0, 512, (32,))
    torch.nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
    optimizer.step()
