"""What the configuration accepts, what it refuses, and what it comes to."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from areal_hpc.config import Config, load_resolved
from areal_hpc.config.types import Section

REQUIRED: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "reward": {"function": "pkg.mod:score"},
}


def build(**sections: Any) -> Config:
    """A configuration with the required fields, and `sections` merged over them."""
    data = {key: {**value, **sections.pop(key, {})} for key, value in REQUIRED.items()}
    return Config.model_validate({**data, **sections})


def refused(**sections: Any) -> set[str]:
    with pytest.raises(ValidationError) as caught:
        build(**sections)
    return {
        str(error["loc"][0]) + "." + str(error["loc"][1]) if len(error["loc"]) > 1 else str(error["loc"][0])
        for error in caught.value.errors()
    }


@pytest.mark.parametrize("section", Section.__subclasses__(), ids=lambda s: s.__name__)
def test_every_field_is_documented(section: type[Section]) -> None:
    assert section.model_fields
    for name, field in section.model_fields.items():
        assert field.description and field.description.rstrip().endswith("."), f"{section.__name__}.{name}"


def test_only_model_data_and_reward_have_to_be_given() -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({})
    assert {error["loc"] for error in caught.value.errors()} == {("model",), ("data",), ("reward",)}


# ------------------------------------------------------------------------------------------------------ numbers
@pytest.mark.parametrize(("written", "meant"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("2", 2.0), (3, 3.0), (0.5, 0.5)])
def test_a_number_may_be_written_as_text(written: Any, meant: float) -> None:
    """YAML 1.1 reads 1e-6, without a dot, as text."""
    assert build(trainer={"optimizer": {"lr": written}}).trainer.optimizer.lr == meant


def test_yaml_really_reads_it_as_text() -> None:
    assert yaml.safe_load("lr: 1e-6") == {"lr": "1e-6"}


@pytest.mark.parametrize(
    "value", [True, False, math.nan, math.inf, -math.inf, "nan", "inf", "abc", "", None, [1], {}, -1, 0, 10**400]
)
def test_what_is_no_learning_rate(value: Any) -> None:
    assert refused(trainer={"optimizer": {"lr": value}}) == {"trainer.optimizer"}


@pytest.mark.parametrize("value", [True, math.nan, math.inf, "abc", None, [1], {}, -1, 0, 1.5, "1.5"])
def test_what_is_no_count(value: Any) -> None:
    assert refused(trainer={"batch_size": value}) == {"trainer.batch_size"}


@pytest.mark.parametrize(("value", "eta"), [(0, 0.0), (4, 4.0), ("7", 7.0), ("inf", math.inf)])
def test_max_staleness(value: Any, eta: float) -> None:
    assert build(staleness={"max_staleness": value}).staleness.eta == eta


@pytest.mark.parametrize("value", [-1, 1.5, True, "infinite", math.inf, None])
def test_what_is_no_max_staleness(value: Any) -> None:
    assert refused(staleness={"max_staleness": value}) == {"staleness.max_staleness"}


@pytest.mark.parametrize(("value", "meant"), [(True, True), ("false", False), ("yes", True)])
def test_a_switch_may_be_written_as_text(value: Any, meant: bool) -> None:
    assert build(rollout={"interrupt": value}).rollout.interrupt is meant


@pytest.mark.parametrize("value", ["maybe", 2, None, [True]])
def test_what_is_no_switch(value: Any) -> None:
    assert refused(rollout={"interrupt": value}) == {"rollout.interrupt"}


def test_seed_fits_every_generator() -> None:
    assert build(seed=2**31 - 1).seed == 2**31 - 1
    assert refused(seed=2**31) == {"seed"}
    assert refused(seed=-1) == {"seed"}


# --------------------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("path", ["my runs/run 1", "/scratch/\u00fcser/r", "a:b", "-"])
def test_paths_with_spaces_and_accents_are_fine(path: str) -> None:
    assert build(run_dir=path).run_dir == path


@pytest.mark.parametrize("path", ["a\nb", "a\n", "\t", "", "  ", "a\x00b", "a\x1b[31m", 3, None])
def test_what_is_no_path(path: Any) -> None:
    assert refused(run_dir=path) == {"run_dir"}


@pytest.mark.parametrize("name", ["run", "a.b-c_1", "7", "x" * 64])
def test_names(name: str) -> None:
    assert build(name=name).name == name


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "../a", "x" * 65, "r\u00fcn", "run\n", 7])
def test_what_is_no_name(name: Any) -> None:
    assert refused(name=name) == {"name"}


# ------------------------------------------------------------------------------------------------- whole sections
def test_unknown_keys_are_errors_everywhere() -> None:
    assert refused(lr=1) == {"lr"}
    assert refused(trainer={"lr": 1}) == {"trainer.lr"}


@pytest.mark.parametrize("value", [None, [1], "text", 3])
def test_a_section_must_be_a_mapping(value: Any) -> None:
    assert refused(trainer=value) == {"trainer"}


def test_only_prepare_may_be_null() -> None:
    assert build(prepare=None).prepare is None


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        build().trainer.batch_size = 3  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- what it comes to
@pytest.mark.parametrize(
    ("mode", "eta", "interrupt", "expected"),
    [
        ("async", 4, True, (4, True)),
        ("async", 0, True, (0, True)),
        ("async", "inf", False, ("inf", False)),
        ("overlap", 4, True, (1, False)),
        ("overlap", 0, False, (1, False)),
        ("sync", 4, True, (0, False)),
        ("sync", "inf", False, (0, False)),
    ],
)
def test_a_mode_is_a_few_settings(mode: str, eta: Any, interrupt: bool, expected: tuple[Any, bool]) -> None:
    written = build(
        mode=mode, staleness={"max_staleness": eta, "order": "admission"}, rollout={"interrupt": interrupt, "slots": 3}
    )
    resolved = written.resolved()
    assert (resolved.staleness.max_staleness, resolved.rollout.interrupt) == expected
    assert resolved.staleness.order == ("strict" if mode == "overlap" else "admission"), "overlap is one step, not two"
    assert resolved.rollout.slots == 3
    assert (written.staleness.max_staleness, written.rollout.interrupt) == (eta, interrupt)
    assert resolved.resolved() == resolved


def test_world_size_and_longest_sequence() -> None:
    config = build(trainer={"ranks": 2}, rollout={"ranks": 5, "max_prompt_tokens": 30, "max_new_tokens": 70})
    assert config.world_size == 8
    assert config.max_sequence_tokens == 100


def test_the_copy_in_the_run_directory_is_the_same_configuration(tmp_path: Path) -> None:
    config = build(
        name="x",
        run_dir="d\u00e4ta/my run: 1",
        staleness={"max_staleness": "inf"},
        trainer={"optimizer": {"lr": "1e-6"}, "objective": {"weight_cap": 5}},
        prepare={"function": "a:b", "directory": "null"},
    ).resolved()
    (tmp_path / "config.resolved.yaml").write_text(config.to_yaml(), encoding="utf-8")
    again = load_resolved(tmp_path / "config.resolved.yaml")
    assert again == config
    assert again.fingerprint() == config.fingerprint()


def test_the_fingerprint_sees_every_value_but_not_how_it_was_written() -> None:
    base = build()
    assert build(trainer={"optimizer": {"lr": "2e-5"}}).fingerprint() == base.fingerprint()
    changed = [
        build(seed=1),
        build(run_dir="runs/other"),
        build(model={"path": "n"}),
        build(trainer={"optimizer": {"lr": 2.1e-5}}),
        build(staleness={"max_staleness": "inf"}),
    ]
    assert len({c.fingerprint() for c in [base, *changed]}) == 6


def test_the_configuration_needs_no_torch_mpi_or_hdf5() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'h5py', 'transformers'): sys.modules[name] = None\n"
        "import areal_hpc.config, areal_hpc.config.check, areal_hpc.check\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
