"""Rendering: a chat template turns messages into token ids, without touching sampled ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "~assistant-turn~"
_HISTORY = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]


class Renderer:
    """Turns messages into ids through the tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with a chat template.
        name: The model it belongs to, for messages to people.

    Raises:
        ValueError: If there is no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"model={name} has no chat template: add chat_template.jinja to the folder, "
                "or start from an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.end_of_turn = self._end_of_turn()
        self._last: tuple[list[dict[str, Any]], list[int]] = ([], [])

    @classmethod
    def from_pretrained(cls, model: str) -> Renderer:
        """Load the tokenizer of a model folder or Hub name."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        assert tokenizer is not None
        return cls(tokenizer, model)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of an opening conversation, up to where the policy takes over."""
        # The members of a group begin one after another, with the same messages.
        if messages != self._last[0]:
            ids = self._encode(self._render(messages, generate=True))
            self._last = (copy.deepcopy(messages), ids)
        return list(self._last[1])

    def continuation(self, messages: list[dict[str, Any]], last_token: int) -> list[int]:
        """Return the ids between a sampled turn and the next one.

        Args:
            messages: The new messages.
            last_token: The last id that was sampled; the template's end of turn is left out
                where the policy has written it itself.
        """
        ids = self._encode(self._after_turn(messages, generate=True))
        return ids[1:] if ids[:1] == [last_token] else ids

    def decode(self, token_ids: list[int]) -> str:
        """Return sampled ids as text, without special tokens."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def assistant_spans(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Return a conversation as ids, and which of them an assistant would have sampled.

        The pieces are those of a rollout: a turn is its content and the end of turn, and all else
        is context. Ends with the last assistant message.

        Raises:
            ValueError: If no message is from the assistant, or the first one is.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise ValueError(f"a conversation needs a question and an answer, got {messages!r}")
        ids = self.prompt(messages[: turns[0]])
        mask = [False] * len(ids)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            sampled = [*self._encode(messages[turn]["content"]), self.end_of_turn]
            ids += sampled
            mask += [True] * len(sampled)
            if following is not None:
                glue = self.continuation(messages[turn + 1 : following], self.end_of_turn)
                ids += glue
                mask += [False] * len(glue)
        return ids, mask

    def _end_of_turn(self) -> int:
        """Return the token that ends a turn: the template's, or else the end of sequence."""
        ids = self._encode(self._after_turn([], generate=False))
        if ids and ids[0] in self.tokenizer.added_tokens_decoder:
            return ids[0]
        return int(self.tokenizer.eos_token_id)

    def _after_turn(self, messages: list[dict[str, Any]], generate: bool) -> str:
        """Return the text that the template writes after an assistant's content."""
        text = self._render([*_HISTORY, *messages], generate)
        return text.partition(_PLACEHOLDER)[2]

    def _render(self, messages: list[dict[str, Any]], generate: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
