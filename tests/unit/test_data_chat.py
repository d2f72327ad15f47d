"""How a prompt is put to the model: word by word, with and without a template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc.config import DataConfig
from areal_hpc.data import DatasetError
from areal_hpc.data.chat import Chat
from areal_hpc.exits import Exit, RunError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined and not think %}no {% endif %}{% endif %}"
)


def chat(**settings: Any) -> Chat:
    return Chat(DataConfig.model_validate({"train": "unused", "chat": settings}))


@pytest.fixture
def solved(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "solved.jsonl"
    rows = [{"question": f"{i}+1?", "answer": f"It is\n#### {i + 1}"} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "layout": "gsm8k"}


class Characters:
    """A tokenizer of characters; 0 begins a text unless told otherwise."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=([0] if add_special_tokens else []) + [ord(c) for c in text])


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


# ----------------------------------------------------------------------------------------------- without a template
def test_by_default_the_prompt_is_all_there_is() -> None:
    assert chat().encoder(Characters())("1+1=") == [0, *map(ord, "1+1=")]


def test_system_and_examples_without_a_template(solved: dict[str, str]) -> None:
    one = chat(system="Be brief.", few_shot=2, examples=solved)
    assert one.plain("5+1?") == "Be brief.\n\n0+1?\nIt is\n#### 1\n\n1+1?\nIt is\n#### 2\n\n5+1?"
    assert one.encoder(Characters())("5+1?") == [0, *map(ord, one.plain("5+1?"))]
    assert chat(examples=solved).plain("5+1?") == "5+1?", "examples are off until few_shot says how many"


# -------------------------------------------------------------------------------------------------- with a template
@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A real one: the template goes through the code of transformers."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(vocab={**{chr(i): i for i in range(256)}, "<s>": 256}, merges=[]))
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def test_a_template_of_a_file_with_examples_as_turns(tokenizer: Any, solved: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert chat().encoder(tokenizer)("x")[0] == 256, "without a template it is the tokenizer that begins with <s>"
    settings = {"template": str(tmp_path / "chat.jinja"), "system": "Be brief.", "few_shot": 1, "examples": solved}
    ids = chat(**settings).encoder(tokenizer)("5+1?")
    assert ids[0] == 256 and 256 not in ids[1:], "the template writes <s>, the tokenizer does not"
    assert text_of(ids[1:]) == "<system>Be brief.</><user>0+1?</><assistant>It is\n#### 1</><user>5+1?</><assistant>"
    assert text_of(chat(**settings, options={"think": False}).encoder(tokenizer)("x")).endswith("<assistant>no ")


def test_the_template_of_the_model(tokenizer: Any) -> None:
    with pytest.raises(RunError, match="the tokenizer of the model has no chat template") as caught:
        chat(template="model").encoder(tokenizer)
    assert caught.value.code == Exit.CONFIG
    tokenizer.chat_template = TEMPLATE
    assert text_of(chat(template="model").encoder(tokenizer)("x")[1:]) == "<user>x</><assistant>"
    tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system text here') }}", "no system text here"),
        ("{% for %}", "cannot be filled in: TemplateSyntaxError"),
        ("{{ messages[0].content.no.such }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_does_so_before_anything_is_generated(
    tokenizer: Any, tmp_path: Path, template: str, reason: str
) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    with pytest.raises(RunError, match=reason) as caught:
        chat(template=str(tmp_path / "chat.jinja")).encoder(tokenizer)
    assert caught.value.code == Exit.CONFIG and "\n" not in caught.value.reason


# ------------------------------------------------------------------------------------------------- what is not there
def test_a_template_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none.jinja cannot be read: .*No such file"):
        chat(template=str(tmp_path / "none.jinja"))


def test_examples_that_are_too_few_or_have_no_answer(solved: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"solved.jsonl: holds 3 of 4 prompts that are needed"):
        chat(few_shot=4, examples=solved)
    (tmp_path / "bare.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(RunError, match=r"bare.jsonl has no answers to show"):
        chat(few_shot=1, examples={"path": str(tmp_path / "bare.jsonl")})
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(DatasetError, match=r"bad.jsonl:1: "):
        chat(few_shot=1, examples={"path": str(tmp_path / "bad.jsonl")})
