"""Weights: are they finite, do they move, how far, and from where did they start?"""
