"""Scripts that a benchmark starts as processes, in the Python of their library.

`LIBRARY_run.py` is of `benchmarks.throughput`: `python FILE RECIPE SEED [VARIANT]` trains a fixed recipe and prints a
JSON object {"env_steps", "seconds", "cpu_seconds", "updates", "return", "versions"}: steps, seconds, seconds of all
threads and descendants, and gradient steps between the end of the iteration with the eighth gradient step and the end
of the last iteration, so without start-up and warm-up; the mean return of the last training episodes. Threads are as
many as OMP_NUM_THREADS says. A recipe that a library has none of ends with the status `script.NO_SUCH_RECIPE`.
PYTHONPATH is the project.

`LIBRARY_threshold.py` is of `benchmarks.time_to_threshold`, see `threshold`, and `LIBRARY_shipped.py` of
`benchmarks.shipped`. `alfish_costs` is of `benchmarks.frontier`. `replay` and `offline` are of the benchmarks of those
names.
"""
