"""Runs programs that a model wrote, confined and killable; imports little, so that it starts fast."""
