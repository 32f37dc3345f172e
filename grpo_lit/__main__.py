"""``python -m grpo_lit``."""

from grpo_lit.cli import main

main()
