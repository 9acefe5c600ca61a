"""A classifier with a loader, an evaluation after each pass, a schedule: nothing is wrong."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(640, 8)
y = (x[:, 0] + x[:, 1] > 0).long()
train, held_out = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 96)
loss_of = torch.nn.CrossEntropyLoss()
for _ in range(6):
    model.train()
    for inputs, labels in DataLoader(train, 32, shuffle=True):
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        for inputs, labels in DataLoader(held_out, 64):
            loss_of(model(inputs), labels)
