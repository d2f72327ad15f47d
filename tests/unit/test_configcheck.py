"""What is said about a configuration that cannot be used, word by word, and what is let through."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc import check
from areal_hpc.config import Config
from areal_hpc.config.check import ConfigErrors, Problem, check_config
from areal_hpc.config.schema import explain, nearest
from areal_hpc.config.schema import settings as all_settings
from areal_hpc.exits import Exit

GOOD = """\
model: {path: model}
data: {train: train.jsonl}
reward: {function: "reward.py:score"}
"""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    return check_config(path, overrides).config


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with everything that GOOD names: a model, ten prompts, a reward function."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "train.jsonl").write_text('{"prompt": "p"}\n' * 10 + "\n")
    (tmp_path / "reward.py").write_text("import not_installed\ndef score(prompt, completion, metadata): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors(text: str, overrides: Sequence[str] = ()) -> list[str]:
    """The lines about the problems of a file, without headline and lists of legal keys."""
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_config(Path("run.yaml"), overrides)
    assert caught.value.code == Exit.CONFIG
    assert caught.value.reason == caught.value.render()
    rendered, count = caught.value.render().splitlines(), len(caught.value.problems)
    if rendered[0] == f"run.yaml: {count} problem" + "s" * (count > 1):
        return [line.strip() for line in rendered[1 : 1 + count]]
    return rendered


def warnings(text: str, overrides: Sequence[str] = ()) -> list[str]:
    Path("run.yaml").write_text(text)
    return [str(warning) for warning in check_config(Path("run.yaml"), overrides).warnings]


# ------------------------------------------------------------------------------------------------------ good files
def test_a_good_file_is_the_configuration_as_written() -> None:
    Path("run.yaml").write_text(GOOD + "mode: sync\n")
    config = load_config(Path("run.yaml"), ["trainer.optimizer.lr=1e-6", "rollout.slots=3"])
    expected = {
        **yaml.safe_load(GOOD),
        "mode": "sync",
        "trainer": {"optimizer": {"lr": 1e-6}},
        "rollout": {"slots": 3},
    }
    assert config == Config.model_validate(expected)
    assert config.staleness.max_staleness == 4, "not resolved by mode"
    assert warnings(GOOD) == []


def test_anchors_and_merge_keys_work() -> None:
    text = "data: &d {train: train.jsonl}\nmodel: {path: &m model}\nreward: {function: reward.py:score}\n"
    assert warnings(text + "prepare: null\nevaluation: &e {samples: 2}\n") == []
    Path("run.yaml").write_text("x: &x {samples: 2}\nevaluation: {<<: *x, samples: 3}\n" + GOOD)
    with pytest.raises(ConfigErrors) as caught:
        load_config(Path("run.yaml"))
    assert [p.where for p in caught.value.problems] == ["x"]
    assert errors(GOOD + "evaluation: {<<: {1: 2}}\n") == ["evaluation.1: unknown setting (line 4)"]


def test_an_override_changes_one_of_two_sections_that_share_an_anchor() -> None:
    Path("run.yaml").write_text(GOOD + "trainer: &a {ranks: 2}\nrollout: *a\n")
    config = load_config(Path("run.yaml"), ["trainer.ranks=3"])
    assert (config.trainer.ranks, config.rollout.ranks) == (3, 2)


@pytest.mark.parametrize("path", ["my runs/run 1", "/tmp/a b c", "r\u00fcn"])
def test_a_path_with_spaces_is_fine(path: str) -> None:
    assert warnings(GOOD + f"run_dir: {path}\n") == []


@pytest.mark.parametrize(
    "lines",
    [
        "mode: async\nstaleness: {max_staleness: 0}",
        "trainer: {objective: {cap_mode: clamp}}",
        "trainer: {batch_size: 100}\nstaleness: {max_running_groups: 1}",
        "trainer: {group_size: 16}\nrollout: {slots: 1}",
        "trainer: {group_size: 1, advantage: {group_norm: none}}",
        "evaluation: {at_start: true, at_end: true}",
        "trainer: {micro_batch_tokens: 2048}\nrollout: {max_prompt_tokens: 1000, max_new_tokens: 1048}",
        "trainer: {minibatches: 6, batch_size: 3, group_size: 2}",
        "filter: {min_success: 0.5, max_success: 0.5}",
        "trainer: {batch_size: 11}",  # without epochs a batch may span the file
    ],
)
def test_legal_if_unusual(lines: str) -> None:
    assert warnings(GOOD + lines) == []


# ---------------------------------------------------------------------------------------------- one field, one line
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("steps: 0", "steps: must be a whole number greater than 0 [policy versions], got 0 (line 4)"),
        ("steps: true", "steps: must be a whole number greater than 0 [policy versions], got true (line 4)"),
        ("steps: many", 'steps: must be a whole number greater than 0 [policy versions], got "many" (line 4)'),
        (
            "steps: 1e3",
            'steps: must be a whole number greater than 0 [policy versions], got "1e3"; write 1000 (line 4)',
        ),
        ("steps: 2.5", "steps: must be a whole number greater than 0 [policy versions], got 2.5 (line 4)"),
        ("steps: .inf", "steps: must be a whole number greater than 0 [policy versions], got .inf (line 4)"),
        ("steps: [1]", "steps: must be a whole number greater than 0 [policy versions], got a list (line 4)"),
        (
            "steps:",
            "steps: must be a whole number greater than 0 [policy versions], got null; "
            "delete the line for the default, 1000 (line 4)",
        ),
        ("steps: 9223372036854775808", "steps: must be at most 2^63 - 1, got 9223372036854775808 (line 4)"),
        ("steps: " + "9" * 400, "steps: must be at most 2^63 - 1, got a number of about 400 digits (line 4)"),
        ("seed: -1", "seed: must be a whole number of at least 0 and less than 2147483648, got -1 (line 4)"),
        ("mode: asynch", 'mode: must be async, overlap or sync, got "asynch" (line 4)'),
        (
            "name: 2024-01-01",
            "name: must be one line of text of at most 64 characters matching ^[A-Za-z0-9][A-Za-z0-9._-]*$, "
            "got the date 2024-01-01; put it in quotes (line 4)",
        ),
        (
            "name: my run",
            "name: must be one line of text of at most 64 characters matching ^[A-Za-z0-9][A-Za-z0-9._-]*$, "
            'got "my run"; Name of the run: letters, digits, dot, dash, underscore. (line 4)',
        ),
        ('run_dir: "a\\nb"', 'run_dir: must be one line of text, got "a\\nb" (line 4)'),
        ('run_dir: "\\ud800"', 'run_dir: must be text, got half a character in "\\ud800" (line 4)'),
        ("run_dir: 7", "run_dir: must be one line of text, got 7; put it in quotes (line 4)"),
        ("trainer: [1]", "trainer: must be a mapping of settings, got a list (line 4)"),
        (
            "trainer:",
            "trainer: must be a mapping of settings, got null; "
            "indent its settings under it, or delete the line (line 4)",
        ),
        ("prepare: x", 'prepare: must be a mapping of settings or null, got "x" (line 4)'),
        (
            "trainer:\n  optimizer:\n    lr: .nan",
            "trainer.optimizer.lr: must be a number greater than 0, got .nan (line 6)",
        ),
        (
            "trainer:\n  optimizer: {lr: -1e-6}",
            'trainer.optimizer.lr: must be a number greater than 0, got "-1e-6" (line 5)',
        ),
        (
            "trainer: {batch_size: -3}",
            "trainer.batch_size: must be a whole number greater than 0 [prompts], got -3 (line 4)",
        ),
        (
            "staleness: {max_staleness: .inf}",
            "staleness.max_staleness: must be a whole number of at least 0 or inf [versions], got .inf; "
            "write inf without the dot (line 4)",
        ),
        (
            "staleness: {max_staleness: -1}",
            "staleness.max_staleness: must be a whole number of at least 0 or inf [versions], got -1 (line 4)",
        ),
        (
            "filter: {min_success: 1.5}",
            "filter.min_success: must be a number of at least 0 and at most 1, got 1.5 (line 4)",
        ),
        ("rollout: {interrupt: maybe}", 'rollout.interrupt: must be true or false, got "maybe" (line 4)'),
        (
            "deadlines: {step_s: 0}",
            "deadlines.step_s: must be a number greater than 0 [s], got 0 (line 4)",
        ),
        ("steps: 3\nsteps: 4", "steps: is given twice, first in line 4 (line 5)"),
        ("log: {tokens: true, tokens: true}", "log.tokens: is given twice, first in line 4 (line 4)"),
    ],
)
def test_one_wrong_value_is_one_line(line: str, said: str) -> None:
    assert errors(GOOD + line + "\n") == [said]


@pytest.mark.parametrize(
    "value", ["'" + "x" * 10_000 + "'", "1" * 4000, "&a [*a]", "!!binary aGFsbG8=", "!!set {a, b}"]
)
def test_whatever_is_written_gives_one_short_line(value: str) -> None:
    (said,) = errors(GOOD + f"steps: {value}\n")
    assert said.startswith("steps: must be ") and len(said) < 160


def test_an_empty_file_lacks_what_is_required() -> None:
    assert errors("") == [
        "model.path: is missing; Directory of the model in Hugging Face layout (config, safetensors, tokenizer).",
        "data.train: is missing; Training prompts: path of a file whose rows have at least the prompt field, "
        "or a list of sources with weights.",
        "reward.function: is missing; `package.module:function` or `/path/file.py:function` of "
        "(prompt, completion, metadata) -> reward.",
    ]


def test_an_empty_section_lacks_it_too() -> None:
    assert [line.partition(":")[0] for line in errors(GOOD + "prepare: {}\n")] == [
        "prepare.function",
        "prepare.directory",
    ]


# ------------------------------------------------------------------------------------------------------ unknown keys
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr: 1", "lr: unknown setting; did you mean trainer.optimizer.lr? (line 4)"),
        ("trainer: {batchsize: 1}", "trainer.batchsize: unknown setting; did you mean trainer.batch_size? (line 4)"),
        ("optimizer: {lr: 1}", "optimizer: unknown setting; did you mean trainer.optimizer? (line 4)"),
        ("qqq: 1", "qqq: unknown setting (line 4)"),
        ("on: 1", "on: unknown setting (line 4)"),  # true, for YAML 1.1
        ("1: 1", "1: unknown setting (line 4)"),
        ("null: 1", "null: unknown setting (line 4)"),
        ('"": 1', '"": unknown setting'),
        ('"a\\nb": 1', '"a\\nb": unknown setting'),
        ("trainer.ranks: 2", "trainer.ranks: is no key of a file; write ranks indented under trainer (line 4)"),
    ],
)
def test_an_unknown_key_offers_the_nearest_names(line: str, said: str) -> None:
    assert errors(GOOD + line + "\n") == [said]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("optimizer.lr", "trainer.optimizer.lr"),
        ("trainer.batch-size", "trainer.batch_size"),
        ("Trainer", "trainer"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("max_stalenes", "staleness.max_staleness"),
        ("learning_rate", "trainer.optimizer.lr"),  # begins its documentation
        ("eta", "staleness.max_staleness"),
    ],
)
def test_the_nearest_name_comes_first(written: str, meant: str) -> None:
    assert nearest(written)[0] == meant


def test_legal_keys_are_listed_once_per_section() -> None:
    Path("run.yaml").write_text(GOOD + "log: {a: 1, b: 2}\nevaluation: {c: 3}\nd: 4\n")
    with pytest.raises(ConfigErrors) as caught:
        load_config(Path("run.yaml"))
    rendered = caught.value.render()
    assert rendered.count("  log takes: tokens=false\n") == 1
    assert (
        rendered.count(
            "  evaluation takes: samples=1, temperature=null, every=null, share=0.25, at_start=true, at_end=true\n"
        )
        == 1
    )
    assert rendered.count("  the top level takes: name=run, run_dir=runs/run, seed=0, steps=1000, mode=async, ") == 1


# ------------------------------------------------------------------------------------------------------ all at once
def test_everything_wrong_is_said_at_once_in_the_order_of_the_file() -> None:
    text = """\
run_dir: train.jsonl
lr: 3
trainer:
  group_size: 1
  batch_size: -3
  minibatches: 99999
filter: {max_success: 0.1, min_success: 0.9}
model: {path: model}
data: {train: nowhere.jsonl}
rollout:
  ranks: two
"""
    found = [line.partition(":")[0] for line in errors(text, ["steps=-1", "foo"])]
    # minibatches is measured against the broken batch_size, so nothing is said about it
    assert found == [
        "run_dir",
        "lr",
        "trainer.group_size",
        "trainer.batch_size",
        "filter.min_success",
        "data.train",
        "rollout.ranks",
        "steps",
        "reward.function",
        "foo",
    ]


def test_a_broken_section_silences_the_rules_about_it_and_only_those() -> None:
    text = GOOD + "rollout: [1]\ntrainer: {micro_batch_tokens: 1, group_size: 1}\n"
    assert [line.partition(":")[0] for line in errors(text)] == ["rollout", "trainer.group_size"]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_yaml_is_answered_without_a_traceback(data: st.DataObject) -> None:
    """Every setting broken at random with any YAML value: all broken ones are named, each once."""
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(),
        st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    )  # fmt: skip
    names = data.draw(st.lists(st.sampled_from([*all_settings(), "trainer.x", "y"]), max_size=6, unique=True))
    tree: dict[str, Any] = yaml.safe_load(GOOD)
    for name in names:
        *above, leaf = name.split(".")
        node: Any = tree
        for part in above:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[leaf] = data.draw(odd)
    Path("run.yaml").write_text(yaml.safe_dump(tree, allow_unicode=False))
    try:
        load_config(Path("run.yaml"))
    except ConfigErrors as error:
        places = [problem.where for problem in error.problems]
        assert len(places) == len(set(places))
        assert error.render().isprintable() or "\n" in error.render()
    else:
        Config.model_validate(tree)


# ------------------------------------------------------------------------------------------------------ no YAML
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: 1\nb: [1, 2\nc: d: e\n",
            ["run.yaml:3:2: while parsing a flow sequence, expected ',' or ']', but got ':'", "    c: d: e", "     ^"],
        ),
        (
            "trainer:\n\tranks: 2\n",
            [
                "run.yaml:2:1: while scanning for the next token, found character '\\t' that cannot start any token; "
                "indent with spaces, YAML takes no tabs",
                "     ranks: 2",
                "    ^",
            ],
        ),
        ("a: b: c\n", ["run.yaml:1:5: mapping values are not allowed here", "    a: b: c", "        ^"]),
        ("a: *nowhere\n", ["run.yaml:1:4: found undefined alias 'nowhere'", "    a: *nowhere", "       ^"]),
        ("[1, 2]\n", ["run.yaml: must be a mapping of settings, got a list"]),
        ("just text\n", ['run.yaml: must be a mapping of settings, got "just text"']),
        ("steps: 2024-99-99\n", ["run.yaml: cannot be read as YAML: month must be in 1..12"]),
    ],
)
def test_what_is_no_yaml(text: str, said: list[str]) -> None:
    assert errors(text)[: len(said)] == said


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object:os.system {}\n",
        "a: 1\n---\nb: 2\n",
        "[" * 600,
        "a: " + "9" * 5000,
        "? [1]\n: 2\n",
        "a: \x00\n",
    ],
)
def test_hostile_yaml_is_refused_in_a_line(text: str) -> None:
    assert errors(text)[0].startswith("run.yaml")


def test_bytes_that_are_no_utf8() -> None:
    Path("run.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigErrors, match="run.yaml: is no YAML text: .*invalid start byte"):
        load_config(Path("run.yaml"))


def test_no_such_file_and_a_directory() -> None:
    for name, reason in (("none.yaml", "No such file or directory"), ("model", "Is a directory")):
        with pytest.raises(ConfigErrors) as caught:
            load_config(Path(name))
        assert caught.value.render() == f"{name}: cannot be read: {reason}"


# ------------------------------------------------------------------------------------------------------ overrides
@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("steps=3", lambda c: c.steps, 3),
        (" steps =3", lambda c: c.steps, 3),
        ("trainer.optimizer.lr=1e-6", lambda c: c.trainer.optimizer.lr, 1e-6),
        ("trainer={batch_size: 2, ranks: 3}", lambda c: (c.trainer.batch_size, c.trainer.ranks), (2, 3)),
        ("log.tokens=yes", lambda c: c.log.tokens, True),
        ("data.heldout=", lambda c: c.data.heldout, None),
        ("data.heldout=null", lambda c: c.data.heldout, None),
        ("name=2024", lambda c: c.name, "2024"),
        ("name=007", lambda c: c.name, "007"),
        ("name=2024-01-01", lambda c: c.name, "2024-01-01"),
        ("name=1e3", lambda c: c.name, "1e3"),
        ("run_dir=a=b c", lambda c: c.run_dir, "a=b c"),
        ("staleness.max_staleness=inf", lambda c: c.staleness.max_staleness, "inf"),
    ],
)
def test_an_override_is_yaml(override: str, read: Callable[[Config], Any], value: Any) -> None:
    Path("run.yaml").write_text(GOOD + "steps: 9\nlog:\n")
    assert read(load_config(Path("run.yaml"), ["log={}", override])) == value


def test_the_last_override_wins_and_mends_the_file() -> None:
    Path("run.yaml").write_text(GOOD + "steps: -1\n")
    assert load_config(Path("run.yaml"), ["steps=-2", "steps=5"]).steps == 5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "steps: is no override, the form is a.b=value; for instance steps=VALUE"),
        ("--lr", "--lr: is no override, the form is a.b=value; for instance trainer.optimizer.lr=VALUE"),
        ("=3", "=3: is no override, the form is a.b=value; for instance trainer.batch_size=VALUE"),
        ("lr=3", "lr: unknown setting; did you mean trainer.optimizer.lr?"),
        ("trainer.lr=3", "trainer.lr: unknown setting; did you mean trainer.optimizer.lr?"),
        ("steps.x=3", "steps.x: unknown setting"),
        ("steps=[", "steps=[: the value is no YAML: expected the node content, but found '<stream end>'; "
                    "quote text that has special characters"),
        ("steps=0", "steps: must be a whole number greater than 0 [policy versions], got 0 (command line)"),
        ("log={tokens: true, tokens: no}", "log={tokens: true, tokens: no}: gives tokens twice"),
        ("model.path=", "model.path: must be one line of text, got null (command line)"),
    ],
)  # fmt: skip
def test_what_is_no_override(override: str, said: str) -> None:
    assert errors(GOOD, [override]) == [said]


def test_an_override_does_not_hide_a_broken_section() -> None:
    assert errors(GOOD + "trainer: 3\n", ["trainer.ranks=2"]) == [
        "trainer: must be a mapping of settings, got 3 (line 4)"
    ]


# ---------------------------------------------------------------------------------------------- rules over numbers
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "trainer: {group_size: 1}",
            "trainer.group_size: a group of one answer has no spread, so trainer.advantage.group_norm = mean_std makes "
            "every advantage 0; set trainer.group_size to 2 or more, or group_norm to none (line 4)",
        ),
        (
            "trainer: {micro_batch_tokens: 2047}\nrollout: {max_prompt_tokens: 1000, max_new_tokens: 1048}",
            "trainer.micro_batch_tokens: must hold the longest sequence, rollout.max_prompt_tokens + "
            "rollout.max_new_tokens = 1000 + 1048 = 2048 [tokens], got 2047 (line 4)",
        ),
        (
            "trainer: {minibatches: 7, batch_size: 3, group_size: 2}",
            "trainer.minibatches: must be at most batch_size * group_size = 6 [answers in a batch], got 7 (line 4)",
        ),
        (
            "filter: {min_success: 0.6, max_success: 0.5}",
            "filter.min_success: must be at most filter.max_success = 0.5, got 0.6: every group would be rejected "
            "(line 4)",
        ),
        (
            "trainer: {objective: {kind: naive, weight_cap: 5}}",
            "trainer.objective.weight_cap: the naive objective has no behaviour weight to cap; "
            "delete weight_cap or set trainer.objective.kind to decoupled (line 4)",
        ),
    ],
)
def test_rules_over_numbers(lines: str, said: str) -> None:
    assert errors(GOOD + lines) == [said]


def test_prompt_and_id_are_two_fields() -> None:
    assert errors(GOOD, ["data.id_field=prompt"]) == [
        'data.id_field: must not be the prompt field too, got "prompt" (command line)'
    ]


def test_settings_that_the_mode_overrules_are_pointed_out() -> None:
    written = GOOD + "mode: overlap\nstaleness: {max_staleness: 4}\nrollout: {interrupt: true}\n"
    assert warnings(written) == [
        "staleness.max_staleness: 4 has no effect, mode overlap sets it to 1",
        "rollout.interrupt: true has no effect, mode overlap does not interrupt",
    ]
    assert warnings(GOOD + "mode: sync\n") == [], "defaults are nobody's wish"
    assert warnings(GOOD + "mode: overlap\nstaleness: {max_staleness: 1}\nrollout: {interrupt: false}\n") == []


# ------------------------------------------------------------------------------------------- rules over the prompts
def test_a_batch_that_can_never_be_full_is_an_error() -> None:
    """Ten prompts, twice, are twenty; a blank line is none."""
    assert warnings(GOOD + "steps: 1\n", ["data.epochs=2", "trainer.batch_size=20"]) == []
    assert errors(GOOD, ["data.epochs=2", "trainer.batch_size=21"]) == [
        "trainer.batch_size: no batch of 21 prompts will ever be full: train.jsonl holds 10, data.epochs = 2; "
        "set trainer.batch_size to at most 20 or raise data.epochs (command line)"
    ]


def test_steps_that_the_data_cannot_feed_are_a_warning() -> None:
    assert warnings(GOOD + "steps: 6\n", ["data.epochs=2", "trainer.batch_size=3"]) == []
    assert warnings(GOOD + "steps: 7\n", ["data.epochs=2", "trainer.batch_size=3"]) == [
        "steps: the run will end after at most 6 of 7 steps, data set exhausted: 2 x 10 prompts, 3 per step"
    ]


def test_gzip_prompts_are_counted_too() -> None:
    Path("train.jsonl").write_bytes(gzip.compress(b"{}\n" * 7))
    assert "holds 7" in errors(GOOD, ["data.epochs=1", "trainer.batch_size=8"])[0]


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"\n", mtime=0)])
def test_a_file_without_prompts(content: bytes) -> None:
    Path("train.jsonl").write_bytes(content)
    assert errors(GOOD, ["data.epochs=1"]) == ["data.train: train.jsonl holds no prompt (line 2)"]


def test_a_damaged_gzip_file() -> None:
    Path("train.jsonl").write_bytes(b"\x1f\x8bgarbage")
    assert errors(GOOD)[0].startswith("data.train: train.jsonl cannot be read: ")


# ---------------------------------------------------------------------------------------------- rules over files
def test_missing_files_say_what_to_do() -> None:
    Path("empty").mkdir()
    found = errors(GOOD, ["model.path=Qwen/Qwen3-1.7B", "data.train=nowhere", "data.heldout=empty"])
    assert found == [
        "model.path: no such directory: Qwen/Qwen3-1.7B; download the model beforehand where there is internet "
        "(`hf download NAME --local-dir DIR`), or let `prepare` make it (command line)",
        "data.train: no such file: nowhere; give the path of a JSONL, JSON, Parquet or Arrow file or a directory of "
        "them, or let `prepare` make it (command line)",
        "data.heldout: empty holds no JSONL, JSON, Parquet or Arrow file (command line)",
    ]


def test_prepare_may_make_what_lies_in_its_directory_and_nothing_else() -> None:
    prepare = "prepare: {function: reward.py:score, directory: made}\n"
    inside = ["model.path=made/model", "data.train=made/x/t.jsonl", "data.heldout=made/h.jsonl", "data.epochs=1"]
    assert warnings(GOOD + prepare, inside) == []
    assert [line.partition(":")[0] for line in errors(GOOD + prepare, ["model.path=mad", "data.train=made/../t"])] == [
        "model.path",
        "data.train",
    ]


def test_an_incomplete_model_names_what_it_lacks() -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        Path("model", name).unlink()
    assert errors(GOOD) == [
        "model.path: model is no Hugging Face model, it lacks weights (*.safetensors), tokenizer (tokenizer*) (line 1)"
    ]


def test_training_on_the_held_out_prompts_is_pointed_out() -> None:
    assert warnings(GOOD, ["data.heldout=./train.jsonl"]) == [
        "data.heldout: is the training file, so it measures memory, not skill"
    ]


def test_run_dir_that_cannot_be_a_directory(place: Path) -> None:
    Path("runs").mkdir()
    assert warnings(GOOD) == []
    for run_dir in ("train.jsonl", "train.jsonl/a/b"):
        assert errors(GOOD, [f"run_dir={run_dir}"]) == [
            f"run_dir: {run_dir} cannot be a directory, {place}/train.jsonl exists and is none; name another one "
            "(command line)"
        ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_dir_where_one_may_not_write() -> None:
    Path("shut").mkdir(mode=0o500)
    assert "you may not write in" in errors(GOOD, ["run_dir=shut/run"])[0]


def test_a_path_that_the_system_refuses_is_a_problem_not_a_traceback() -> None:
    (said,) = errors(GOOD, ["model.path=" + "x" * 5000])
    assert said.startswith("model.path: cannot be checked: ") and "File name too long" in said


# ---------------------------------------------------------------------------------------------- rules over functions
@pytest.mark.parametrize("function", ["reward.py:score", "./reward.py:score", "json.decoder:JSONDecoder", "json:loads"])
def test_functions_that_exist(function: str) -> None:
    assert warnings(GOOD, [f"reward.function={function}"]) == []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("score", "must look like package.module:function or path/file.py:function, got score"),
        ("reward.py", "must look like package.module:function or path/file.py:function, got reward.py"),
        ("reward.py:", "must look like package.module:function or path/file.py:function, got reward.py:"),
        ("a b:f", "must look like package.module:function or path/file.py:function, got a b:f"),
        ("pkg..mod:f", "must look like package.module:function or path/file.py:function, got pkg..mod:f"),
        ("reward.py:scor", "reward.py defines no scor; did you mean score?"),
        ("none.py:score", "no such file: none.py"),
        ("model.py:score", "no such file: model.py"),
        ("broken.py:score", "broken.py is not valid Python: "),
        (
            "json.none:f",
            "no such module: json.none; install it, add its directory to PYTHONPATH, or write path/file.py",
        ),
        ("json.decoder.x:f", "no such module: json.decoder.x; install it"),
        ("not_installed:f", "no such module: not_installed; install it"),
        ("__main__.x:f", "no such module: __main__.x"),
    ],
)
def test_functions_that_do_not(function: str, said: str) -> None:
    Path("broken.py").write_text("def score(:\n")
    (found,) = errors(GOOD, [f'reward.function="{function}"'])
    assert found.startswith(f"reward.function: {said}")


def test_the_prepare_function_is_checked_too() -> None:
    (found,) = errors(GOOD + "prepare: {function: reward.py:make, directory: d}\n")
    assert found == "prepare.function: reward.py defines no make (line 4)"


def test_the_workflow_is_checked_too_and_needs_an_engine_that_writes() -> None:
    (found,) = errors(GOOD, ["workflow.function=reward.py:talk"])
    assert found.startswith("workflow.function: reward.py defines no talk")
    assert warnings(GOOD, ["workflow.function=areal_hpc.workflows.python_tool:workflow"]) == []
    simulated = ["rollout.engine=simulated", "trainer.engine=simulated", "workflow.function=reward.py:score"]
    (found,) = errors(GOOD, simulated)
    assert found.startswith("workflow.function: cannot be used with rollout.engine = simulated")
    assert warnings(GOOD + "workflow: {discount: 0.5}\n") == ["workflow: has no effect without workflow.function"]


def test_checking_a_function_runs_none_of_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path("lib/heavy")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "rewards.py").write_text("raise SystemExit('imported')\nfrom elsewhere import judge as score\n")
    monkeypatch.syspath_prepend("lib")
    assert warnings(GOOD, ["reward.function=heavy.rewards:score"]) == []
    assert "defines no judge" in errors(GOOD, ["reward.function=heavy.rewards:judge"])[0]


# ------------------------------------------------------------------------------------------------------ the command
def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = check.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_on_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "name: gcd\nsteps: 40\ntrainer: {batch_size: 32, group_size: 8}\n")
    argv = ["run.yaml", "mode=sync", "rollout.ranks=2", "data.epochs=9", "rollout.interrupt=true"]
    assert run(capsys, *argv) == (
        0,
        """\
run.yaml is fine
  run      gcd in runs/run
  mode     sync: max_staleness 0, new weights wait for running sequences
  ranks    4 = 1 controller + 1 trainer + 2 rollout
  batch    32 prompts x 8 answers of at most 2,048 tokens = at most 524,288 tokens
  length   40 steps = policy versions, or the end of data.epochs = 9
  warning  steps: the run will end after at most 2 of 40 steps, data set exhausted: 9 x 10 prompts, 32 per step
  warning  rollout.interrupt: true has no effect, mode sync does not interrupt
  data     train: 10 prompts, layout plain
           first prompt:
             | p
""",
        "",
    )


def test_the_command_without_limit_of_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    _, out, _ = run(capsys, "run.yaml", "staleness.max_staleness=inf")
    assert "  mode     async: no limit of staleness, new weights interrupt generation\n" in out


def test_the_command_on_a_bad_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    assert run(capsys, "run.yaml", "steps=0", "log.x=1") == (
        Exit.CONFIG,
        "",
        """\
run.yaml: 2 problems
  steps: must be a whole number greater than 0 [policy versions], got 0 (command line)
  log.x: unknown setting
  log takes: tokens=false
""",
    )


def test_the_command_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "") and "name a configuration file" in err


def test_explain_names_every_setting_with_default_unit_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--explain")
    assert (code, out, err) == (0, explain() + "\n", "")
    assert (
        "trainer.batch_size                512            a whole number greater than 0 [prompts]\n    Prompt groups"
        in out
    )
    assert "model.path                        (required)     one line of text\n    Directory of the model" in out
    for setting in all_settings().values():
        assert setting.name in out and setting.doc in out


def test_problem_as_text() -> None:
    assert str(Problem("a.b", "is odd")) == "a.b: is odd"
    assert str(Problem("a.b", "is odd", "mend it")) == "a.b: is odd; mend it"
