"""Rules that look at several settings, or at the files they name: what makes a well-formed configuration unusable.

Each rule is a small generator that knows which settings it concerns, so that it is left out when one of them is
already known to be wrong. Nothing is imported that the configuration names; modules are found and read as text.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from areal_hpc.config import Config

OVERLONG = "areal_hpc.rewards.shaping:overlong_penalty"

CODE_REWARD = "areal_hpc.verifiers.code:reward"
PROGRAM_S = 60.0
"""Default of its total_s."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration, or, if not fatal, one thing its writer should know.

    Attributes:
        where: dotted path of the setting, or file:line:column, or the override as it was written.
        message: what is wrong, what is legal and what was found.
        hint: what to do about it; may be empty.
        fatal: the run must not start.
        section: name of the section whose legal keys are worth showing; None if none.
    """

    where: str
    message: str
    hint: str = ""
    fatal: bool = True
    section: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f"; {self.hint}" if self.hint else "")


Rule = Callable[[Config], Iterator[Problem]]
RULES: list[tuple[tuple[str, ...], Rule, bool]] = []
"""Every rule with the dotted paths it concerns, in the order in which they run, and whether it looks at files."""


def rule(*concerns: str, files: bool = False) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.append((concerns, function, files))
        return function

    return add


def broken_rules(config: Config, already_wrong: set[str], files_are_elsewhere: bool = False) -> list[Problem]:
    """Problems of all rules that concern none of the settings in `already_wrong`, nor anything above or below them.

    With `files_are_elsewhere` what is wrong with files is not fatal.
    """
    problems: list[Problem] = []
    for concerns, function, files in RULES:
        if not any(_overlap(path, wrong.partition("[")[0]) for path in concerns for wrong in already_wrong):
            try:
                found = list(function(config))
                problems += [replace(p, fatal=False) for p in found] if files and files_are_elsewhere else found
            except OSError as error:  # a path too long, a directory that may not be searched, a stale mount
                problems.append(Problem(concerns[0], f"cannot be checked: {error}"))
    return problems


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


# ------------------------------------------------------------------------------------------------------ numbers
@rule("trainer.group_size", "trainer.advantage.group_norm")
def one_answer_has_no_spread(c: Config) -> Iterator[Problem]:
    norm = c.trainer.advantage.group_norm
    if not c.is_evaluation and c.trainer.group_size == 1 and norm != "none":
        yield Problem(
            "trainer.group_size",
            f"a group of one answer has no spread, so trainer.advantage.group_norm = {norm} makes every advantage 0",
            "set trainer.group_size to 2 or more, or group_norm to none",
        )


@rule("trainer.micro_batch_tokens", "rollout.max_prompt_tokens", "rollout.max_new_tokens")
def longest_sequence_fits(c: Config) -> Iterator[Problem]:
    if not c.is_evaluation and c.trainer.micro_batch_tokens < c.max_sequence_tokens:
        yield Problem(
            "trainer.micro_batch_tokens",
            f"must hold the longest sequence, rollout.max_prompt_tokens + rollout.max_new_tokens = "
            f"{c.rollout.max_prompt_tokens} + {c.rollout.max_new_tokens} = {c.max_sequence_tokens} [tokens], "
            f"got {c.trainer.micro_batch_tokens}",
        )


@rule("rollout.temperature", "trainer.ranks")
def training_needs_chance(c: Config) -> Iterator[Problem]:
    if c.rollout.temperature == 0 and not c.is_evaluation:
        yield Problem("rollout.temperature", "must be above 0 for training: the likeliest token has no log-prob")


@rule("trainer.minibatches", "trainer.batch_size", "trainer.group_size")
def minibatches_are_not_empty(c: Config) -> Iterator[Problem]:
    answers = c.trainer.batch_size * c.trainer.group_size
    if c.trainer.minibatches > answers:
        yield Problem(
            "trainer.minibatches",
            f"must be at most batch_size * group_size = {answers} [answers in a batch], got {c.trainer.minibatches}",
        )


@rule("filter.min_success", "filter.max_success")
def filter_accepts_something(c: Config) -> Iterator[Problem]:
    if c.filter.min_success > c.filter.max_success:
        yield Problem(
            "filter.min_success",
            f"must be at most filter.max_success = {c.filter.max_success}, got {c.filter.min_success}: "
            f"every group would be rejected",
        )


@rule("trainer.objective.weight_cap", "trainer.objective.kind")
def cap_needs_a_weight(c: Config) -> Iterator[Problem]:
    objective = c.trainer.objective
    if objective.kind == "naive" and objective.weight_cap is not None:
        yield Problem(
            "trainer.objective.weight_cap",
            "the naive objective has no behaviour weight to cap",
            "delete weight_cap or set trainer.objective.kind to decoupled",
        )


@rule("mode", "staleness.max_staleness", "rollout.interrupt")
def mode_wins(c: Config) -> Iterator[Problem]:
    r = c.resolved()
    staleness, interrupt = c.staleness.max_staleness, c.rollout.interrupt
    if "max_staleness" in c.staleness.model_fields_set and r.staleness.max_staleness != staleness:
        message = f"{staleness} has no effect, mode {c.mode} sets it to {r.staleness.max_staleness}"
        yield Problem("staleness.max_staleness", message, fatal=False)
    if "interrupt" in c.rollout.model_fields_set and r.rollout.interrupt != interrupt:
        yield Problem("rollout.interrupt", f"true has no effect, mode {c.mode} does not interrupt", fatal=False)


# --------------------------------------------------------------------------------------------------- simulation
@rule("rollout.engine", "trainer.engine")
def simulated_together(c: Config) -> Iterator[Problem]:
    rollout, trainer = c.rollout.engine, c.trainer.engine
    if (rollout == "simulated") != (trainer == "simulated"):
        yield Problem(
            "trainer.engine",
            f"is {trainer} but rollout.engine is {rollout}: a simulated one has neither weights nor answers to pass on",
            "set both to simulated, or neither",
        )


@rule("simulation", "rollout.engine", "reward.function")
def simulation_is_meant(c: Config) -> Iterator[Problem]:
    if c.is_simulated:
        return
    if "simulation" in c.model_fields_set:
        yield Problem("simulation", "has no effect, rollout.engine is not simulated", fatal=False)
    if c.reward.function == "areal_hpc.simulation:reward":
        yield Problem("reward.function", f"{c.reward.function} scores nothing", "name the function of your task")


@rule("workflow", "rollout.engine")
def workflow_has_text(c: Config) -> Iterator[Problem]:
    if c.workflow.function is not None and c.is_simulated:
        yield Problem(
            "workflow.function",
            "cannot be used with rollout.engine = simulated: a timed model writes no text to work with",
            "delete workflow.function, or choose another engine",
        )
    if c.workflow.function is None and c.workflow.model_fields_set - {"function"}:
        yield Problem("workflow", "has no effect without workflow.function", fatal=False)


# -------------------------------------------------------------------------------------------------------- files
@rule("run_dir", files=True)
def run_dir_can_be_made(c: Config) -> Iterator[Problem]:
    place = Path(os.path.abspath(c.run_dir))
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        yield Problem("run_dir", f"{c.run_dir} cannot be a directory, {place} exists and is none", "name another one")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield Problem("run_dir", f"{c.run_dir} cannot be made, you may not write in {place}", "name another one")


@rule("model.path", "prepare", "rollout.engine", files=True)
def model_is_there(c: Config) -> Iterator[Problem]:
    path = Path(c.model.path)
    if c.is_simulated or is_prepared(c, path):
        return
    if not path.is_dir():
        yield Problem(
            "model.path",
            f"no such directory: {path}",
            "download the model beforehand where there is internet (`hf download NAME --local-dir DIR`), "
            "or let `prepare` make it",
        )
        return
    wanted = {"config.json": "config.json", "weights": "*.safetensors", "tokenizer": "tokenizer*"}
    missing = [
        f"{what} ({name})" if what != name else name for what, name in wanted.items() if not any(path.glob(name))
    ]
    if missing:
        yield Problem("model.path", f"{path} is no Hugging Face model, it lacks {', '.join(missing)}")


@rule("data.heldout", "trainer.ranks", "evaluation.every")
def evaluations_have_prompts(c: Config) -> Iterator[Problem]:
    if c.data.heldout_sources:
        return
    if c.is_evaluation:
        yield Problem("data.heldout", "is missing: without trainer ranks the run is an evaluation of these prompts")
    elif c.evaluation.every is not None:
        yield Problem("evaluation.every", "has no effect without data.heldout", fatal=False)


def is_prepared(c: Config, path: Path) -> bool:
    """`prepare` runs before the ranks start and makes what lies in its directory."""
    return c.prepare is not None and path.resolve().is_relative_to(Path(c.prepare.directory).resolve())


# ---------------------------------------------------------------------------------------------------- functions
@rule("reward.function", "reward.timeout_s", "reward.kwargs")
def programs_need_time(c: Config) -> Iterator[Problem]:
    """The code verifier ends a slow program itself and calls it wrong; cut off before, it would not be scored."""
    total_s = c.reward.kwargs.get("total_s", PROGRAM_S)
    if c.reward.function == CODE_REWARD and isinstance(total_s, (int, float)) and c.reward.timeout_s <= total_s:
        message = f"{c.reward.timeout_s:g} s cuts off programs that may take {total_s:g} s (reward.kwargs.total_s)"
        yield Problem("reward.timeout_s", message, f"write {total_s + 15:g}")


@rule("reward.function", files=True)
def reward_function_exists(c: Config) -> Iterator[Problem]:
    yield from _check_function("reward.function", c.reward.function)


@rule("workflow.function", files=True)
def workflow_function_exists(c: Config) -> Iterator[Problem]:
    if c.workflow.function is not None:
        yield from _check_function("workflow.function", c.workflow.function)


@rule("reward.functions", files=True)
def further_functions_exist(c: Config) -> Iterator[Problem]:
    for number, further in enumerate(c.reward.functions):
        yield from _check_function(f"reward.functions[{number}]", further.function)


@rule("reward.functions", "rollout.max_new_tokens")
def overlong_cache_fits(c: Config) -> Iterator[Problem]:
    for number, further in enumerate(c.reward.functions):
        cache, most = further.kwargs.get("cache"), c.rollout.max_new_tokens
        if further.function == OVERLONG and not (isinstance(cache, int) and 1 <= cache <= most):
            yield Problem(
                f"reward.functions[{number}].kwargs",
                f"cache must be a whole number from 1 to rollout.max_new_tokens = {most} [tokens], got {cache}",
                "the penalty grows over the last `cache` tokens, DAPO's are a fifth of them",
            )


@rule("prepare.function", files=True)
def prepare_function_exists(c: Config) -> Iterator[Problem]:
    if c.prepare is not None:
        yield from _check_function("prepare.function", c.prepare.function)


def _check_function(where: str, text: str) -> Iterator[Problem]:
    """Problem unless `text` names a function of a module or file that can be found; nothing is imported."""
    place, _, name = text.rpartition(":")
    is_file = place.endswith(".py")
    if not name.isidentifier() or not (is_file or re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place)):
        yield Problem(where, f"must look like package.module:function or path/file.py:function, got {text}")
        return
    source = _find_source(place, is_file)
    if source is None:
        hint = "" if is_file else "install it, add its directory to PYTHONPATH, or write path/file.py:function"
        yield Problem(where, f"no such {'file' if is_file else 'module'}: {place}", hint)
    elif source.suffix == ".py":
        yield from _check_defines(where, source, name)


def _find_source(place: str, is_file: bool) -> Path | None:
    """The file of a module; find_spec alone would import the packages above it."""
    if is_file:
        return Path(place) if Path(place).is_file() else None
    top, *inner = place.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ has no spec
        return None
    name = top
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return Path(spec.origin or "namespace package") if spec is not None else None


def _check_defines(where: str, source: Path, name: str) -> Iterator[Problem]:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes
        yield Problem(where, f"{source} is not valid Python: {error}")
        return
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if name not in names and not names & {"*", "__getattr__"}:
        close = difflib.get_close_matches(name, names, n=1)
        yield Problem(where, f"{source} defines no {name}", f"did you mean {close[0]}?" if close else "")
