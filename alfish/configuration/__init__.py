"""gin: finding, reading and checking the configuration of a run."""
