"""`export` and `import`: write a model for other software, or make a run from one."""

import argparse
import shlex
import sys

from flaxformer_min.cli.lines import Stop


def export(args: argparse.Namespace, stop: Stop) -> int:
    """Write the model of a run in another format."""
    _quiet_orbax()
    from flaxformer_min.interop import export as write

    options = {"quantization": args.quantization, "weights": args.weights}
    write(args.runs[0], args.out, format=args.format, **options)
    print(f"{args.out} holds the model; its README.md shows how to use it.", file=sys.stderr)
    return 0


def import_(args: argparse.Namespace, stop: Stop) -> int:
    """Make a run of an imported model."""
    _quiet_orbax()
    from flaxformer_min.interop import import_model

    import_model(args.model, args.run, ignore=args.ignore)
    run = shlex.quote(args.run)
    print(f"To translate with it: flaxformer-min translate {run}", file=sys.stderr)
    return 0


def _quiet_orbax() -> None:
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs its own defaults
