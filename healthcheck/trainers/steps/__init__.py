"""What counts as a step, whose it is, and which events it makes: of optimizers, of loops and of frameworks that tell."""
