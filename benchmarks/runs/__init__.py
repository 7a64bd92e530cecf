"""One file a library: `python FILE RECIPE SEED [VARIANT]` trains a fixed recipe and prints one JSON object.

{"env_steps", "seconds", "updates", "return", "versions"}: steps, seconds and gradient steps between the end of the
iteration with the eighth gradient step and the end of the last iteration, so without start-up and warm-up; the mean
return of the last training episodes.
"""
