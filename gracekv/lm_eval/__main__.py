"""`python -m gracekv.lm_eval`: lm-eval's command line with the added `--model gracekv`."""

from __future__ import annotations

from gracekv.lm_eval import register


def main() -> None:
    """Run lm-eval with the arguments of this process.

    Raises `MissingDependencyError` if lm-eval is not installed.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
