"""Where prompts come from, and how they reach the learner as scored rollouts."""
