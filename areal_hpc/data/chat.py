"""How a prompt is put to the model: system text, solved examples, chat template. Rollout ranks do it, nobody else.

The controller and the reward function see the prompt as its layout made it. The tokenizer is whatever offers
`apply_chat_template` and `__call__` as those of transformers do; without a template none is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_hpc.config import DataConfig
from areal_hpc.data.reading import first_prompts
from areal_hpc.exits import Exit, RunError


class Chat:
    """The settings under data.chat, with the examples read.

    Raises:
        DatasetError: the examples cannot be read, or there are fewer.
        RunError: CONFIG, an example has no answer, or the template cannot be read.
    """

    def __init__(self, data: DataConfig) -> None:
        self.settings = settings = data.chat
        self.examples: list[tuple[str, str]] = []
        if settings.few_shot and settings.examples is not None:
            pairs = first_prompts(settings.examples, data, settings.few_shot)
            self.examples = [(prompt.text, solution) for prompt, solution in pairs]
            if not all(solution for _, solution in self.examples):
                raise RunError(Exit.CONFIG, f"data.chat.examples: {settings.examples.path} has no answers to show")
        self.template: str | None = None
        if settings.template not in ("none", "model"):
            try:
                self.template = Path(settings.template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = f"data.chat.template: {settings.template} cannot be read: {error}"
                raise RunError(Exit.CONFIG, reason) from None

    def plain(self, prompt: str) -> str:
        """The prompt without a template: system text, examples and prompt, a blank line between them."""
        shown = [f"{question}\n{answer}" for question, answer in self.examples]
        return "\n\n".join([*([self.settings.system] if self.settings.system else []), *shown, prompt])

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The prompt as a conversation, the examples as earlier turns of it."""
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        turns = [
            {"role": role, "content": text}
            for example in self.examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        return [*system, *turns, {"role": "user", "content": prompt}]

    def encoder(self, tokenizer: Any) -> Callable[[str], list[int]]:
        """Prompt -> token ids.

        A template writes special tokens itself, so that the tokenizer adds none then.

        Raises:
            RunError: CONFIG, the tokenizer has no template, or the template cannot be filled in.
        """
        if self.settings.template == "none":
            return lambda prompt: list(tokenizer(self.plain(prompt)).input_ids)
        if self.template is None and not getattr(tokenizer, "chat_template", None):
            reason = "data.chat.template: the tokenizer of the model has no chat template; give a Jinja file, or none"
            raise RunError(Exit.CONFIG, reason)

        def encode(prompt: str) -> list[int]:
            return list(tokenizer(self.render(tokenizer, prompt), add_special_tokens=False).input_ids)

        encode("?")  # a template that fails does so before anything is generated
        return encode

    def render(self, tokenizer: Any, prompt: str) -> str:
        """The conversation in the words of the template, up to where the answer begins."""
        try:
            return str(
                tokenizer.apply_chat_template(
                    self.messages(prompt),
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.settings.options,
                )
            )
        except Exception as error:  # whatever Jinja or the template itself raises
            said = " ".join(str(error).split())
            reason = f"data.chat.template: {self.settings.template} cannot be filled in: {type(error).__name__}: {said}"
            raise RunError(Exit.CONFIG, reason) from None
