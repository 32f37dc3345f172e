"""The estimator lab: every recipe against the exact policy gradient of a policy small enough to enumerate."""
