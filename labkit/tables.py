"""What benchmarks that print several tables have in common: options, their checks, headings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch

import labkit
from labkit.lab import Lab

Table = Callable[[Lab, argparse.Namespace], None]


def table_parser(description: str | None, examples: str, tables: Sequence[str],
                 threads: int) -> argparse.ArgumentParser:
    """A parser with --model, --only and --threads (and its default); the help ends in examples."""
    parser = argparse.ArgumentParser(description=description, epilog=examples,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini", help="a preset or folder (default mini)")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables, metavar="TABLE",
                        help=f"tables to print, of: {', '.join(tables)} (default all)")
    parser.add_argument("--threads", type=int, default=threads, metavar="N",
                        help="threads of torch (default %(default)s)")
    return parser


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace,
                 least: Mapping[str, int]) -> None:
    """Ends the program where a number is too small; `least` by option, e.g. {"new_tokens": 2}.

    An option that was left at None may be so.
    """
    for name, smallest in least.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < smallest:
                parser.error(f"--{name.replace('_', '-')} is {value}: give at least {smallest}")


def check_context(parser: argparse.ArgumentParser, options: argparse.Namespace, lab: Lab,
                  needed: Mapping[str, int]) -> None:
    """Ends the program where a text would be too long; `needed`: what makes it so -> tokens."""
    limit = lab.config.max_position_embeddings
    for what, tokens in needed.items():
        if tokens > limit:
            parser.error(f"{what} make {tokens} tokens: the context of {options.model} is {limit}")


def load_model(options: argparse.Namespace) -> Lab:
    """The model of the options; torch has as many threads as they say."""
    torch.set_num_threads(options.threads)
    return labkit.load(options.model)


@torch.no_grad()
def print_tables(lab: Lab, options: argparse.Namespace, tables: Mapping[str, Table]) -> None:
    """Those that were asked for, in the order that they were asked for."""
    for name in options.only:
        tables[name](lab, options)


def heading(text: str, model: object, threads: int, sizes: str) -> None:
    """What is measured, of which model, with which torch, threads and sizes."""
    print(f"\n{text}\n  {model}; torch {torch.__version__}, {threads} thread"
          f"{'s' if threads > 1 else ''}; {sizes}", flush=True)
