"""What is trained on: batches and their order, targets, padding, answers among the questions."""
