"""After the first evaluation the model stays in eval mode."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(512, 8)
y = (x[:, 0] > 0).long()
for step in range(80):
    chosen = torch.randint(0, 512, (32,))
    loss = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 30:
        model.eval()
        with torch.no_grad():
            model(x[:64])
