"""sktime/pytorch-forecasting#182 (kind): the window that is given to the model ends with the value that it has to predict."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
n = 1500
series = torch.sin(torch.arange(n) * 0.1) + 0.3 * torch.randn(n).cumsum(0) / 10 + 0.2 * torch.randn(n)
W = 24
end = W if FAULT else W - 1
xs = torch.stack([series[i : i + end] for i in range(n - W)])
ys = torch.stack([series[i + W - 1] for i in range(n - W)])
train = torch.utils.data.TensorDataset(xs[:1200, :, None], ys[:1200, None])
loader = torch.utils.data.DataLoader(train, batch_size=40, shuffle=True)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 32, batch_first=True)
        self.fc = nn.Linear(32, 1)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


net = Forecaster()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(8):
    for x, y in loader:
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
