"""Lightning callbacks that observe and shape a run; grpo_lit never imports them."""
