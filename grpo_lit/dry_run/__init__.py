"""What a run would need of each rank, from its configuration alone."""
