"""One file a library: `python FILE RECIPE SEED` trains a fixed recipe and prints one JSON object.

{"env_steps", "seconds", "updates", "return", "versions"}: steps, seconds and gradient steps between the end of the
first iteration that trained and the end of the last, so without start-up and warm-up; the mean return of the last
training episodes.
"""
