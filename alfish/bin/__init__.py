"""The command line: one module a subcommand, each with `FLAGS`, a docstring that --help prints, and `main(flags)`."""
