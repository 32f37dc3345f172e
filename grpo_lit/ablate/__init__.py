"""Ablations: a baseline, each change alone, and one after the other, over seeds."""
