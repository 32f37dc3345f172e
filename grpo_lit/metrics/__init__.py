"""What is logged: exact under micro-batches and ranks."""
