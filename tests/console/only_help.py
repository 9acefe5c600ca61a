"""Run with --help: it never trains."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
torch.manual_seed(0)
