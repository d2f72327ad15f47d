"""`areal-hpc evaluate MODEL --data FILE ...`: measure a model on held-out prompts, here or as a Slurm job.

It writes the settings to OUT/evaluate.yaml, an ordinary configuration with `trainer.ranks: 0`, and runs or submits
that. So every other setting can be given as `a.b=value`, and the same evaluation can be run again from the file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_hpc import submission
from areal_hpc.answers import check_settings
from areal_hpc.config import Config
from areal_hpc.config.check import ConfigErrors, check_config
from areal_hpc.config.rules import CODE_REWARD, PROGRAM_S
from areal_hpc.config.sources import SourceConfig
from areal_hpc.exits import Exit, RunError
from areal_hpc.heldout import read_sets, settings_of
from areal_hpc.launch import run_here

FILE = "evaluate.yaml"
REWARDS = {
    "areal_hpc.verifiers.math:reward": ("maths", "gsm8k", "math", "math500", "deepscaler", "aime", "amc"),
    CODE_REWARD: ("humaneval", "mbpp", "livecodebench"),
}
"""What judges the answers where --reward says nothing, by layout."""

DESCRIPTION = """\
Measure a model on held-out prompts: pass@1 with its standard error, pass@k, majority votes, lengths, outcomes.

What is reported, for every data set:
  pass@1   mean over prompts of the share of correct answers; +- is the standard error of that mean over prompts, so
           the samples of one prompt count as one cluster
  pass@k   chance that one of k answers is correct, unbiased: mean of 1 - C(n - c, k) / C(n, k) for c correct of n
  maj@k    chance that the most frequent answer among k is correct, exactly, over all choices of k of the n answers; a
           tie counts as the mean of the tied; needs a reward function that returns (reward, outcome, answer)
  length   tokens of the answers, and the share cut off by the limit
  outcomes correct, wrong, unparsed, timeout, error; the last two are not counted as wrong answers

What is left in OUT: answers.jsonl, every answer with its text; summary.json, the figures; settings.json, what the
answers depend on; log/attempt_N.h5, who did what when. The same command again goes on where it was interrupted, also on
another number of ranks; the answers do not depend on that. With other settings it refuses. They are the answers that an
evaluation at the start of a training run gets with the same model, seed and settings.
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(list(argv))
    try:
        path = prepare(options)
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    if options.submit or options.dry_run:
        return submission.main([str(path), *options.overrides, *(["--dry-run"] if options.dry_run else [])])
    return run_here(path, options.overrides)


def prepare(options: argparse.Namespace) -> Path:
    """Write the configuration, unless it is unusable or OUT holds an evaluation with other settings.

    Raises:
        RunError: CONFIG, with everything that is wrong.
    """
    out = Path(options.out or f"runs/evaluate/{Path(os.path.abspath(options.model)).name}")
    content = f"# areal-hpc run {out / FILE}\n" + yaml.safe_dump(settings(options, out), sort_keys=False)
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / FILE
        draft.write_text(content, encoding="utf-8")
        try:
            config = check_config(draft, options.overrides, files_are_elsewhere=options.dry_run).config.resolved()
        except ConfigErrors as errors:
            raise ConfigErrors(errors.problems, "areal-hpc evaluate") from None
    if not options.dry_run:
        check_settings(Path(config.run_dir), _settings_of(config))
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    path.write_text(content, encoding="utf-8")
    return path


def _settings_of(config: Config) -> dict[str, Any]:
    try:
        return settings_of(config, read_sets(config)[0])
    except OSError as error:
        raise RunError(Exit.CONFIG, f"areal-hpc evaluate: cannot read {error.filename}: {error.strerror}") from None


def settings(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The configuration of an evaluation. Raises RunError (CONFIG)."""
    layouts = _layouts(options)
    rollout = {
        "ranks": options.ranks,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
    }
    return {
        "name": "evaluate",
        "run_dir": str(out),
        "seed": options.seed,
        "model": {"path": options.model},
        "data": data_section(options.data, layouts, options.chat),
        "reward": _judge(options.reward or _reward_of(layouts)),
        "rollout": {name: value for name, value in rollout.items() if value is not None},
        "trainer": {"ranks": 0},
        "evaluation": {"samples": options.samples},
    }


def data_section(paths: Sequence[str], layouts: Sequence[str], chat: str | None = None) -> dict[str, Any]:
    """The section `data`; training prompts are asked for by the configuration, and not read without trainers."""
    names: list[str] = []
    for path in paths:
        title = SourceConfig(path=path).title
        number = 1 + sum(name == title or name.rpartition("-")[0] == title for name in names)
        names.append(title if number == 1 else f"{title}-{number}")
    sources = [
        {"name": name, "path": path, "layout": layout or "plain"}
        for name, path, layout in zip(names, paths, layouts, strict=True)
    ]
    return {"train": paths[0], "heldout": sources, **({"chat": {"template": chat}} if chat else {})}


def _layouts(options: argparse.Namespace) -> list[str]:
    """One layout per file, "" for none: --layout once for all, or once for each."""
    given, files = options.layout, len(options.data)
    if len(given) <= 1:
        return (given or [""]) * files
    if len(given) != files:
        reason = f"--layout was given {len(given)} times for {files} files; give it once, or once for each --data"
        raise RunError(Exit.CONFIG, f"areal-hpc evaluate: {reason}")
    return list(given)


def _judge(function: str) -> dict[str, Any]:
    """Programs may take long; a time-out of the answer must not come before the verifier's own."""
    return {"function": function} | ({"timeout_s": PROGRAM_S + 15} if function == CODE_REWARD else {})


def _reward_of(layouts: Sequence[str]) -> str:
    found = {function for function, known in REWARDS.items() for layout in layouts if layout in known}
    if len(found) == 1 and all(layouts):
        return found.pop()
    why = "these layouts need different ones" if len(found) > 1 else "no --layout says how answers are judged"
    hint = "name the function of your task, package.module:function or file.py:function"
    raise RunError(Exit.CONFIG, f"areal-hpc evaluate: --reward is missing and {why}; {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc evaluate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory of the model in Hugging Face layout")
    add("overrides", nargs="*", metavar="a.b=value", help="any other setting; `areal-hpc check --explain` lists them")
    add("--data", action="append", required=True, metavar="FILE", help="held-out prompts; again for another data set")
    add("--layout", action="append", default=[], metavar="NAME", help="what the fields mean, as data.heldout takes it")
    add("--chat", metavar="TEMPLATE", help="model: the model's chat template; or a Jinja file; none: plain text (none)")
    add("--reward", metavar="FUNCTION", help="package.module:function or file.py:function; default: by layout")
    add("--samples", type=int, default=1, metavar="N", help="answers per prompt (1)")
    add("--temperature", type=float, metavar="T", help="sampling temperature; 0 takes the likeliest token (1.0)")
    add("--max-new-tokens", type=int, metavar="N", help="longest answer (1024)")
    add("--max-prompt-tokens", type=int, metavar="N", help="longest prompt (1024)")
    add("--seed", type=int, default=0, metavar="S", help="of the sampling (0)")
    add("--ranks", type=int, default=1, metavar="R", help="rollout ranks, beside one that hands out prompts (1)")
    add("--out", metavar="DIR", help="directory of the results (runs/evaluate/NAME_OF_THE_MODEL)")
    add("--submit", action="store_true", help="put it into the Slurm queue; slurm.site=FILE and so on as overrides")
    add("--dry-run", action="store_true", help="print the batch script instead of submitting it")
    return parser
