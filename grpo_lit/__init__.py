"""GRPO-family reinforcement learning of language models with verifiable rewards, on Lightning."""
