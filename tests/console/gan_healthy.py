"""Two optimizers in one loop, with clipping: both networks learn."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
loss_of = nn.BCEWithLogitsLoss()
for _ in range(60):
    real = torch.randn(64, 2) * 0.5 + 1
    fake = generator(torch.randn(64, 4))
    loss_d = loss_of(discriminator(real), torch.ones(64, 1)) + loss_of(discriminator(fake.detach()), torch.zeros(64, 1))
    optimizer_d.zero_grad()
    loss_d.backward()
    nn.utils.clip_grad_norm_(discriminator.parameters(), 5.0)
    optimizer_d.step()
    loss_g = loss_of(discriminator(fake), torch.ones(64, 1))
    optimizer_g.zero_grad()
    loss_g.backward()
    nn.utils.clip_grad_norm_(generator.parameters(), 5.0)
    optimizer_g.step()
