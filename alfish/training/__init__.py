"""The trainer, what listens to it, and the policy that it evaluates."""
