"""Vocabulary of all other parts, standard library only."""
