"""Engines that sample completions, and the sampler that turns them into scored groups."""
