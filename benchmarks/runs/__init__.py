"""Scripts that a benchmark starts as processes, in the Python of their library.

`python LIBRARY_run.py RECIPE SEED [VARIANT]` is a library's side of `benchmarks.throughput`. It trains a fixed recipe
and prints a JSON object {"env_steps", "seconds", "cpu_seconds", "updates", "return", "versions"}: steps, seconds,
seconds of all threads and descendants, and gradient steps between the end of the iteration with the eighth gradient
step and the end of the last iteration, so without start-up and warm-up; the mean return of the last training episodes.
Threads are as many as OMP_NUM_THREADS says. A recipe that a library has none of ends with the status
`script.NO_SUCH_RECIPE`. PYTHONPATH is the project.

With `--benchmark=threshold` the same script is the library's side of `benchmarks.time_to_threshold`, see `threshold`,
with `--benchmark=shipped` that of `benchmarks.shipped`, and with `--benchmark=defaults` that of `benchmarks.defaults`.
`alfish_costs` is of `benchmarks.frontier`. `replay` and `offline` are of the benchmarks of those names.
"""
