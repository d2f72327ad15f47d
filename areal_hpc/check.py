"""`areal-hpc check CONFIG [a.b=value ...] [--explain]`: is this configuration usable, and what does it come to?"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.config import Config
from areal_hpc.config.check import Checked, ConfigErrors, check_config
from areal_hpc.config.schema import explain
from areal_hpc.data.prompts import DatasetError
from areal_hpc.data.survey import first_of_each, survey
from areal_hpc.exits import Exit, RunError


def main(argv: Sequence[str]) -> int:
    """Print what is wrong with a configuration (to stderr, exit code 2) or the facts that matter (exit code 0)."""
    options = _parser().parse_intermixed_args(list(argv))
    if options.explain:
        print(explain())
        return Exit.DONE
    if options.config is None:
        print("areal-hpc check: name a configuration file, or --explain for all settings", file=sys.stderr)
        return Exit.CONFIG
    try:
        checked = check_config(Path(options.config), options.overrides)
    except ConfigErrors as errors:
        print(errors.render(), file=sys.stderr)
        return Exit.CONFIG
    try:
        data = survey(checked.config)
    except RunError as error:
        print(unusable_data(options.config, error).reason, file=sys.stderr)
        return error.code
    print(f"{options.config} is fine")
    print("\n".join([facts(checked), *(f"  {'' if i else 'data':<8} {line}" for i, line in enumerate(data))]))
    return Exit.DONE


def check_data(path: Path, config: Config, libraries_are_elsewhere: bool = False) -> None:
    """Look at the first row of every source that is there; `libraries_are_elsewhere`: a missing one is no mistake.

    Raises:
        RunError: CONFIG, with all that cannot be used.
    """
    try:
        first_of_each(config)
    except RunError as error:
        if isinstance(error, DatasetError) or not libraries_are_elsewhere:
            raise unusable_data(path, error) from None


def unusable_data(path: Path | str, error: RunError) -> RunError:
    """What is wrong with the data of this configuration, for people."""
    return RunError(error.code, f"{path}: the data cannot be used\n{textwrap.indent(error.reason, '  ')}")


def facts(checked: Checked) -> str:
    """What the run comes to once the mode is written out, with the warnings below."""
    config = checked.config.resolved()
    if config.is_evaluation:
        return _facts_of_evaluation(checked)
    rows = [
        ("run", f"{config.name} in {config.run_dir}"),
        ("mode", _mode(config)),
        ("ranks", f"{config.world_size} = {config.ranks_in_words}"),
        *([("compute", config.compute)] if config.is_simulated else []),
        ("batch", _batch(config)),
        ("length", f"{config.steps:,} steps = policy versions" + _epochs(config)),
    ]
    lines = [f"  {name:<8} {text}" for name, text in rows]
    return "\n".join(lines + [f"  warning  {warning}" for warning in checked.warnings])


def _facts_of_evaluation(checked: Checked) -> str:
    config = checked.config
    samples, most = config.evaluation.samples, config.rollout.max_new_tokens
    temperature = config.temperature_of("evaluate")
    rows = [
        ("run", f"{config.name} in {config.run_dir}: an evaluation, nothing is trained"),
        ("model", config.model.path),
        ("data", ", ".join(f"{s.title} ({s.path})" for s in config.data.heldout_sources)),
        ("ranks", f"{config.world_size} = {config.ranks_in_words}"),
        ("answers", f"{samples} per prompt, at most {most:,} tokens, temperature {temperature:g}"),
    ]
    lines = [f"  {name:<8} {text}" for name, text in rows]
    return "\n".join(lines + [f"  warning  {warning}" for warning in checked.warnings])


def _mode(config: Config) -> str:
    limit = config.staleness.max_staleness
    staleness = "no limit of staleness" if limit == "inf" else f"max_staleness {limit}"
    order = " in strict order" if config.staleness.order == "strict" else ""
    updates = "interrupt generation" if config.rollout.interrupt else "wait for running sequences"
    return f"{config.mode}: {staleness}{order}, new weights {updates}"


def _batch(config: Config) -> str:
    answers = config.trainer.batch_size * config.trainer.group_size
    return (
        f"{config.trainer.batch_size:,} prompts x {config.trainer.group_size} answers of at most "
        f"{config.max_sequence_tokens:,} tokens = at most {answers * config.max_sequence_tokens:,} tokens"
    )


def _epochs(config: Config) -> str:
    return "" if config.data.epochs is None else f", or the end of data.epochs = {config.data.epochs}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc check",
        description="Check a configuration without starting anything; exit code 2 if it is not usable.",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument("--explain", action="store_true", help="list every setting with its default and meaning")
    return parser
