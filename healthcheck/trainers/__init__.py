"""Trainer adapters: each translates one framework's callbacks into events and gives Controls."""
