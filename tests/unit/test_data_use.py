"""From a configuration to prompts: several sources, named held-out sets, what check tells, what a resume compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_hpc import attempt, check, launch, submission
from areal_hpc.checkpoint import Found
from areal_hpc.config import Config
from areal_hpc.config.check import ConfigErrors, check_config
from areal_hpc.config.schema import explain
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.data import DatasetError, Mixture, PromptSource, survey
from areal_hpc.data.reading import read_heldout, read_train
from areal_hpc.doctor.command import data_paths
from areal_hpc.exits import Exit, RunError
from areal_hpc.resuming import SavedRun, differences

BASE: dict[str, Any] = {"model": {"path": "model"}, "reward": {"function": "reward.py:score"}}
RULES = Rules(batch_size=1, group_size=1, steps=9, max_staleness=0)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a reward function and some files of prompts."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "reward.py").write_text("def score(prompt, completion, metadata): return 1.0\n")
    for name, count in (("one", 4), ("two", 6)):
        rows = [{"id": i, "prompt": f"{name} {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "school.jsonl").write_text('{"question": "How many are two pairs?", "answer": "2 * 2\\n#### 4"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**data: Any) -> Config:
    return Config.model_validate({**BASE, "seed": 3, "data": data})


def wrong(**data: Any) -> list[str]:
    """What is said about a configuration, without headline and places."""
    Path("run.yaml").write_text(json.dumps({**BASE, "data": data}))
    with pytest.raises(ConfigErrors) as caught:
        check_config(Path("run.yaml"))
    return [str(problem) for problem in caught.value.problems]


def told(*overrides: str, **data: Any) -> list[str]:
    """Warnings about a usable configuration."""
    Path("run.yaml").write_text(json.dumps({**BASE, "data": data}))
    return [str(problem) for problem in check_config(Path("run.yaml"), overrides).warnings]


# ----------------------------------------------------------------------------------------------------------- reading
def test_a_path_alone_keeps_its_ids() -> None:
    source, bad = read_train(config(train="one.jsonl", shuffle=False, epochs=1))
    assert isinstance(source, PromptSource) and bad == []
    assert [source.next().prompt_id for _ in range(4)] == ["0", "1", "2", "3"]  # type: ignore[union-attr]
    assert list(source.digests()) == ["train"]


def test_sources_are_mixed_under_their_names() -> None:
    train = [{"path": "one.jsonl", "weight": 1}, {"path": "two.jsonl", "weight": 2, "name": "other"}]
    source, _ = read_train(config(train=train, shuffle=False, epochs=1))
    assert isinstance(source, Mixture) and source.num_total == 9
    ids = []
    while (prompt := source.next()) is not None:
        ids.append(prompt.prompt_id)
    assert ids[:6] == ["other/0", "one/0", "other/1", "other/2", "one/1", "other/3"]
    assert list(source.digests()) == ["one", "other"]


def test_held_out_sets_have_names() -> None:
    assert read_heldout(config(train="one.jsonl")) == ({}, [])
    alone, _ = read_heldout(config(train="one.jsonl", heldout="two.jsonl"))
    assert list(alone) == ["heldout"] and alone["heldout"][0].prompt_id == "0"
    sets = [{"path": "school.jsonl", "layout": "gsm8k"}, {"path": "two.jsonl", "name": "easy"}]
    named, _ = read_heldout(config(train="one.jsonl", heldout=sets))
    assert [(name, len(prompts)) for name, prompts in named.items()] == [("school", 1), ("easy", 6)]
    assert named["school"][0].prompt_id == "school/1" and named["easy"][5].prompt_id == "easy/5"


def test_what_is_wrong_with_all_sources_is_said_at_once() -> None:
    Path("one.jsonl").write_text("{}\n")
    Path("two.jsonl").write_text("[3]\n")
    with pytest.raises(DatasetError) as caught:
        read_train(config(train=[{"path": "one.jsonl"}, {"path": "two.jsonl"}, {"path": "none.jsonl"}]))
    assert [line.partition(":")[0] for line in caught.value.problems] == ["one.jsonl", "two.jsonl", "none.jsonl"]


def test_bad_lines_of_all_sources_are_listed() -> None:
    for name in ("one", "two"):
        with open(f"{name}.jsonl", "a") as file:
            file.write("{}\n")
    _, bad = read_train(config(train=[{"path": "one.jsonl"}, {"path": "two.jsonl"}], max_bad_lines=1))
    assert [line.partition(": ")[0] for line in bad] == ["one.jsonl:5", "two.jsonl:7"]
    _, bad = read_heldout(config(train="one.jsonl", heldout="two.jsonl", max_bad_lines=1))
    assert len(bad) == 1


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ({"path": "data/gsm8k-train.jsonl.gz"}, "gsm8k-train"),
        ({"path": "data/MATH-500", "split": "test"}, "MATH-500-test"),
        ({"path": "d/train.parquet", "split": "train"}, "train"),
        ({"path": "reasoning-gym:chain_sum"}, "chain_sum"),
        ({"path": "/a b/\u00fc \u00e4.jsonl"}, "data"),
        ({"path": "x", "name": "y"}, "y"),
    ],
)
def test_the_name_of_a_source(source: dict[str, Any], title: str) -> None:
    assert config(train=[source]).data.train_sources[0].title == title


# ---------------------------------------------------------------------------------------------------- configuration
def test_the_settings_of_a_source_are_checked_one_by_one() -> None:
    found = wrong(train=[{"path": "one.jsonl", "weight": 0}, {"weigth": 2, "layout": "gsm"}, 7, {"path": "two.jsonl"}])
    said = {line.partition(":")[0]: line for line in found}
    assert set(said) == {
        "data.train[0].weight",
        "data.train[1].path",
        "data.train[1].layout",
        "data.train[1].weigth",
        "data.train[2]",
    }
    assert len(found) == 5
    assert said["data.train[0].weight"] == "data.train[0].weight: must be a number greater than 0, got 0"
    assert said["data.train[1].path"].startswith("data.train[1].path: is missing; JSONL, JSON, Parquet or Arrow file")
    assert said["data.train[1].layout"].startswith("data.train[1].layout: must be plain, maths, gsm8k, ")
    assert said["data.train[1].weigth"] == "data.train[1].weigth: unknown setting; did you mean weight?"
    assert said["data.train[2]"].endswith("must be a mapping of settings, got 7; give at least its path")


def test_the_line_of_a_source_is_named() -> None:
    text = "model: {path: model}\nreward: {function: 'reward.py:score'}\ndata:\n  train:\n  - path: one.jsonl\n"
    Path("run.yaml").write_text(text + "  - path: two.jsonl\n    weight: -1\n  - path: none.jsonl\n")
    with pytest.raises(ConfigErrors) as caught:
        check_config(Path("run.yaml"))
    assert caught.value.render().splitlines()[1:] == [
        "  data.train[1].weight: must be a number greater than 0, got -1 (line 7)"
    ], "the rules about data.train wait until it is well-formed"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([], "got a list; name at least one source"),
        ({"path": "one.jsonl"}, "got a mapping; put a dash before it, it is the first of a list"),
        (3, "got 3; put it in quotes"),
    ],
)
def test_neither_a_path_nor_a_list(train: Any, said: str) -> None:
    assert wrong(train=train) == [
        f"data.train: must be one line of text or a list, each item a mapping of settings, {said}"
    ]


def test_half_a_character_is_found_inside_a_source() -> None:
    said = "must be text, got half a character in a list"
    assert wrong(train=[{"path": "one.jsonl"}, {"path": "\ud800"}])[0] == f"data.train: {said}"
    source = {"path": "one.jsonl", "options": {"a": {"b": ["\udc00"]}}}
    assert wrong(train="one.jsonl", heldout=[source])[0] == f"data.heldout: {said}"


def test_rules_about_sources() -> None:
    same = [{"path": "one.jsonl"}, {"path": "./one.jsonl"}]
    assert wrong(train=same) == ["data.train[1].name: one is the name of data.train[0] already; give it another name"]
    assert wrong(train=[{"path": "one.jsonl", "options": {"a": 1}}]) == [
        "data.train[0].options: are for generators; a file has none"
    ]
    assert wrong(train=[{"path": "reasoning-gym:x", "options": {"seed": 1}}]) == [
        "data.train[0].options: seed is a setting of the source; write it as data.train[0].seed"
    ]
    assert told(train="one.jsonl", heldout=[{"path": "./one.jsonl"}, {"path": "two.jsonl"}]) == [
        "data.heldout[0]: is the training file, so it measures memory, not skill"
    ]
    generator = {"path": "reasoning-gym:x", "seed": 1}
    assert len(told(train=[generator], heldout=[generator])) == 1
    assert told(train=[generator], heldout=[{**generator, "seed": 2}]) == []


def test_a_missing_file_says_how_to_get_it() -> None:
    fetch = "fetch it where there is internet, on a login node: `hf download {} --repo-type dataset --local-dir DIR`, "
    then = "and give the path of what it brings"
    assert wrong(train=[{"path": "no.parquet", "layout": "math500"}], heldout="openai/gsm8k") == [
        "data.train[0]: no such file: no.parquet; " + fetch.format("HuggingFaceH4/MATH-500") + then,
        "data.heldout: no such file: openai/gsm8k; " + fetch.format("openai/gsm8k") + then,
    ]


def test_rules_about_the_chat() -> None:
    assert wrong(train="one.jsonl", chat={"few_shot": 1}) == [
        "data.chat.few_shot: needs data.chat.examples; give the path and layout of solved problems"
    ]
    assert wrong(train="one.jsonl", chat={"few_shot": 1, "examples": {"path": "none.jsonl"}})[0].startswith(
        "data.chat.examples: no such file: none.jsonl; "
    )
    assert wrong(train="one.jsonl", chat={"template": "none.jinja"}) == [
        "data.chat.template: must be none, model or a Jinja file; no such file: none.jinja"
    ]
    assert wrong(train="one.jsonl", chat={"template": "model"}) == [
        "data.chat.template: model has no chat template; name a Jinja file, or none"
    ]
    Path("model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert told(train="one.jsonl", chat={"template": "model"}) == []
    Path("model/tokenizer_config.json").unlink()
    Path("model/chat_template.jinja").touch()
    assert told(train="one.jsonl", chat={"template": "model"}) == []
    assert told(train="one.jsonl", chat={"options": {"a": 1}}) == [
        "data.chat.options: have no effect without data.chat.template"
    ]


def test_prompts_that_a_mixture_can_never_give() -> None:
    """Equal weights end with the smaller source: its 4 prompts, and 4 of the other, then perhaps one more."""
    train = [{"path": "one.jsonl"}, {"path": "two.jsonl"}]
    assert told("trainer.batch_size=4", "steps=2", train=train, epochs=1) == []
    assert told("trainer.batch_size=4", "steps=3", train=train, epochs=1) == [
        "steps: the run will end after at most 2 of 3 steps, data set exhausted: at most 9 prompts, 4 per step"
    ]
    Path("list.json").write_text(json.dumps([{"prompt": "p"}] * 3))
    assert told("trainer.batch_size=4", train="list.json", epochs=1) == [], "a list is not counted by its lines"


def test_every_setting_of_a_source_is_explained_once() -> None:
    text = explain()
    assert "\ndata.train[].weight" in text and "data.heldout[]." not in text
    assert "Share of the prompts drawn" in text


def test_the_doctor_looks_for_files_only() -> None:
    sources = [{"path": "one.jsonl"}, {"path": "reasoning-gym:chain_sum"}]
    assert data_paths(config(train=sources, heldout="two.jsonl")) == ["one.jsonl", "two.jsonl"]


# ---------------------------------------------------------------------------------------------------- what check tells
def test_the_survey_shows_sizes_shares_and_the_first_prompt() -> None:
    train = [{"path": "school.jsonl", "layout": "gsm8k", "weight": 3, "instruction": "Box it."}, {"path": "two.jsonl"}]
    assert survey.survey(config(train=train, heldout="one.jsonl", chat={"system": "Be brief."})) == [
        "train school: 1 prompts, layout gsm8k, 75.0% of the prompts",
        "train two: 6 prompts, layout plain, 25.0% of the prompts",
        "heldout: 4 prompts, layout plain",
        "first prompt:",
        "  | Be brief.",
        "  | ",
        "  | How many are two pairs?",
        "  | ",
        "  | Box it.",
    ]


def test_the_survey_cuts_long_prompts_and_long_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("long.jsonl").write_text(json.dumps({"prompt": "word " * 1000}) + "\n" + '{"prompt": "p"}\n' * 5000)
    monkeypatch.setattr(survey, "COUNT_S", 0.0)
    Path("chat.jinja").touch()
    lines = survey.survey(config(train="long.jsonl", chat={"template": "chat.jinja"}))
    assert lines[0] == "train: more than 1,024 prompts, layout plain"
    assert lines[1] == "first prompt (rollout ranks apply template chat.jinja):"
    assert len(lines) == 11 and all(len(line) < 110 for line in lines)
    assert lines[-1] == "  | ... (42 more lines)", "5,000 characters in lines of 100 are 50"


def test_check_refuses_what_does_not_fit_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(json.dumps({**BASE, "data": {"train": [{"path": "one.jsonl", "layout": "gsm8k"}]}}))
    assert check.main(["run.yaml"]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == "" and err == (
        "run.yaml: the data cannot be used\n"
        '  one.jsonl:1: field "question": is missing; layout gsm8k needs question and answer (with ####), '
        "the line has id, prompt\n"
    )


@pytest.mark.parametrize("command", ["run", "submit", "job"])
def test_nothing_starts_with_data_that_does_not_fit(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`run`, `submit` and the beginning of a job say what `check` says, of every source at once."""
    train = [{"path": "one.jsonl", "layout": "gsm8k"}, {"path": "two.jsonl"}]
    data = {"train": train, "heldout": [{"path": "two.jsonl", "layout": "gsm8k", "name": "h"}]}
    Path("run.yaml").write_text(json.dumps({**BASE, "data": data}))
    assert check.main(["run.yaml"]) == Exit.CONFIG
    _, expected = capfd.readouterr()
    assert expected.count("\n") == 3 and "one.jsonl:1" in expected and "two.jsonl:1" in expected
    main = {"run": launch.main, "submit": submission.main, "job": attempt.main}[command]
    assert main(["run.yaml"]) == Exit.CONFIG
    assert capfd.readouterr() == ("", expected)
    assert not Path("runs").exists()


def test_submit_looks_at_no_data_that_lies_elsewhere_and_needs_no_library_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(json.dumps({**BASE, "data": {"train": [{"path": "one.jsonl", "layout": "gsm8k"}]}}))
    assert submission.main(["run.yaml", "--dry-run"]) == Exit.DONE

    def needs_pyarrow(_: Config) -> None:
        raise RunError(Exit.CONFIG, "a Parquet file needs pyarrow")

    monkeypatch.setattr(check, "first_of_each", needs_pyarrow)
    with pytest.raises(RunError, match="needs pyarrow"):
        submission.job_spec(Path("run.yaml"), [])
    submission.job_spec(Path("run.yaml"), ["slurm.python=elsewhere/python"])


def test_an_evaluation_is_not_asked_for_training_prompts() -> None:
    data = {"train": "school.jsonl", "heldout": [{"path": "school.jsonl", "layout": "gsm8k"}]}
    settings = Config.model_validate({**BASE, "data": data, "trainer": {"ranks": 0}})
    assert survey.survey(settings)[0] == "heldout school: 1 prompts, layout gsm8k"


def test_the_survey_leaves_out_what_prepare_will_make() -> None:
    assert survey.survey(config(train="not/yet.jsonl")) == []


# --------------------------------------------------------------------------------------------------------- resuming
def saved_run(place: Path, **state: Any) -> SavedRun:
    path = place / "step_3"
    path.mkdir(exist_ok=True)
    (path / "controller.json").write_text(json.dumps({**ControllerState(RULES).snapshot(), "groups": [], **state}))
    return SavedRun(Found(3, path, 1, {}, {"version": 3}))


def test_a_mixture_is_resumed_where_it_was_and_only_with_the_same_prompts(place: Path) -> None:
    settings = config(train=[{"path": "one.jsonl"}, {"path": "two.jsonl"}])
    source, _ = read_train(settings)
    for _ in range(7):
        source.next()
    saved = saved_run(place, cursor=source.cursor, data=source.digests())
    again, _ = read_train(settings)
    saved.begin(RULES, again)
    assert again.cursor == source.cursor
    assert [again.next() for _ in range(9)] == [source.next() for _ in range(9)]
    lines = Path("two.jsonl").read_text().splitlines(keepends=True)
    Path("two.jsonl").write_text("".join([*lines, '{"prompt": "new"}\n']))
    with pytest.raises(RunError, match="two had 6 prompts then and has 7 now; bring them back") as caught:
        saved.begin(RULES, read_train(settings)[0])
    assert caught.value.code == Exit.CONFIG
    Path("two.jsonl").write_text("".join([*lines[:5], '{"id": 5, "prompt": "another one"}\n']))
    with pytest.raises(RunError, match="two has as many prompts as then, but not the same ones"):
        saved.begin(RULES, read_train(settings)[0])


def test_a_checkpoint_from_before_prompts_were_noted_is_resumed(place: Path) -> None:
    source, _ = read_train(config(train="one.jsonl"))
    saved_run(place, cursor=[1, 2]).begin(RULES, source)
    assert source.cursor == (1, 2)


def test_another_mixture_or_chat_is_another_run() -> None:
    one, two = {"path": "one.jsonl"}, {"path": "two.jsonl"}
    saved = config(train=[one, two]).model_dump(mode="json")
    assert differences(saved, config(train=[one, two])) == []
    assert differences(saved, config(train=[one, {**two, "weight": 2}])) == ["data.train[1].weight was 1.0, is 2.0"]
    assert differences(saved, config(train=[one, two], chat={"system": "x"})) == ["data.chat.system was None, is x"]
    assert differences(saved, config(train="one.jsonl"))[0].startswith("data.train was [{")
    assert differences(config(train="one.jsonl").model_dump(mode="json"), config(train="two.jsonl")) == [
        "data.train was one.jsonl, is two.jsonl"
    ]
    del saved["data"]["chat"]
    assert differences(saved, config(train=[one, two])) == [], "a setting that did not exist then"
