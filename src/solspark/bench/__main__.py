"""`python -m solspark.bench`: the harness with the standard library and torch alone."""

from solspark.bench.runner import main

if __name__ == "__main__":
    raise SystemExit(main())
