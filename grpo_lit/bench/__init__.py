"""Benchmarks: ours beside what others do, on the same work, in the same run."""
